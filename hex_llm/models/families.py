"""Model families as data: one short function each, from a Hugging Face config.json to a ModelSpec."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from hex_llm.errors import ModelError
from hex_llm.kernels.attention import Mask
from hex_llm.models.hf_config import HFConfig, shown
from hex_llm.models.rope_scaling import rope_from, rope_settings, rope_type
from hex_llm.models.spec import CheckpointNames, Experts, Heads, Layer, ModelSpec, NormNames, Rope

GEMMA2_NORMS = NormNames(
    attn_post="post_attention_layernorm",
    ffn="pre_feedforward_layernorm",
    ffn_post="post_feedforward_layernorm",
)
OLMO_NORMS = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
MIXTRAL_NAMES = CheckpointNames(ffn="block_sparse_moe.", expert=("w1", "w3", "w2"))
# What the configs of the larger ones leave out.
GEMMA3_SIZES = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}
GEMMA3_SOFTCAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
GEMMA3 = {"max_position_embeddings": 131072, **GEMMA3_SIZES, **GEMMA3_SOFTCAPS}
GEMMA4 = {"final_logit_softcapping": None, "sliding_window": 512, "hidden_size_per_layer_input": 256}
GEMMA4_ROPES = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25}}
GEMMA4_NAMES = CheckpointNames(norms=GEMMA2_NORMS, layer_scale="layer_scalar")
GEMMA4_MOE_NAMES = CheckpointNames(
    layer_scale="layer_scalar",
    ffn="",
    norms=GEMMA2_NORMS._replace(
        routed="pre_feedforward_layernorm_2",
        routed_post="post_feedforward_layernorm_2",
        shared_post="post_feedforward_layernorm_1",
    ),
    router="router.proj",
    router_norm="router.scale",
    expert_scales="router.per_expert_scale",
    shared_expert="mlp",
    stacked_experts="outputs",
)
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
SLIDING, FULL = WINDOWED = ("sliding_attention", "full_attention")
CHUNKED = ("chunked_attention", FULL)


def baseline(c: HFConfig, *, theta: float = 10_000.0, interleaved: bool = False) -> ModelSpec:
    """What all families share; every layer alike."""
    num_layers, heads = c.integer("num_hidden_layers"), c.integer("num_attention_heads")
    hidden, kv_heads = c.integer("hidden_size"), c.integer("num_key_value_heads", heads)
    head_dim = c.integer("head_dim", max(hidden // heads, 1))
    _check_sharing(heads, kv_heads)
    layer = Layer(
        rope_from(c, head_dim, theta, interleaved=interleaved), ffn_size=c.integer("intermediate_size")
    )
    return ModelSpec(
        family=c.text("model_type", "llama"),
        vocab_size=c.integer("vocab_size"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=(layer,) * num_layers,
        max_len=_max_len(c),
        norm_eps=c.positive("rms_norm_eps", 1e-6),
        activation=_activation(c.text("hidden_act", "silu")),
        tied=c.boolean("tie_word_embeddings"),
        eos_ids=c.ids("eos_token_id"),
    )


def _check_sharing(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ModelError(
            f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly"
        )


def _max_len(c: HFConfig) -> int:
    """Linear, dynamic and yarn scalings stretch the length that the config names; the others name the end."""
    scaling = rope_settings(c)
    length = c.integer("max_position_embeddings", 2048)
    kind = rope_type(scaling)
    if kind in ("linear", "dynamic"):
        length = int(length * scaling.positive("factor"))
    if kind == "yarn":
        original = scaling.integer("original_max_position_embeddings", length)
        length = max(length, int(original * scaling.positive("factor", 1.0)))
    return HFConfig({"max_position_embeddings": length}).integer("max_position_embeddings")


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ModelError(
            f"config.json: activation {shown(name)} is unknown; known are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _layered(spec: ModelSpec, **columns: Iterable[Any]) -> ModelSpec:
    """With a value for each layer in the fields that are named."""
    rows = zip(spec.layers, zip(*columns.values(), strict=True), strict=True)
    return replace(
        spec, layers=tuple(replace(layer, **dict(zip(columns, row, strict=True))) for layer, row in rows)
    )


def _everywhere(spec: ModelSpec, **changes: Any) -> ModelSpec:
    return replace(spec, layers=tuple(replace(layer, **changes) for layer in spec.layers))


def _by_kind(spec: ModelSpec, kinds: Iterable[str], window: int | None) -> ModelSpec:
    return _layered(spec, mask=[Mask(window=window if kind == SLIDING else None) for kind in kinds])


def _roped_by_kind(spec: ModelSpec, c: HFConfig, kinds: list[str], *thetas: float) -> ModelSpec:
    """With rope fields of each kind's own, as newer configs have them; in older ones, layers with a window
    have no scaling, and `thetas` are what they do not say."""

    def rope(kind: str, head_dim: int) -> Rope:
        own: dict[str, Any] = {"rope_parameters": c.section("rope_parameters").section(kind).values}
        if kind == SLIDING:
            own |= {"rope_scaling": None, "rope_theta": None}
        return rope_from(HFConfig({**c.values, **own}), head_dim, thetas[WINDOWED.index(kind)])

    dims = [spec.heads_of(layer).dim for layer in spec.layers]
    ropes = {of: rope(*of) for of in set(zip(kinds, dims, strict=True))}
    return _layered(spec, rope=[ropes[of] for of in zip(kinds, dims, strict=True)])


def _biased(spec: ModelSpec, c: HFConfig, *, default: bool = False) -> ModelSpec:
    bias = c.boolean("attention_bias", default)
    return replace(spec, qkv_bias=bias, out_bias=bias)


def _experts(c: HFConfig, num: int, per_token: int, size: int, **kind: Any) -> Experts:
    """`num` and `per_token`: where the config does not say them."""
    names = [name for name in ("num_experts", "n_routed_experts") if c.get(name) is not None]
    num = c.integer(names[0] if names else "num_local_experts", num)
    return Experts(num, c.integer("num_experts_per_tok", per_token), size, **kind)


def _sparse(spec: ModelSpec, experts: Experts, which: Iterable[bool] | None = None) -> ModelSpec:
    """`which`: of the layers; None: all."""
    if experts.num_per_token > experts.num:
        raise ModelError(f"config.json: {experts.num_per_token} experts per token of only {experts.num}")
    which = [True] * len(spec.layers) if which is None else which
    return _layered(spec, experts=[experts if one else None for one in which])


def llama(c: HFConfig) -> ModelSpec:
    """Llama 2, 3, 3.1, 3.2, 3.3, Llama Guard, CodeLlama, SmolLM2."""
    return replace(_biased(baseline(c), c), ffn_bias=c.boolean("mlp_bias"))


def smollm3(c: HFConfig) -> ModelSpec:
    """Every fourth layer without rope, which may have a window."""
    c = HFConfig(c.values, {"tie_word_embeddings": True, "rope_theta": 2e6})
    spec = llama(c)
    roped = _roped(c, len(spec.layers))
    window = c.optional_int("sliding_window") if c.boolean("use_sliding_window") else None
    kinds = c.per_layer("layer_types", WINDOWED, [WINDOWED[r] for r in roped])
    return _layered(_by_kind(spec, kinds, window), rope=[spec.layers[0].rope if r else None for r in roped])


def _roped(c: HFConfig, num: int) -> list[int]:
    interval = c.integer("no_rope_layer_interval", 4)
    return c.per_layer("no_rope_layers", (0, 1), [int((i + 1) % interval != 0) for i in range(num)])


def granite(c: HFConfig) -> ModelSpec:
    """Granite 3, dense."""
    return replace(
        llama(c),
        embed_scale=c.positive("embedding_multiplier", 1.0),
        query_scale=c.positive("attention_multiplier", 1.0),
        residual_scale=c.positive("residual_multiplier", 1.0),
        logit_scale=1 / c.positive("logits_scaling", 1.0),
    )


def olmo2(c: HFConfig) -> ModelSpec:
    """Norms stand behind what layers do, and those of queries and keys are of all heads together."""
    c = HFConfig(c.values, {"rms_norm_eps": 1e-5})
    return replace(_biased(baseline(c), c), head_norm="all", names=CheckpointNames(norms=OLMO_NORMS))


def olmo3(c: HFConfig) -> ModelSpec:
    spec = olmo2(c)
    kinds = c.per_layer("layer_types", WINDOWED, [WINDOWED[i % 4 == 3] for i in range(len(spec.layers))])
    spec = _roped_by_kind(spec, c, kinds, 500_000.0, 500_000.0)
    return _by_kind(spec, kinds, c.integer("sliding_window", 4096))


def mistral(c: HFConfig) -> ModelSpec:
    """Mistral, Mistral Small 3 and Ministral 8B."""
    # An absent window means the first release's; null means none.
    window = c.optional_int("sliding_window") if "sliding_window" in c.values else 4096
    return _everywhere(baseline(c), mask=Mask(window=window))


def ministral3(c: HFConfig) -> ModelSpec:
    """Queries are sharpened behind the length that was trained before scaling."""
    c = HFConfig(c.values, {"head_dim": 128, "sliding_window": None, "rms_norm_eps": 1e-5})
    spec, scaling = mistral(c), c.section("rope_parameters")
    beta = scaling.optional_float("llama_4_scaling_beta")
    if beta is None:
        return spec
    original = scaling.integer("original_max_position_embeddings")
    return _everywhere(spec, query_temperature=(float(original), beta, 0))


def mixtral(c: HFConfig) -> ModelSpec:
    experts = _experts(c, 8, 2, c.integer("intermediate_size"))
    mask = Mask(window=c.optional_int("sliding_window"))
    spec = _everywhere(baseline(c, theta=1e6), mask=mask)
    return replace(_sparse(spec, experts), names=MIXTRAL_NAMES)


def minimax_m2(c: HFConfig) -> ModelSpec:
    head_dim = c.integer("head_dim", 128)
    share = c.integer("rotary_dim", head_dim) / head_dim
    own = {"head_dim": head_dim, "partial_rotary_factor": share}
    spec = baseline(HFConfig(c.values, own), theta=5e6)
    experts = _experts(c, 256, 8, c.integer("intermediate_size"), sigmoid=True, corrected=True)
    names = replace(MIXTRAL_NAMES, correction="e_score_correction_bias")
    return replace(_sparse(spec, experts), head_norm="all", names=names)


def qwen2(c: HFConfig) -> ModelSpec:
    spec = replace(baseline(c), qkv_bias=True)
    window = c.optional_int("sliding_window") if c.boolean("use_sliding_window") else None
    if window is None:
        return spec
    first = c.integer("max_window_layers", 28, low=0)
    default = [WINDOWED[i < first] for i in range(len(spec.layers))]
    return _by_kind(spec, c.per_layer("layer_types", WINDOWED, default), window)


def qwen3(c: HFConfig) -> ModelSpec:
    """Qwen3 and its embedders and rerankers."""
    return replace(_biased(qwen2(HFConfig(c.values, {"head_dim": 128})), c), head_norm="each")


def qwen3_moe(c: HFConfig) -> ModelSpec:
    spec = replace(_biased(baseline(c), c), head_norm="each")
    normalized, size = c.boolean("norm_topk_prob"), c.integer("moe_intermediate_size", 768)
    experts = _experts(c, 128, 8, size, normalized=normalized)
    if c.boolean("use_sliding_window"):
        spec = _everywhere(spec, mask=Mask(window=c.optional_int("sliding_window")))
    step, dense = c.integer("decoder_sparse_step", 1), c.ids("mlp_only_layers")
    return _sparse(spec, experts, [i not in dense and (i + 1) % step == 0 for i in range(len(spec.layers))])


def glm4_moe(c: HFConfig) -> ModelSpec:
    """GLM-4.5, 4.6 and 4.7."""
    c = HFConfig(c.values, {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5})
    if c.integer("n_group", 1) > 1:
        raise ModelError("config.json: n_group must be 1")
    spec, size = baseline(c), c.integer("moe_intermediate_size", 1408)
    shared_size, scale = size * c.integer("n_shared_experts", 1), c.positive("routed_scaling_factor", 1.0)
    kind = {"sigmoid": True, "corrected": True, "normalized": c.boolean("norm_topk_prob", True)}
    experts = _experts(c, 128, 8, size, shared_size=shared_size, scale=scale, **kind)
    first = c.integer("first_k_dense_replace", 1, low=0)
    return replace(
        _sparse(spec, experts, [i >= first for i in range(len(spec.layers))]),
        qkv_bias=c.boolean("attention_bias"),
        head_norm="each" if c.boolean("use_qk_norm") else None,
    )


def gpt_oss(c: HFConfig) -> ModelSpec:
    """Its experts' matrices are floats in one tensor, inputs first, or MXFP4."""
    c = HFConfig(c.values, {"head_dim": 64, "rms_norm_eps": 1e-5})
    if c.positive("swiglu_alpha", 1.702) != 1.702:
        raise ModelError("config.json: swiglu_alpha must be 1.702")
    spec = replace(_biased(baseline(c, theta=150_000.0), c, default=True), sinks=True)
    kinds = c.per_layer("layer_types", WINDOWED, [WINDOWED[i % 2] for i in range(len(spec.layers))])
    limit, size = c.positive("swiglu_limit", 7.0), c.integer("intermediate_size")
    experts = _experts(c, 128, 4, size, bias=True, limit=limit)
    is_packed = c.section("quantization_config").get("quant_method") == "mxfp4"
    names = CheckpointNames(
        router="router", stacked_experts=None if is_packed else "inputs", interleaved=True
    )
    spec = _by_kind(_sparse(spec, experts), kinds, c.integer("sliding_window", 128))
    return replace(spec, activation="quick_gelu", names=names)


