"""Typed, bounded reading of a Hugging Face config.json: a wrong value ends in one line that names it."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from hex_llm.errors import ModelError

# No model is near these; a config beyond them is broken or hostile.
LIMITS = {
    "num_hidden_layers": 256,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "intermediate_size_mlp": 1 << 20,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 1024,
    "vocab_size": 1 << 22,
    "max_position_embeddings": 1 << 28,
    "original_max_position_embeddings": 1 << 28,
    "num_local_experts": 256,
    "num_experts": 256,
    "n_routed_experts": 256,
    "num_experts_per_tok": 64,
}
MAX_INT = (1 << 31) - 1  # of an index on a device
SMALLEST, LARGEST = 1e-30, 1e30  # beyond them float32 ends
REQUIRED = object()

_short = reprlib.Repr()
_short.maxstring = _short.maxlong = 60


def shown(value: object) -> str:
    """A value of a config for a message: on one line, short however long or deep it is."""
    return _short.repr(value)[:60]


class HFConfig:
    """A config.json with a family's own defaults beneath it."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.values = {**(defaults or {}), **values}

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands; null counts as absent."""
        value = self.values.get(key)
        return default if value is None else value

    def text(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise ModelError(f"config.json: {key}={shown(value)} must be a text")
        return value

    def integer(self, key: str, default: Any = REQUIRED, *, low: int = 1) -> int:
        value, limit = self._required(key, default), LIMITS.get(key, MAX_INT)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= limit:
            raise ModelError(
                f"config.json: {key}={shown(value)} must be a whole number from {low} to {limit}"
            )
        return value

    def number(self, key: str, default: Any = REQUIRED) -> float:
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
            raise ModelError(f"config.json: {key}={shown(value)} must be a number of at most {LARGEST:g}")
        return float(value)

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is REQUIRED:
            raise ModelError(f"config.json lacks {key}: is this a complete model?")
        return value

    def positive(self, key: str, default: Any = REQUIRED) -> float:
        value = self.number(key, default)
        if value < SMALLEST:
            raise ModelError(f"config.json: {key}={value!r} must be at least {SMALLEST:g}")
        return value

    def optional_int(self, key: str) -> int | None:
        return None if self.get(key) is None else self.integer(key)

    def optional_float(self, key: str) -> float | None:
        return None if self.get(key) is None else self.positive(key)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {key}={shown(value)} must be true or false")
        return value

    def floats(self, key: str, length: int) -> tuple[float, ...]:
        values = self.get(key)
        if not isinstance(values, list) or len(values) != length:
            raise ModelError(f"config.json: {key} must be a list of {length} numbers")
        return tuple(HFConfig({key: value}).positive(key) for value in values)

    def per_layer(self, key: str, allowed: tuple[Any, ...], default: list[Any]) -> list[Any]:
        """One value for each layer, or the family's default where the list is absent or empty."""
        values = self.get(key, [])
        values = default if values == [] else values
        is_whole = isinstance(values, list) and len(values) == len(default)
        if not is_whole or any(value not in allowed for value in values):
            raise ModelError(f"config.json: {key} must list {len(default)} values out of {list(allowed)}")
        return values

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids or such: one or a list of them."""
        value = self.get(key, [])
        values = value if isinstance(value, list) else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) or not 0 <= v <= MAX_INT for v in values):
            raise ModelError(f"config.json: {key}={shown(value)} must be a whole number or a list of them")
        return tuple(values)

    def section(self, key: str) -> HFConfig:
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise ModelError(f"config.json: {key} must be an object")
        return HFConfig(value)
