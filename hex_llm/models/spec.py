"""A model as data: everything the one decoder needs to know, and nothing about files or devices.

A switch is a value rather than a flag: None means that the operation is absent.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from hex_llm.errors import ConfigError
from hex_llm.kernels.attention import Mask

EVERYTHING = Mask()


@dataclass(frozen=True)
class Rope:
    """Rotary positions; frequencies are resolved numbers, whatever scaling they came from."""

    inv_freq: tuple[float, ...]  # one per rotated pair; dimensions beyond 2 * len(inv_freq) pass unrotated
    magnitude: float = 1.0  # cos and sin are multiplied by it
    interleaved: bool = False  # a pair is two neighbours instead of one from each half
    original_len: int = 0  # sequences longer than this use what follows
    long_inv_freq: tuple[float, ...] | None = None  # longrope: other frequencies
    ntk: tuple[float, float] | None = None  # dynamic: (theta, factor), frequencies follow the length

    @property
    def recompute_len(self) -> int | None:
        """A sequence that grows past this length needs its whole KV made anew (longrope switches)."""
        return self.original_len if self.long_inv_freq is not None else None


@dataclass(frozen=True)
class Experts:
    """A mixture-of-experts feed-forward."""

    num: int
    num_per_token: int
    size: int  # intermediate size of one expert
    sigmoid: bool = False  # an expert's score is its own, not its part of a softmax over all
    normalized: bool = True  # the scores of a token's experts add up to 1
    scale: float = 1.0  # of scores
    logit_scale: float = 1.0  # of what the router says
    scale_input: bool = False  # Llama 4: scores scale an expert's input, not its output
    corrected: bool = False  # a bias takes part in the choice, but not in the scores
    bias: bool = False  # of the router and of the experts' matrices
    limit: float | None = None  # gpt-oss: gates and ups end there, and 1 is added to ups
    shared_size: int | None = None  # intermediate size of the expert that every token visits


class Heads(NamedTuple):
    """Of attention, as devices hold them; see ModelSpec for the last two."""

    num: int
    num_kv: int
    dim: int
    kv_repeat: int = 1
    num_stored: int | None = None

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num // self.num_kv

    def fit(self, n: int) -> bool:
        return n <= self.num and (self.num_kv % n == 0 or n % self.num_kv == 0)

    def split_over(self, n: int) -> Heads:
        repeat = max(n // self.num_kv, 1)
        num_kv = self.num_kv * repeat
        num = num_kv * -(-self.group_size // repeat)
        return Heads(num, num_kv, self.dim, repeat, None if num == self.num else self.num)


@dataclass(frozen=True)
class Layer:
    """What may differ from one layer to the next."""

    rope: Rope | None  # None: no positions
    mask: Mask = EVERYTHING
    ffn_size: int = 0
    experts: Experts | None = None  # None: a dense feed-forward of ffn_size
    heads: Heads | None = None  # None: the model's
    keys_as_values: bool = False  # before their norm and rope: there is no projection of values
    qk_norm: bool = False  # weightless RMS norm of q and k after rope
    # (floor, scale, offset of positions): long positions sharpen queries
    query_temperature: tuple[float, float, int] | None = None


class NormNames(NamedTuple):
    """Checkpoint names of a layer's norms; None: the norm does not exist."""

    attn: str | None = "input_layernorm"
    attn_post: str | None = None
    ffn: str | None = "post_attention_layernorm"
    ffn_post: str | None = None
    routed: str | None = None  # of routed experts alone, like the next
    routed_post: str | None = None
    shared_post: str | None = None


LLAMA_NORMS = NormNames()


