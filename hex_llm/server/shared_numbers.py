"""Numbers of several front ends as those of one: each tells its own at a socket, and whoever is asked for
/metrics adds the others' to them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.core import Metric, Sample
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

PATIENCE_S = 1.0  # with a front end that may have just ended


async def tell_numbers(numbers: Collector, path: Path) -> None:
    """To whoever connects, until it is cancelled."""

    async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(generate_latest(numbers))
        writer.close()

    path.unlink(missing_ok=True)  # of a front end that was replaced
    async with await asyncio.start_unix_server(tell, path) as server:
        await server.serve_forever()


async def ask_numbers(path: Path) -> list[Metric]:
    """Of another front end; none, if it does not answer."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_unix_connection(path)
            text = await reader.read()
            writer.close()
            return list(text_string_to_metric_families(text.decode()))
    except (OSError, TimeoutError):
        return []


class Summed(Collector):
    """What front ends count, added up; but no times of creation."""

    def __init__(self, *fronts: Iterable[Metric]) -> None:
        self._families = [one for front in fronts for one in front if not one.name.endswith("_created")]

    def collect(self) -> Iterator[Metric]:
        sums: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], Sample]] = {}
        for family in self._families:
            samples = sums.setdefault(family.name, {})
            for one in family.samples:
                key = one.name, frozenset(one.labels.items())
                before = samples[key].value if key in samples else 0.0
                samples[key] = one._replace(value=before + one.value)
        for family in {one.name: one for one in reversed(self._families)}.values():
            family.samples = [s for s in sums[family.name].values() if not s.name.endswith("_created")]
            yield family
