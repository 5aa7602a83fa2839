"""The machines that a model may be planned for: chips, and how many of them there are together.

All that is known of them is in machines.toml, or in the user's own copy of it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from hex_llm.errors import ConfigError

BUILT_IN = Path(__file__).with_name("machines.toml")
GPU_SHARE = 0.92  # of a GPU's memory, which JAX is told to take (its own default is 0.75)


@dataclass(frozen=True)
class Chip:
    """See machines.toml."""

    name: str
    platform: str
    hbm: float
    bandwidth: float
    flops: float
    decode: float
    prefill: float
    price: float
    machines: Mapping[str, str]
    zone: str
    gke: str
    topologies: Mapping[str, str] = field(default_factory=dict)
    host: int = 0
    devices: int = 1
    accelerator: str = ""
    fp8: bool = True  # multiplies floats of 8 bits, where the engine keeps them so

    @property
    def usable(self) -> float:
        """Bytes of a device for weights, KV cache and temporaries."""
        return self.hbm * (GPU_SHARE if self.platform == "gpu" else 1)

    @cached_property
    def slices(self) -> list[Slice]:
        """The smallest first."""
        return [Slice(self, num) for num in sorted({int(n) for n in (*self.machines, *self.topologies)})]


class Slice(NamedTuple):
    """So many chips that one replica has."""

    chip: Chip
    num_chips: int

    @property
    def name(self) -> str:
        return f"{self.chip.name}-{self.num_chips}"

    @property
    def num_devices(self) -> int:
        return self.num_chips * self.chip.devices

    @property
    def topology(self) -> str:
        return self.chip.topologies.get(str(self.num_chips), "")

    @property
    def num_hosts(self) -> int:
        return 1 if str(self.num_chips) in self.chip.machines else self.num_chips // self.chip.host

    @property
    def machine_type(self) -> str:
        return self.chip.machines[str(self.num_chips if self.num_hosts == 1 else self.chip.host)]

    @property
    def price(self) -> float:
        """Dollars an hour."""
        return self.num_chips * self.chip.price


def read_machines(path: Path = BUILT_IN) -> dict[str, Chip]:
    """ConfigError: the user's file is none, or says something that cannot be."""
    try:
        tables = tomllib.loads(path.read_text())
        return {name: _chip(name, table) for name, table in tables.items()}
    except OSError as error:
        raise ConfigError(f"--machines={path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--machines={path}: {error}") from error


def _chip(name: str, table: Any) -> Chip:
    known = {one.name: one.type for one in fields(Chip)}
    for key, value in table.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if key not in known or (known[key] in ("float", "int") and not is_number):
            raise ValueError(f"[{name}] {key}={value!r} is not known or not more than 0")
    missing = [key for key in ("machines", "platform", "hbm", "price") if key not in table]
    if missing or table["platform"] not in ("tpu", "gpu") or not table["machines"]:
        raise ValueError(f"[{name}] needs {', '.join(missing) or 'a platform (tpu or gpu) and machines'}")
    return Chip(name=name, **table)
