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
from hex_llm.models.spec import CheckpointNames, Experts, Layer, ModelSpec, NormNames

GEMMA2_NORMS = NormNames(
    attn_post="post_attention_layernorm",
    ffn="pre_feedforward_layernorm",
    ffn_post="post_feedforward_layernorm",
)
OLMO_NORMS = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
MIXTRAL_NAMES = CheckpointNames(ffn="block_sparse_moe", expert=("w1", "w3", "w2"))
# What the configs of the larger ones leave out.
GEMMA3 = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
SLIDING, FULL = WINDOWED = ("sliding_attention", "full_attention")


def baseline(c: HFConfig, *, theta: float = 10_000.0, interleaved: bool = False) -> ModelSpec:
    """What all families share; every layer alike."""
    num_layers, heads = c.integer("num_hidden_layers"), c.integer("num_attention_heads")
    hidden, kv_heads = c.integer("hidden_size"), c.integer("num_key_value_heads", heads)
    head_dim = c.integer("head_dim", max(hidden // heads, 1))
    if heads % kv_heads:
        raise ModelError(
            f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly"
        )
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
        dtype=c.text("dtype", c.text("torch_dtype", "bfloat16")),
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


def _masked(spec: ModelSpec, windows: Iterable[int | None]) -> ModelSpec:
    pairs = zip(spec.layers, windows, strict=True)
    return replace(spec, layers=tuple(replace(layer, mask=Mask(window=w)) for layer, w in pairs))


def _everywhere(spec: ModelSpec, window: int | None) -> ModelSpec:
    return _masked(spec, [window] * len(spec.layers))


def _by_kind(spec: ModelSpec, kinds: Iterable[str], window: int | None) -> ModelSpec:
    return _masked(spec, [window if kind == SLIDING else None for kind in kinds])


def _roped_by_kind(
    spec: ModelSpec, c: HFConfig, kinds: Iterable[str], thetas: Mapping[str, float]
) -> ModelSpec:
    """With rope fields of each kind's own, as newer configs have them; in older ones, layers with a window
    have no scaling, and `thetas` are what they do not say."""
    ropes = {}
    for kind, theta in thetas.items():
        own: dict[str, Any] = {"rope_parameters": c.section("rope_parameters").section(kind).values}
        if kind == SLIDING:
            own |= {"rope_scaling": None, "rope_theta": None}
        ropes[kind] = rope_from(HFConfig({**c.values, **own}), spec.head_dim, theta)
    pairs = zip(spec.layers, kinds, strict=True)
    return replace(spec, layers=tuple(replace(layer, rope=ropes[kind]) for layer, kind in pairs))


def _biased(spec: ModelSpec, c: HFConfig, *, default: bool = False) -> ModelSpec:
    bias = c.boolean("attention_bias", default)
    return replace(spec, qkv_bias=bias, out_bias=bias)


def _sparse(spec: ModelSpec, experts: Experts, which: Iterable[bool]) -> ModelSpec:
    pairs = zip(spec.layers, which, strict=True)
    experts = _checked(experts)
    layers = tuple(replace(layer, experts=experts) if one else layer for layer, one in pairs)
    return replace(spec, layers=layers)


def _checked(experts: Experts) -> Experts:
    (num_groups, num_chosen), num = experts.groups, experts.num
    if num % num_groups or num_chosen > num_groups or (num_chosen < num_groups and num < 2 * num_groups):
        raise ModelError(f"config.json: {num_chosen} of {num_groups} groups of {num} experts cannot be had")
    if experts.num_per_token > num // num_groups * num_chosen:
        raise ModelError(f"config.json: {experts.num_per_token} experts per token of only {num}")
    return experts


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
    spec = _by_kind(spec, kinds, window)
    pairs = zip(spec.layers, roped, strict=True)
    return replace(spec, layers=tuple(layer if r else replace(layer, rope=None) for layer, r in pairs))


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
    spec = _roped_by_kind(spec, c, kinds, dict.fromkeys(WINDOWED, 500_000.0))
    return _by_kind(spec, kinds, c.integer("sliding_window", 4096))


def mistral(c: HFConfig) -> ModelSpec:
    """Mistral, Mistral Small 3 and Ministral 8B."""
    # An absent window means the first release's; null means none.
    window = c.optional_int("sliding_window") if "sliding_window" in c.values else 4096
    return _everywhere(baseline(c), window)


def ministral(c: HFConfig) -> ModelSpec:
    spec = mistral(c)
    kinds = c.per_layer("layer_types", WINDOWED, [SLIDING] * len(spec.layers))
    return _by_kind(spec, kinds, spec.layers[0].mask.window)


def ministral3(c: HFConfig) -> ModelSpec:
    """Queries are sharpened behind the length that was trained before scaling."""
    c = HFConfig(c.values, {"head_dim": 128, "sliding_window": None, "rms_norm_eps": 1e-5})
    spec, scaling = mistral(c), c.section("rope_parameters")
    beta = scaling.optional_float("llama_4_scaling_beta")
    if beta is None:
        return spec
    temperature = (float(scaling.integer("original_max_position_embeddings")), beta, 0)
    return replace(spec, layers=tuple(replace(layer, query_temperature=temperature) for layer in spec.layers))


def mistral3(c: HFConfig) -> ModelSpec:
    return ministral3(c) if c.get("model_type") == "ministral3" else mistral(c)


def mixtral(c: HFConfig) -> ModelSpec:
    experts = Experts(
        c.integer("num_local_experts", 8), c.integer("num_experts_per_tok", 2), c.integer("intermediate_size")
    )
    spec = _everywhere(baseline(c, theta=1e6), c.optional_int("sliding_window"))
    return replace(_sparse(spec, experts, [True] * len(spec.layers)), names=MIXTRAL_NAMES)


def minimax_m2(c: HFConfig) -> ModelSpec:
    c = HFConfig(c.values, {"head_dim": 128})
    head_dim = c.integer("head_dim")
    share = c.integer("rotary_dim", head_dim) / head_dim
    spec = baseline(HFConfig(c.values, {"partial_rotary_factor": share}), theta=5e6)
    experts = Experts(
        c.integer("num_local_experts", 256),
        c.integer("num_experts_per_tok", 8),
        c.integer("intermediate_size"),
        sigmoid=True,
        corrected=True,
    )
    names = replace(MIXTRAL_NAMES, correction="e_score_correction_bias")
    return replace(_sparse(spec, experts, [True] * len(spec.layers)), head_norm="all", names=names)


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
    window = c.optional_int("sliding_window") if c.boolean("use_sliding_window") else None
    spec = replace(_biased(_everywhere(baseline(c), window), c), head_norm="each")
    experts = Experts(
        c.integer("num_experts", c.get("num_local_experts", 128)),
        c.integer("num_experts_per_tok", 8),
        c.integer("moe_intermediate_size", 768),
        normalized=c.boolean("norm_topk_prob"),
    )
    step, dense = c.integer("decoder_sparse_step", 1), c.ids("mlp_only_layers")
    return _sparse(spec, experts, [i not in dense and (i + 1) % step == 0 for i in range(len(spec.layers))])


def glm4_moe(c: HFConfig) -> ModelSpec:
    """GLM-4.5, 4.6 and 4.7."""
    c = HFConfig(c.values, {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5})
    spec, size = baseline(c), c.integer("moe_intermediate_size", 1408)
    experts = Experts(
        c.integer("n_routed_experts", c.get("num_local_experts", 128)),
        c.integer("num_experts_per_tok", 8),
        size,
        sigmoid=True,
        normalized=c.boolean("norm_topk_prob", True),
        scale=c.positive("routed_scaling_factor", 1.0),
        groups=(c.integer("n_group", 1), c.integer("topk_group", 1)),
        corrected=True,
        shared_size=size * c.integer("n_shared_experts", 1),
    )
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
    experts = Experts(
        c.integer("num_local_experts", 128),
        c.integer("num_experts_per_tok", 4),
        c.integer("intermediate_size"),
        bias=True,
        limit=c.positive("swiglu_limit", 7.0),
    )
    is_packed = c.section("quantization_config").get("quant_method") == "mxfp4"
    names = CheckpointNames(router="router", stacked_experts=not is_packed, interleaved=True)
    spec = _by_kind(_sparse(spec, experts, [True] * len(kinds)), kinds, c.integer("sliding_window", 128))
    return replace(spec, activation="quick_gelu", names=names)


def phi3(c: HFConfig) -> ModelSpec:
    """Phi-3 mini and medium, Phi-4, Phi-4-reasoning, Phi-4-mini."""
    spec = _everywhere(baseline(c), c.optional_int("sliding_window"))
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
    thetas = {FULL: 1e6, SLIDING: c.positive("rope_local_base_freq", 10_000.0)}
    spec = _roped_by_kind(spec, c, kinds, thetas)
    # That is the length with scaling.
    return replace(spec, head_norm="each", max_len=c.integer("max_position_embeddings"))


def llama4(c: HFConfig) -> ModelSpec:
    """Llama 4 text: most layers chunked with rope, every fourth global without."""
    spec = baseline(HFConfig(c.values, {"head_dim": 128}), theta=500_000.0, interleaved=True)
    num = len(spec.layers)
    roped = _roped(c, num)
    kinds = c.per_layer(
        "layer_types",
        ("chunked_attention", "full_attention"),
        ["chunked_attention" if r else "full_attention" for r in roped],
    )
    step = c.integer("interleave_moe_layer_step", 1)
    sparse = list(range(step - 1, num, step)) if c.get("moe_layers") is None else c.ids("moe_layers")
    return replace(
        _biased(spec, c),
        layers=tuple(_llama4_layer(c, spec, bool(roped[i]), kinds[i], i in sparse) for i in range(num)),
        names=CheckpointNames(
            ffn="feed_forward", router="router", shared_expert="shared_expert", stacked_experts=True
        ),
    )


def _llama4_layer(c: HFConfig, spec: ModelSpec, roped: bool, kind: str, sparse: bool) -> Layer:
    size = c.integer("intermediate_size")
    tuned = not roped and c.boolean("attn_temperature_tuning", True)
    temperature = (c.positive("floor_scale", 8192), c.number("attn_scale", 0.1), 1)
    experts = Experts(
        c.integer("num_local_experts", 16),
        c.integer("num_experts_per_tok", 1),
        size,
        sigmoid=True,
        normalized=False,
        scale_input=True,
        shared_size=size,
    )
    return Layer(
        rope=spec.layers[0].rope if roped else None,
        mask=Mask(
            attention_chunk=c.integer("attention_chunk_size", 8192) if kind == "chunked_attention" else None
        ),
        ffn_size=c.integer("intermediate_size_mlp", 16384),
        experts=_checked(experts) if sparse else None,
        qk_norm=roped and c.boolean("use_qk_norm", True),
        query_temperature=temperature if tuned else None,
    )


def text_half(family: Callable[[HFConfig], ModelSpec]) -> Callable[[HFConfig], ModelSpec]:
    """Of a model that has vision, whose weights are skipped."""

    def of_text(c: HFConfig) -> ModelSpec:
        outer = {k: v for k, v in c.values.items() if k in ("torch_dtype", "dtype", "eos_token_id")}
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
    "Glm4MoeForCausalLM": glm4_moe,
    "GptOssForCausalLM": gpt_oss,
    "GraniteForCausalLM": granite,
    "MiniMaxM2ForCausalLM": minimax_m2,
    "MinistralForCausalLM": ministral,
    "Ministral3ForCausalLM": ministral3,
    "MistralForCausalLM": mistral,
    "Mistral3ForConditionalGeneration": text_half(mistral3),
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
