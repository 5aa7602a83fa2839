"""How many floating point operations steps ask of the devices: an estimate from the model's shape alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from hex_llm.models.spec import Layer, ModelSpec
from hex_llm.types import Chunk


class Work(NamedTuple):
    """The floating point operations that a model's shape asks for: of its matrices and of attention, two for
    each product that is added up. What padding costs is not among them."""

    per_token: int
    per_choice: int  # of the last feed-forward and the head, where a token is chosen
    per_pair: dict[float, int]  # how far back layers look: of a token with each that it sees, in all of them

    @classmethod
    def of(cls, spec: ModelSpec) -> Work:
        in_layers, per_pair = 0, Counter[float]()
        for layer in spec.layers:
            heads, mask = spec.heads_of(layer), layer.mask
            num_vectors = 2 * (heads.num + heads.num_kv) - layer.keys_as_values * heads.num_kv
            in_layers += spec.hidden_size * (heads.dim * num_vectors + _ffn_width(layer))
            per_pair[float(mask.window or mask.attention_chunk or "inf")] += 4 * heads.num * heads.dim
        last = spec.hidden_size * _ffn_width(spec.layers[-1])
        in_head = spec.hidden_size * spec.vocab_size
        return cls(2 * (in_layers - last), 2 * (last + in_head), dict(per_pair))

    def in_step(self, chunks: Sequence[Chunk]) -> float:
        """There may be hundreds of them, so this is done in few passes."""
        _, positions, sizes, _, _, samples = zip(*chunks, strict=True)
        total = float(sum(sizes) * self.per_token + sum(samples) * self.per_choice)
        seen = [at + (size + 1) / 2 for at, size in zip(positions, sizes, strict=True)]  # on average
        for far, each in self.per_pair.items():
            pairs = [size * (num if num < far else far) for size, num in zip(sizes, seen, strict=True)]
            total += each * sum(pairs)
        return total


def _ffn_width(layer: Layer) -> int:
    """What each hidden value is multiplied with, for one token."""
    experts = layer.experts
    if experts is None:
        return 3 * layer.ffn_size
    return 3 * (experts.num_per_token * experts.size + (experts.shared_size or 0)) + experts.num
