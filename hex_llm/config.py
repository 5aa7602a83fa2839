"""What a server is told before it starts: one frozen dataclass for each side, every field with its flag.

A field carries all that is known of its flag: help, allowed values, other names, environment variables.
`hex_llm.flags` makes the command line, the help and the README's table from that. A config is checked when it
is made and never changed; derive with `replace`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hex_llm.errors import ConfigError
from hex_llm.flag_fields import MAX_INT, flag, flags_of

HEX_LLM_PREFILL_PADDING = 512  # its default of prefill_len_padding


def check_fields(config: EngineConfig | ServerConfig) -> None:
    for described in flags_of(type(config)):
        described.check(getattr(config, described.name))


model_flag = partial(flag, "Model")
engine_flag = partial(flag, "Inference engine")
memory_flag = partial(flag, "Memory")
lora_flag = partial(flag, "LoRA")
server_flag = partial(flag, "Server")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine is told: the model, the devices, the shapes of its steps, its memory."""

    model: str | None = model_flag(
        None,
        "The model: a Hugging Face id, gs://bucket/folder, a local folder of safetensors, or a GGUF file. "
        "May also be given without its name.",
        unset="the embedded SmolLM2-135M-Instruct",
        # Where a deployment has both, its artifacts are the model and MODEL_ID is only what it is called.
        env=("AIP_STORAGE_URI", "MODEL_ID"),
    )
    tokenizer: str | None = model_flag(
        None, "The tokenizer: a Hugging Face id, gs://bucket/folder or a local path.", unset="the model's"
    )
    tokenizer_mode: str = model_flag(
        "auto",
        "auto takes the fast tokenizer if there is one; slow takes tokenizer.model through sentencepiece.",
        choices=("auto", "slow"),
    )
    skip_tokenizer_init: bool = model_flag(False, "Load no tokenizer: token ids in, token ids out, no text.")
    trust_remote_code: bool = model_flag(
        False,
        "Either way, a model whose config asks for code of its own is served by the built-in architecture of "
        "that name; code from a model's folder is never executed.",
    )
    load_format: str = model_flag(
        "auto",
        "auto loads the model's weights; dummy makes random ones from its config.json.",
        choices=("auto", "dummy"),
        form="auto or dummy: only safetensors and GGUF files are loaded, nothing pickled",
    )
    dtype: str = model_flag(
        "auto",
        "The type of weights and activations; auto is bfloat16, on CPUs float32.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = model_flag(
        None,
        "int8, int4 and fp8 quantize a plain model's layers while they are loaded; none expands what is "
        "quantized. Else how the model is quantized already, which config.json says too.",
        unset="as config.json says",
        choices=(
            "none",
            "int8",
            "int4",
            "awq",
            "gptq",
            "bitsandbytes",
            "fp8",
            "fbgemm_fp8",
            "mxfp4",
            "compressed-tensors",
        ),
    )
    revision: str | None = model_flag(
        None, "The branch, tag or commit of the model on the Hugging Face hub.", unset="main"
    )
    hf_token: str | None = model_flag(
        None,
        "The access token for the Hugging Face hub.",
        env=("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
        secret=True,
    )
    download_dir: str = model_flag(
        "~/.cache/hex_llm", "The folder that keeps downloaded models.", env=("HEX_LLM_CACHE",)
    )
    max_model_len: int | None = model_flag(
        None,
        "The longest input plus output, in tokens.",
        unset="as config.json says",
        env=("MAX_TOTAL_TOKENS",),
    )
    sliding_window: int | None = model_flag(
        None, "Overrides the model's attention window, in tokens.", unset="the model's"
    )
    runner: str = model_flag(
        "auto",
        "What is served: texts (generate), embeddings and scores (the others), or both.",
        choices=("auto", "generate", "pooling", "embed", "score"),
        aliases=("task",),
    )
    pooler_config: str | None = model_flag(
        None,
        'How embeddings are made, as JSON: {"pooling_type": "LAST", "MEAN" or "CLS", "normalize": true}; of '
        'a reranker, {"classifier_from_token": ["no", "yes"]}.',
        unset="as the model's files say, else LAST, normalised",
        aliases=("override_pooler_config",),
    )
    generation_config: str = model_flag(
        "auto",
        "Where requests' defaults of sampling come from: auto takes the model's generation_config.json, vllm "
        "and none take none, and a folder's is taken instead.",
    )
    max_logprobs: int = model_flag(
        20, "The most log-probabilities of likeliest tokens that a request may ask for; -1: of all.", low=-1
    )
    seed: int = model_flag(0, "Seeds everything; a request's own seed wins for that request.", low=0)

    num_hosts: int = engine_flag(
        1,
        "The hosts that one replica spans or that, with data_parallel_size or disagg_topo, the replicas or "
        "workers are divided over.",
        aliases=("nnodes",),
        deprecated=("num_nodes",),
    )
    host_index: int = engine_flag(
        0, "Which of these hosts this one is; 0 answers clients.", low=0, aliases=("node_rank",)
    )
    coordinator_address: str | None = engine_flag(
        None,
        "HOST:PORT of host 0, where the hosts find each other.",
        unset="as a TPU slice's or a LeaderWorkerSet's environment says",
        aliases=("dist_init_addr",),
    )
    cluster_key: str | None = engine_flag(
        None,
        "A secret of at least 16 characters that all hosts share, where replicas or workers are on several.",
        unset="with Ray, a new one at every start",
        env=("HEX_LLM_CLUSTER_KEY",),
        pattern=r".{16,}",
        form="at least 16 characters",
        secret=True,
    )
    disagg_topo: str | None = engine_flag(
        None,
        "Serve with P prefill and D decode workers, each of tensor_parallel_size devices of one host.",
        pattern=r"[1-9][0-9]{0,3},[1-9][0-9]{0,3}",
        form='"P,D": the numbers of prefill and of decode workers, as in "3,1"',
    )
    data_parallel_size: int = engine_flag(
        1, "The replicas of the model, each with tensor_parallel_size devices and a process of its own."
    )
    tensor_parallel_size: int = engine_flag(
        1,
        "The devices of one replica; on Vertex AI, if it is not given, as many as AIP_MACHINE_TYPE has.",
        env=("NUM_SHARD",),
    )
    worker_distributed_method: str = engine_flag(
        "mp",
        "Who starts what runs on other hosts: their own command lines, or Ray.",
        choices=("mp", "ray"),
        aliases=("distributed_executor_backend",),
        switches={"use_ray": ("ray", "mp")},
        deprecated=("use_ray",),
    )
    ray_address: str | None = engine_flag(
        None, "The Ray cluster's.", unset="that of this node", env=("RAY_ADDRESS",)
    )
    enable_jit: bool = engine_flag(
        True,
        "Compile each step; without it steps run op by op, slowly, with the same results.",
        switches={"enforce_eager": (False, True)},
    )
    warmup: bool = engine_flag(True, "Compile every shape before the server is ready.")
    recompile: str = engine_flag(
        "warn",
        "When a step has to be compiled after the warm-up: warn, or end its requests with an error.",
        choices=("warn", "error"),
    )
    max_prefill_seqs: int | None = engine_flag(
        None,
        "The most sequences prefilled in one step.",
        unset="32 on GPUs, 8 on TPUs and CPUs (Hex-LLM: 1)",
    )
    prefill_seqs_padding: int | None = engine_flag(
        None, "The prefill batch is padded to a multiple of this.", unset="not padded (Hex-LLM: 8)"
    )
    prefill_len_padding: int | None = engine_flag(
        None,
        "The tokens of a step that prefills are padded to a multiple of this, below it to a power of two. "
        "Also the unit of prefix-cache hits.",
        unset="as pads little; 512 as the unit of hits (Hex-LLM: 512)",
        deprecated=("tokens_pad_multiple",),
    )
    max_decode_seqs: int | None = engine_flag(
        None,
        "The most sequences decoded in one step.",
        unset="1024 on GPUs with 40 GiB free after the weights, 256 on smaller ones and TPUs, 32 on CPUs; "
        "not more than max_num_batched_tokens (Hex-LLM: 256)",
        aliases=("max_running_seqs", "max_num_seqs"),
    )
    decode_seqs_padding: int | None = engine_flag(
        None,
        "The decode batch is padded to a multiple of this, below it to 1, 2 or 4.",
        unset="8 (Hex-LLM: 8)",
        deprecated=("seqs_pad_multiple",),
    )
    decode_blocks_padding: int | None = engine_flag(
        None,
        "The width of the block table is padded to a multiple of this.",
        unset="not padded (Hex-LLM: 128)",
    )
    enable_prefix_cache_hbm: bool | None = engine_flag(
        None,
        "Keep the KV cache of shared prompt prefixes for later requests.",
        unset="true, with hits by block (Hex-LLM: false)",
        aliases=("enable_prefix_caching",),
    )
    prefix_cache_unit: str | None = engine_flag(
        None,
        "What prefix-cache hits are counted in: multiples of prefill_len_padding, or single blocks.",
        unset="prefill_len_padding if enable_prefix_cache_hbm is given, else block",
        choices=("block", "prefill_len_padding"),
    )
    enable_chunked_prefill: bool | None = engine_flag(
        None,
        "Run chunks of prompts and decodes in one step; a long prompt then never holds up the others.",
        unset="true (Hex-LLM: false)",
    )
    max_num_batched_tokens: int | None = engine_flag(
        None,
        "The most tokens in one step. Without chunked prefill it limits the prompts that are put together, "
        "the last of which may be cut; a longer one runs alone.",
        unset="8192 on GPUs with 40 GiB free after the weights, 4096 on smaller ones and TPUs, 256 on CPUs",
    )
    target_step_ms: int | None = engine_flag(
        None,
        "The milliseconds that a step shall take at most while someone decodes: as many tokens of prompts "
        "are taken in as that allows. It needs the warm-up, which measures steps, and chunked prefill.",
        unset="77 on GPUs with 40 GiB free after the weights, 100 on smaller ones, 70 on TPUs, 200 on CPUs",
    )
    async_scheduling: bool = engine_flag(True, "Prepare and send off the next step while one runs.")
    max_concurrent_requests: int | None = engine_flag(
        None,
        "The most sequences running and waiting; more are turned away.",
        unset="16 times max_decode_seqs, at least 1,024; less if a tenth of the host's memory holds no more",
        env=("MAX_CONCURRENT_REQUESTS",),
    )
    allow_priority: bool = engine_flag(
        False,
        "Let requests have a priority: the lower, the earlier they run. Who waits comes first in the end.",
    )
    batch_mode: str = engine_flag(
        "continuous", "There is no other mode; taken for first-generation commands.", choices=("continuous",)
    )
    profile: str | None = engine_flag(
        None,
        "A folder for a trace of the first 100 steps, to be opened in ui.perfetto.dev or XProf.",
        unset="no trace",
    )

    hbm_utilization_factor: float = memory_flag(
        0.9,
        "The share of the device memory that is free after the weights, given to the KV cache.",
        low=0,
        high=1,
        aliases=("gpu_memory_utilization",),
    )
    num_blocks: int | None = memory_flag(
        None,
        "The blocks of the KV cache; overrides hbm_utilization_factor.",
        unset="measured",
        aliases=("num_gpu_blocks_override",),
    )
    block_size: int = memory_flag(32, "The tokens in one block.", choices=(8, 16, 32, 2048, 8192))
    kv_cache_dtype: str = memory_flag(
        "auto",
        "The type of the KV cache; auto takes that of the activations. int8 and fp8 keep a scale for each "
        "key and value, and need no calibration.",
        choices=("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "int8"),
    )

    enable_lora: bool = lora_flag(False, "Let each request name an adapter.")
    max_lora_rank: int = lora_flag(16, "The largest rank of an adapter.")
    max_loras: int = lora_flag(8, "The most adapters in one step: those kept in device memory.")
    max_num_mem_cached_lora: int = lora_flag(
        16, "The most adapters kept in the host's memory.", aliases=("max_cpu_loras",)
    )
    enable_lora_cache: bool = lora_flag(True, "Keep downloaded adapter files.")
    lora_modules: str | None = lora_flag(
        None,
        "Adapters by name: name=place, several with commas or spaces between them, or vLLM's JSON.",
        many=True,
    )
    allowed_lora_sources: str = lora_flag(
        "gs://,hf://",
        "Where requests may name adapters from, with commas: gs:// or a part of it, hf:// (the hub) or one "
        "owner there, and local folders, which begin with /.",
        pattern=r"(gs://|hf://|/)[^,]*(,(gs://|hf://|/)[^,]*)*",
        form="a list of gs://..., hf://... and /folder",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        budget, most = self.max_num_batched_tokens, self.max_decode_seqs
        if self.enable_chunked_prefill is not False and (budget or MAX_INT) < (most or 0):
            raise ConfigError(f"--max_num_batched_tokens={budget}: must be at least max_decode_seqs, {most}")

    @property
    def cache_dir(self) -> Path:
        return Path(self.download_dir).expanduser()

    @property
    def devices_per_replica(self) -> int:
        return self.tensor_parallel_size * self.num_groups

    @property
    def num_groups(self) -> int:
        """Of a replica's devices: those that prefill, and those that decode."""
        return 1 if self.disagg_topo is None else sum(map(int, self.disagg_topo.split(",")))

    @property
    def replicas_per_host(self) -> int:
        num_hosts = 1 if self.coordinator_address is None else self.num_hosts
        return max(self.data_parallel_size // num_hosts, 1)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the HTTP side is told: its address, its names and keys, its log."""

    host: str = server_flag("0.0.0.0", "The address to listen on.")
    port: int = server_flag(
        7080, "The port to listen on; 0 picks a free one.", low=0, high=65535, env=("AIP_HTTP_PORT", "PORT")
    )
    served_model_name: str | None = server_flag(
        None, "The model's name in requests and answers.", unset="the value of --model", env=("MODEL_ID",)
    )
    strict_model_name: bool = server_flag(
        False,
        "Refuse requests that name another model than --served_model_name, as is always done with "
        "--enable_lora; else any name is taken.",
    )
    api_server_count: int = server_flag(
        1,
        "The front ends that share the address, each a process: one carries about 30,000 tokens a second.",
        high=1000,
    )
    uds: str | None = server_flag(None, "A unix socket to listen on, instead of an address.")
    root_path: str | None = server_flag(
        None,
        "A prefix that paths may have, where a proxy does not take it away.",
        pattern=r"(/[^/{}\s]+)+",
        form="a path that begins with / and does not end with it",
    )
    api_key: str | None = server_flag(
        None, "The key that every request must bear.", secret=True, env=("VLLM_API_KEY",)
    )
    chat_template: str | None = server_flag(
        None, "A file with a chat template, or the template itself.", unset="the model's"
    )
    enable_response_store: bool = server_flag(
        False,
        "Keep what /v1/responses answers, up to 128 MiB, to be asked for again and to be gone on from.",
        env=("VLLM_ENABLE_RESPONSES_API_STORE",),
    )
    return_tokens_as_token_ids: bool = server_flag(
        False, "Log-probabilities name tokens by their ids, whether or not a request asks for that."
    )
    enable_force_include_usage: bool = server_flag(
        False, "Every chunk of a stream tells the usage, as does one at the end."
    )
    enable_request_id_headers: bool = server_flag(
        False, "Every reply has an X-Request-Id, and not only those to requests that have one."
    )
    always_on: bool = server_flag(
        True,
        "Always True: what these ask for is done here in any case.",
        choices=(True,),
        form="True",
        aliases=(
            *(
                "enable_prompt_tokens_details",
                "enable_server_load_tracking",
                "enable_tokenizer_info_endpoint",
            ),
            "exclude_tools_when_tool_choice_none",
        ),
    )
    predict_output_format: str = server_flag(
        "prompt_output",
        'The text of a /generate prediction: "Prompt:...Output:...", or the output alone.',
        choices=("prompt_output", "raw"),
    )
    tool_call_parser: str | None = server_flag(
        None,
        "The format of the model's tool calls, by vLLM's names; none: the model makes no calls of its own.",
        unset="found out from the chat template",
    )
    enable_auto_tool_choice: bool = server_flag(True, "Let models decide whether they call tools.")
    reasoning_parser: str | None = server_flag(
        None,
        "The format of the model's reasoning, by vLLM's names; none: it is part of the answer.",
        unset="found out from the chat template",
    )
    allow_runtime_lora_updating: bool = server_flag(
        False,
        "Have /v1/load_lora_adapter and /v1/unload_lora_adapter, by which adapters get names.",
        env=("VLLM_ALLOW_RUNTIME_LORA_UPDATING",),
    )
    allow_restart: bool = server_flag(
        False, "Have POST /admin/restart, which restarts the replicas one after another, failing no request."
    )
    trust_request_chat_template: bool = server_flag(
        False, "Let requests bring a chat template, which is code: sandboxed, but not limited in time."
    )
    predict_route: str | None = server_flag(
        None,
        "A further path that answers as /generate does.",
        pattern=r"/[^{}\s]*",
        form="a path that begins with /",
        env=("AIP_PREDICT_ROUTE",),
    )
    health_route: str | None = server_flag(
        None,
        "A further path that answers as GET /health does, without the key.",
        pattern=r"/[^{}\s]*",
        form="a path that begins with /",
        env=("AIP_HEALTH_ROUTE",),
    )
    disable_log_requests: bool = server_flag(
        False, "Do not log each request.", switches={"enable_log_requests": (False, True)}
    )
    log_level: str = server_flag(
        "INFO",
        "The least serious messages to log; any case.",
        choices=("DEBUG", "INFO", "WARNING", "WARN", "ERROR", "CRITICAL", "FATAL", "NOTSET"),
        env=("HEX_LLM_LOG_LEVEL",),
    )
    verbose_log: bool = server_flag(False, "Log the detail of every step.", env=("HEX_LLM_VERBOSE_LOG",))
    log_format: str = server_flag(
        "text", "The log's lines: text with key=value, or JSON objects.", choices=("text", "json")
    )
    otlp_traces_endpoint: str | None = server_flag(
        None,
        "Send OpenTelemetry's traces there, over OTLP: gRPC, or, with OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="
        "http/protobuf, HTTP.",
        unset="no traces",
    )
    max_request_bytes: int = server_flag(10 << 20, "The largest body of a request; larger ones get a 413.")
    request_timeout: int = server_flag(
        0,
        "The seconds that a request may take in all; then a 504, or an error that ends its stream. 0: any.",
        low=0,
    )
    receive_timeout: int = server_flag(
        60, "The seconds that a client gets to send a request's head, and again its body."
    )
    send_timeout: int = server_flag(60, "The seconds after which a client that does not read is cut off.")
    keep_alive_timeout: int = server_flag(5, "The seconds that a connection is kept for the next request.")
    health_timeout: int = server_flag(
        60,
        "The seconds without a step, though there is work, after which the server is unhealthy; a step that "
        "is under way may take --step_timeout.",
    )
    stuck_timeout: int = server_flag(
        20, "The seconds without any sign of life after which the engine is killed and started again."
    )
    step_timeout: int = server_flag(
        300,
        "The seconds that one step may take, compiling not counted; then the engine is killed and started "
        "again. 0: any.",
        low=0,
    )
    drain_timeout: int = server_flag(
        20,
        "The seconds that running requests get to finish after SIGTERM or SIGINT.",
        low=0,
        aliases=("shutdown_timeout",),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("allow_runtime_lora_updating", "enable_response_store"):
            if self.api_server_count > 1 and getattr(self, name):
                count = f"--api_server_count={self.api_server_count}"
                raise ConfigError(f"{count}: not with --{name}, of which one front end alone would know")