def phi3(c: HFConfig) -> ModelSpec:
    """Phi-3 mini and medium, Phi-4, Phi-4-reasoning, Phi-4-mini."""
    spec = _everywhere(baseline(c), mask=Mask(window=c.optional_int("sliding_window")))
    return replace(spec, names=CheckpointNames(fused=True))


def gemma(c: HFConfig) -> ModelSpec:
    """Gemma and CodeGemma; their early configs say gelu and mean its tanh form."""
    spec = baseline(HFConfig(c.values, {"head_dim": 256, "tie_word_embeddings": True}))
    scale = spec.hidden_size**0.5
    return replace(_biased(spec, c), activation="gelu_tanh", norm_offset=1.0, embed_scale=scale)


def gemma2(c: HFConfig) -> ModelSpec:
    c = HFConfig(c.values, {"sliding_window": 4096, "query_pre_attn_scalar": 256})
    softcaps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    attn_cap, final_cap = (HFConfig(c.values, {k: v}).optional_float(k) for k, v in softcaps.items())
    spec = replace(
        gemma(c),
        activation=_activation(c.text("hidden_activation", "gelu_pytorch_tanh")),
        query_scale=c.positive("query_pre_attn_scalar") ** -0.5,
        attn_softcap=attn_cap,
        logit_softcap=final_cap,
        names=CheckpointNames(norms=GEMMA2_NORMS),
    )
    kinds = c.per_layer("layer_types", WINDOWED, [WINDOWED[i % 2] for i in range(len(spec.layers))])
    return _by_kind(spec, kinds, c.optional_int("sliding_window"))


