"""Model families as data: one short function each, from a Hugging Face config.json to a ModelSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
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
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
WINDOWED = ("sliding_attention", "full_attention")


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


def _masked(spec: ModelSpec, windows: list[int | None]) -> ModelSpec:
    pairs = zip(spec.layers, windows, strict=True)
    return replace(spec, layers=tuple(replace(layer, mask=Mask(window=w)) for layer, w in pairs))


def _everywhere(spec: ModelSpec, window: int | None) -> ModelSpec:
    return _masked(spec, [window] * len(spec.layers))


def llama(c: HFConfig) -> ModelSpec:
    """Llama 2, 3, 3.1, 3.2, 3.3, Llama Guard, CodeLlama, SmolLM2."""
    bias = c.boolean("attention_bias")
    return replace(baseline(c), qkv_bias=bias, out_bias=bias, ffn_bias=c.boolean("mlp_bias"))


def mistral(c: HFConfig) -> ModelSpec:
    # An absent window means the first release's; null means none.
    window = c.optional_int("sliding_window") if "sliding_window" in c.values else 4096
    return _everywhere(baseline(c), window)


def mixtral(c: HFConfig) -> ModelSpec:
    experts = Experts(
        c.integer("num_local_experts", 8), c.integer("num_experts_per_tok", 2), c.integer("intermediate_size")
    )
    spec = _everywhere(baseline(c, theta=1e6), c.optional_int("sliding_window"))
    layers = tuple(replace(layer, experts=_checked(experts)) for layer in spec.layers)
    return replace(spec, layers=layers, names=CheckpointNames(ffn="block_sparse_moe"))


def _checked(experts: Experts) -> Experts:
    if experts.num_per_token > experts.num:
        raise ModelError(f"config.json: {experts.num_per_token} experts per token of only {experts.num}")
    return experts


def qwen2(c: HFConfig) -> ModelSpec:
    spec = replace(baseline(c), qkv_bias=True)
    window = c.optional_int("sliding_window") if c.boolean("use_sliding_window") else None
    if window is None:
        return spec
    first = c.integer("max_window_layers", 28, low=0)
    default = [WINDOWED[i < first] for i in range(len(spec.layers))]
    kinds = c.per_layer("layer_types", WINDOWED, default)
    return _masked(spec, [window if kind == "sliding_attention" else None for kind in kinds])


def phi3(c: HFConfig) -> ModelSpec:
    """Phi-3 mini and medium, Phi-4, Phi-4-reasoning."""
    spec = _everywhere(baseline(c), c.optional_int("sliding_window"))
    return replace(spec, names=CheckpointNames(fused=True))


def gemma(c: HFConfig) -> ModelSpec:
    """Gemma and CodeGemma; their early configs say gelu and mean its tanh form."""
    spec = baseline(HFConfig(c.values, {"head_dim": 256, "tie_word_embeddings": True}))
    bias = c.boolean("attention_bias")
    return replace(
        spec,
        activation="gelu_tanh",
        norm_offset=1.0,
        embed_scale=spec.hidden_size**0.5,
        qkv_bias=bias,
        out_bias=bias,
    )


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
    window = c.optional_int("sliding_window")
    return _masked(spec, [window if kind == "sliding_attention" else None for kind in kinds])


def llama4(c: HFConfig) -> ModelSpec:
    """Llama 4 text: most layers chunked with rope, every fourth global without."""
    spec = baseline(HFConfig(c.values, {"head_dim": 128}), theta=500_000.0, interleaved=True)
    num = len(spec.layers)
    interval = c.integer("no_rope_layer_interval", 4)
    roped = c.per_layer("no_rope_layers", (0, 1), [int((i + 1) % interval != 0) for i in range(num)])
    kinds = c.per_layer(
        "layer_types",
        ("chunked_attention", "full_attention"),
        ["chunked_attention" if r else "full_attention" for r in roped],
    )
    step = c.integer("interleave_moe_layer_step", 1)
    sparse = list(range(step - 1, num, step)) if c.get("moe_layers") is None else c.ids("moe_layers")
    bias = c.boolean("attention_bias")
    return replace(
        spec,
        layers=tuple(_llama4_layer(c, spec, bool(roped[i]), kinds[i], i in sparse) for i in range(num)),
        qkv_bias=bias,
        out_bias=bias,
        names=CheckpointNames(ffn="feed_forward", router="router", stacked_experts=True),
    )


def _llama4_layer(c: HFConfig, spec: ModelSpec, roped: bool, kind: str, sparse: bool) -> Layer:
    size = c.integer("intermediate_size")
    tuned = not roped and c.boolean("attn_temperature_tuning", True)
    experts = Experts(
        c.integer("num_local_experts", 16),
        c.integer("num_experts_per_tok", 1),
        size,
        sigmoid_input=True,
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
        query_temperature=(c.positive("floor_scale", 8192), c.number("attn_scale", 0.1)) if tuned else None,
    )


def llama4_with_vision(c: HFConfig) -> ModelSpec:
    """The text half; vision weights are skipped."""
    outer = {k: v for k, v in c.values.items() if k in ("torch_dtype", "dtype", "eos_token_id")}
    spec = llama4(HFConfig({**c.section("text_config").values, **outer}))
    names = replace(spec.names, prefix="language_model.model.", head="language_model." + CheckpointNames.head)
    return replace(spec, names=names)


FAMILIES: dict[str, Callable[[HFConfig], ModelSpec]] = {
    "LlamaForCausalLM": llama,
    "GemmaForCausalLM": gemma,
    "Gemma2ForCausalLM": gemma2,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Llama4ForCausalLM": llama4,
    "Llama4ForConditionalGeneration": llama4_with_vision,
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
        raise ModelError(f"architecture {shown(name)} is not supported; supported are {', '.join(FAMILIES)}")
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
