"""The machines that a model may be planned for: chips, and how many of them there are together.

All that is known of them is in machines.toml, and in a file of the user's that changes it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hex_llm.errors import ConfigError

BUILT_IN = Path(__file__).with_name("machines.toml")
GPU_SHARE = 0.92  # of a GPU's memory, which JAX is told to take (its own default is 0.75)


@dataclass(frozen=True, kw_only=True)
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

    def __post_init__(self) -> None:
        if min(self.hbm, self.bandwidth, self.flops, self.decode, self.prefill, self.price) <= 0:
            raise ValueError(f"[{self.name}] has a number that is not more than 0")

    @property
    def usable(self) -> float:
        """Bytes of a device for weights, KV cache and temporaries."""
        return self.hbm * (GPU_SHARE if self.platform == "gpu" else 1)

    @property
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


class Machines(NamedTuple):
    prices: str  # of when and where they are
    chips: Mapping[str, Chip]


def read_machines(path: Path = BUILT_IN) -> Machines:
    """A file need not say what it leaves as it is."""
    try:
        given, known = (tomllib.loads(one.read_text()) for one in (path, BUILT_IN))
        prices = given.pop("prices", path.name)
        del known["prices"]
        tables = known | {name: known.get(name, {}) | table for name, table in given.items()}
        return Machines(prices, {name: Chip(name=name, **table) for name, table in tables.items()})
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--machines={path}: {error}") from error