def gemma3(c: HFConfig) -> ModelSpec:
    """Five layers with a window and one without, each kind with a rope of its own."""
    c = HFConfig(c.values, GEMMA3)
    if c.boolean("use_bidirectional_attention"):
        raise ModelError("config.json: use_bidirectional_attention is not supported")
    num, pattern = c.integer("num_hidden_layers"), c.integer("sliding_window_pattern", 6)
    kinds = c.per_layer("layer_types", WINDOWED, [WINDOWED[(i + 1) % pattern == 0] for i in range(num)])
    spec = gemma2(HFConfig({**c.values, "layer_types": kinds}))
    spec = _roped_by_kind(spec, c, kinds, c.positive("rope_local_base_freq", 10_000.0), 1e6)
    # That is the length with scaling.
    return replace(spec, head_norm="each", max_len=c.integer("max_position_embeddings"))


def gemma4(c: HFConfig) -> ModelSpec:
    """Gemma 4 31B and 26B-A4B: layers without a window have heads of their own."""
    c = HFConfig(c.values, {**GEMMA4, "rope_parameters": GEMMA4_ROPES})
    refused = [c.integer(name, 0, low=0) for name in ("hidden_size_per_layer_input", "num_kv_shared_layers")]
    if any(refused) or c.get("use_bidirectional_attention") == "all":
        raise ModelError("config.json: of Gemma 4, only models like 31B and 26B-A4B are supported")
    num, same = c.integer("num_hidden_layers"), c.boolean("attention_k_eq_v")
    kinds = c.per_layer("layer_types", WINDOWED, [WINDOWED[i % 6 == 5] for i in range(num)])
    kinds = [*kinds[:-1], FULL]  # whatever is said
    spec = gemma3(HFConfig({**c.values, "layer_types": kinds, "use_bidirectional_attention": None}))
    num_kv = c.get("num_global_key_value_heads") if same else None
    own: dict[str, Any] = {"head_dim": c.integer("global_head_dim", 512), "num_key_value_heads": num_kv}
    by_layer = {str(i): own for i, kind in enumerate(kinds) if kind == FULL}
    said = HFConfig(c.section("per_layer_config").values or by_layer)  # newer files say it layer by layer
    heads = [_own_heads(spec, said.section(str(i))) for i in range(num)]
    spec = _layered(spec, heads=heads, keys_as_values=[same and kind == FULL for kind in kinds])
    spec = replace(spec, norm_offset=0.0, query_scale=1.0, value_norm=True, names=GEMMA4_NAMES)
    spec = _roped_by_kind(spec, c, kinds, 10_000.0, 1e6)
    if not c.boolean("enable_moe_block"):
        return spec
    size, shared, scale = c.integer("moe_intermediate_size"), spec.layers[0].ffn_size, spec.hidden_size**-0.5
    experts = _experts(c, 128, c.integer("top_k_experts", 8), size, shared_size=shared, logit_scale=scale)
    return replace(_sparse(spec, experts), names=GEMMA4_MOE_NAMES)


