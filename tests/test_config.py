from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest

from hex_llm.config import EngineConfig, ServerConfig
from hex_llm.errors import ConfigError
from hex_llm.flag_fields import flags_of

SERVER_DEFAULTS = {
    "tool_call_parser": None,
    "enable_auto_tool_choice": True,
    "reasoning_parser": None,
    "allow_restart": False,
    "api_server_count": 1,
    "enable_response_store": False,
    "trust_request_chat_template": False,
    "allow_runtime_lora_updating": False,
    "predict_route": None,
    "health_route": None,
    "log_format": "text",
    "otlp_traces_endpoint": None,
    "max_request_bytes": 10 << 20,
    "request_timeout": 0,
    "receive_timeout": 60,
    "send_timeout": 60,
    "keep_alive_timeout": 5,
    "health_timeout": 60,
    "stuck_timeout": 20,
    "step_timeout": 300,
    "drain_timeout": 20,
    "host": "0.0.0.0",
    "port": 7080,
    "served_model_name": None,
    "strict_model_name": False,
    "api_key": None,
    "uds": None,
    "root_path": None,
    "chat_template": None,
    "return_tokens_as_token_ids": False,
    "enable_force_include_usage": False,
    "enable_request_id_headers": False,
    "always_on": True,
    "predict_output_format": "prompt_output",
    "disable_log_requests": False,
    "log_level": "INFO",
    "verbose_log": False,
}
ENGINE_DEFAULTS = {
    "model": None,
    "tokenizer": None,
    "tokenizer_mode": "auto",
    "skip_tokenizer_init": False,
    "trust_remote_code": False,
    "load_format": "auto",
    "dtype": "auto",
    "quantization": None,
    "runner": "auto",
    "pooler_config": None,
    "revision": None,
    "hf_token": None,
    "download_dir": "~/.cache/hex_llm",
    "max_model_len": None,
    "sliding_window": None,
    "generation_config": "auto",
    "max_logprobs": 20,
    "seed": 0,
    "num_hosts": 1,
    "host_index": 0,
    "coordinator_address": None,
    "cluster_key": None,
    "disagg_topo": None,
    "data_parallel_size": 1,
    "tensor_parallel_size": 1,
    "worker_distributed_method": "mp",
    "ray_address": None,
    "enable_jit": True,
    "warmup": True,
    "max_prefill_seqs": None,
    "prefill_seqs_padding": None,
    "prefill_len_padding": None,
    "max_decode_seqs": None,
    "decode_seqs_padding": None,
    "decode_blocks_padding": None,
    "enable_prefix_cache_hbm": None,
    "prefix_cache_unit": None,
    "enable_chunked_prefill": None,
    "max_num_batched_tokens": None,
    "target_step_ms": None,
    "async_scheduling": True,
    "allow_priority": False,
    "recompile": "warn",
    "max_concurrent_requests": None,
    "batch_mode": "continuous",
    "profile": None,
    "hbm_utilization_factor": 0.9,
    "num_blocks": None,
    "block_size": 32,
    "kv_cache_dtype": "auto",
    "enable_lora": False,
    "max_lora_rank": 16,
    "enable_lora_cache": True,
    "max_loras": 8,
    "max_num_mem_cached_lora": 16,
    "lora_modules": None,
    "allowed_lora_sources": "gs://,hf://",
}


@pytest.mark.parametrize(
    ("config", "defaults"), [(EngineConfig(), ENGINE_DEFAULTS), (ServerConfig(), SERVER_DEFAULTS)]
)
def test_defaults_are_those_of_the_contract(config: EngineConfig | ServerConfig, defaults: dict) -> None:
    assert {f.name: getattr(config, f.name) for f in fields(config)} == defaults


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_size": 7}, "--block_size=7: must be one of 8, 16, 32, 2048, 8192"),
        ({"max_model_len": 0}, "--max_model_len=0: must be a whole number from 1 to 2^31-1"),
        ({"max_model_len": 2**31}, "--max_model_len=2147483648: must be a whole number from 1 to 2^31-1"),
        ({"num_blocks": True}, "--num_blocks=True: must be a whole number from 1 to 2^31-1"),
        ({"num_blocks": 2.0}, "--num_blocks=2.0: must be a whole number from 1 to 2^31-1"),
        ({"seed": "0"}, None),
        ({"seed": None}, None),
        ({"seed": -1}, "--seed=-1: must be a whole number from 0 to 2^31-1"),
        ({"warmup": 1}, "--warmup=1: must be true or false"),
        ({"hbm_utilization_factor": 0}, "--hbm_utilization_factor=0: must be a number above 0 and at most 1"),
        ({"hbm_utilization_factor": 1.01}, None),
        ({"hbm_utilization_factor": float("nan")}, None),
        ({"hbm_utilization_factor": float("inf")}, None),
        ({"hbm_utilization_factor": True}, None),
        ({"model": ""}, "--model=: must be a non-empty string"),
        ({"model": Path("folder")}, None),
        ({"dtype": "float64"}, "--dtype=float64: must be one of auto, float32, bfloat16, float16"),
        ({"dtype": "a\nb"}, "--dtype='a\\nb': must be one of auto, float32, bfloat16, float16"),
        ({"disagg_topo": "0,1"}, None),
        ({"data_parallel_size": 0}, "--data_parallel_size=0: must be a whole number from 1 to 2^31-1"),
        ({"allowed_lora_sources": "relative"}, None),
    ],
)
def test_engine_refuses_a_wrong_value(values: dict, message: str | None) -> None:
    with pytest.raises(ConfigError) as refusal:
        EngineConfig(**values)
    assert str(refusal.value).startswith(f"--{next(iter(values))}=" if message is None else message)


@pytest.mark.parametrize("values", [{"port": 65536}, {"port": -1}, {"host": " "}, {"log_level": "loud"}])
def test_server_refuses_a_wrong_value(values: dict) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(values))}="):
        ServerConfig(**values)


def test_edges_are_allowed() -> None:
    EngineConfig(hbm_utilization_factor=1, seed=2**31 - 1, max_model_len=1)
    ServerConfig(port=0)


def test_a_config_is_derived_and_never_changed() -> None:
    config = EngineConfig()
    with pytest.raises(FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]
    assert replace(config, seed=1).seed == 1
    with pytest.raises(ConfigError):
        replace(config, seed=-1)


def test_secrets_are_not_printed() -> None:
    engine = EngineConfig(hf_token="s3cret", cluster_key="s3cret s3cret s3cret")
    assert "s3cret" not in f"{engine} {ServerConfig(api_key='s3cret')}"
    with pytest.raises(ConfigError, match=r"--api_key=\*\*\*"):
        ServerConfig(api_key=["s3cret"])  # type: ignore[arg-type]


def test_cache_dir_is_below_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert EngineConfig().cache_dir == Path("/somewhere/.cache/hex_llm")


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_every_field_is_described(config: type) -> None:
    for flag in flags_of(config):
        assert flag.kind in (bool, int, float, str)
        assert flag.help.endswith(".")
        assert flag.allows(flag.default)