@dataclass(frozen=True)
class CheckpointNames:
    """How a family spells its tensors."""

    prefix: str = "model."
    head: str = "lm_head.weight"
    ffn: str = "mlp."
    norms: NormNames = LLAMA_NORMS
    fused: bool = False  # one qkv_proj and one gate_up_proj tensor (Phi-3)
    layer_scale: str | None = None  # what a layer's output is multiplied with; None: nothing
    router: str = "gate"
    router_norm: str | None = None  # weights of a norm of what the router sees
    expert_scales: str | None = None  # of each expert's scores
    correction: str = "gate.e_score_correction_bias"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of one that is on its own
    shared_expert: str = "shared_experts"
    # Experts in one tensor, with this axis behind that of experts (Llama 4: inputs, Gemma 4: outputs)
    stacked_experts: Literal["inputs", "outputs"] | None = None
    interleaved: bool = False  # gates and ups of an expert in one tensor, in turns (gpt-oss)


@dataclass(frozen=True)
class ModelSpec:
    family: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    max_len: int  # input and output tokens of one sequence
    norm_eps: float
    activation: str = "silu"
    norm_offset: float = 0.0  # added to every norm weight
    embed_scale: float | None = None
    query_scale: float | None = None  # None: head_dim ** -0.5
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    logit_scale: float | None = None
    residual_scale: float | None = None  # of what a layer adds
    tied: bool = False  # the embedding is also the head
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    sinks: bool = False  # each head has a score that takes weight from all keys
    head_norm: Literal["each", "all"] | None = (
        None  # RMS norm of q and k before rope, of heads or across them
    )
    value_norm: bool = False  # weightless RMS norm of v
    eos_ids: tuple[int, ...] = ()
    kv_repeat: int = 1  # each KV head is held this many times, so that every device has one
    num_stored_heads: int | None = None  # query heads of the checkpoint, where num_heads are more
    names: CheckpointNames = field(default_factory=CheckpointNames)

    @property
    def heads(self) -> Heads:
        """Those of layers that have none of their own."""
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim, self.kv_repeat, self.num_stored_heads)

    def heads_of(self, layer: Layer) -> Heads:
        return layer.heads or self.heads

    @property
    def all_heads(self) -> set[Heads]:
        return {self.heads_of(layer) for layer in self.layers}

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    @property
    def recompute_len(self) -> int | None:
        """See Rope.recompute_len; all layers of a model agree."""
        return next((layer.rope.recompute_len for layer in self.layers if layer.rope), None)

    @property
    def uniform_len(self) -> int | None:
        """Up to this length the KV of a token does not depend on how long its sequence is; None: never."""
        scaled = [
            layer.rope.original_len
            for layer in self.layers
            if layer.rope and (layer.rope.long_inv_freq is not None or layer.rope.ntk is not None)
        ]
        return min(scaled, default=None)

    def split_over(self, num_devices: int) -> ModelSpec:
        """This model as `num_devices` hold it: where there are fewer KV heads than devices, each head is
        held several times and its query heads are divided, evenly thanks to some whose weights are zeros.
        Refuses a number that does not divide, naming those that do."""
        if not self._divides(num_devices):
            sizes = ", ".join(str(n) for n in range(1, self.num_heads + 1) if self._divides(n))
            raise ConfigError(
                f"--tensor_parallel_size={num_devices}: this model's {self.num_heads} heads, "
                f"{self.num_kv_heads} KV heads and feed-forward width can be split over {sizes} devices"
            )
        num_heads, num_kv_heads, _, repeat, stored = self.heads.split_over(num_devices)
        layers = (
            replace(layer, heads=layer.heads and layer.heads.split_over(num_devices)) for layer in self.layers
        )
        return replace(
            self,
            layers=tuple(layers),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            kv_repeat=repeat,
            num_stored_heads=stored,
        )

    def _divides(self, n: int) -> bool:
        heads_fit = all(heads.fit(n) for heads in {self.heads, *self.all_heads})
        return heads_fit and all(size % n == 0 for size in self._ffn_sizes())

    def _ffn_sizes(self) -> set[int]:
        sizes = set()
        for layer in self.layers:
            experts = layer.experts
            sizes |= {experts.size, experts.shared_size or experts.size} if experts else {layer.ffn_size}
        return sizes