def _own_heads(spec: ModelSpec, c: HFConfig) -> Heads | None:
    """Where a layer's differ from the model's."""
    num_kv, dim = c.integer("num_key_value_heads", spec.num_kv_heads), c.integer("head_dim", spec.head_dim)
    _check_sharing(spec.num_heads, num_kv)
    heads = Heads(spec.num_heads, num_kv, dim)
    return None if heads == spec.heads else heads


def llama4(c: HFConfig) -> ModelSpec:
    """Llama 4 text: most layers chunked with rope, every fourth global without."""
    spec = baseline(HFConfig(c.values, {"head_dim": 128}), theta=500_000.0, interleaved=True)
    num, rope, size = len(spec.layers), spec.layers[0].rope, c.integer("intermediate_size")
    roped = _roped(c, num)
    kinds = c.per_layer("layer_types", CHUNKED, [CHUNKED[not r] for r in roped])
    step = c.integer("interleave_moe_layer_step", 1)
    sparse = list(range(step - 1, num, step)) if c.get("moe_layers") is None else c.ids("moe_layers")
    experts = _experts(c, 16, 1, size, sigmoid=True, normalized=False, scale_input=True, shared_size=size)
    chunk, normed = c.integer("attention_chunk_size", 8192), c.boolean("use_qk_norm", True)
    tuned = c.boolean("attn_temperature_tuning", True)
    temperature = (c.positive("floor_scale", 8192), c.number("attn_scale", 0.1), 1) if tuned else None
    spec = _everywhere(_biased(spec, c), ffn_size=c.integer("intermediate_size_mlp", 16384))
    spec = _layered(
        _sparse(spec, experts, [i in sparse for i in range(num)]),
        rope=[rope if r else None for r in roped],
        mask=[Mask(attention_chunk=chunk if kind == CHUNKED[0] else None) for kind in kinds],
        qk_norm=[bool(r) and normed for r in roped],
        query_temperature=[None if r else temperature for r in roped],
    )
    names = CheckpointNames(ffn="feed_forward.", router="router", stacked_experts="inputs")
    return replace(spec, names=replace(names, shared_expert="shared_expert"))


def text_half(family: Callable[[HFConfig], ModelSpec]) -> Callable[[HFConfig], ModelSpec]:
    """Of a model that has vision, whose weights are skipped."""

    def of_text(c: HFConfig) -> ModelSpec:
        outer = {"eos_token_id": c.get("eos_token_id")} if "eos_token_id" in c.values else {}
        spec = family(HFConfig({**c.section("text_config").values, **outer}))
        prefix = "language_model."
        names = replace(spec.names, prefix=prefix + spec.names.prefix, head=prefix + spec.names.head)
        return replace(spec, names=names)

    return of_text


FAMILIES: dict[str, Callable[[HFConfig], ModelSpec]] = {
    "LlamaForCausalLM": llama,
    "GemmaForCausalLM": gemma,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": text_half(gemma3),
    "Gemma4ForCausalLM": gemma4,
    "Gemma4ForConditionalGeneration": text_half(gemma4),
    "Glm4MoeForCausalLM": glm4_moe,
    "GptOssForCausalLM": gpt_oss,
    "GraniteForCausalLM": granite,
    "MiniMaxM2ForCausalLM": minimax_m2,
    "Ministral3ForCausalLM": ministral3,
    "MistralForCausalLM": mistral,
    "Mistral3ForConditionalGeneration": text_half(
        lambda c: ministral3(c) if c.get("model_type") == "ministral3" else mistral(c)
    ),
    "MixtralForCausalLM": mixtral,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "SmolLM3ForCausalLM": smollm3,
    "Llama4ForCausalLM": llama4,
    "Llama4ForConditionalGeneration": text_half(llama4),
}


def model_spec(
    config: Mapping[str, Any], *, max_model_len: int | None = None, sliding_window: int | None = None
) -> ModelSpec:
    """The spec of a config.json, with the user's overrides; ModelError on what cannot be served."""
    spec = FAMILIES[_architecture(config)](HFConfig(config))
    if config.get("experts_apart"):  # as they are in GGUF files
        spec = replace(spec, names=replace(spec.names, stacked_experts=None, interleaved=False))
    if sliding_window is not None:
        spec = _override_window(spec, sliding_window)
    return replace(spec, max_len=max_model_len or spec.max_len)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in FAMILIES:
        [nearest] = get_close_matches(str(name)[:80], FAMILIES, n=1, cutoff=0)
        raise ModelError(f"architecture {shown(name)} is not supported; the nearest by name is {nearest}")
    return name


def _override_window(spec: ModelSpec, window: int) -> ModelSpec:
    """Replaces the window of the layers that have one; where none has, all get it."""
    any_has = any(layer.mask.window is not None for layer in spec.layers)
    layers = tuple(
        replace(layer, mask=layer.mask._replace(window=window))
        if layer.mask.window is not None or not any_has
        else layer
        for layer in spec.layers
    )
    return replace(spec, layers=layers)
