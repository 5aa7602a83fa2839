"""--plot: TTFT and TPOT over the request rate, as a PNG; needs matplotlib, which is an extra."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from hex_llm.bench.measures import Result
from hex_llm.errors import ConfigError, HexError

PANELS = {"ttft": "Time to first token (ms)", "tpot": "Time per output token (ms)"}
Curve = Sequence[tuple[float, Result]]  # a rate of arrival, and what came of it


def check_available() -> None:
    """Raises ConfigError: to be called before anything is measured."""
    if find_spec("matplotlib") is None:
        raise ConfigError('--plot: needs matplotlib; pip install "hex-llm[bench]"')


def draw(path: str, systems: Mapping[str, Curve]) -> None:
    """One colour for each system: its median, and dashed the highest percentile that was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (metric, title) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        for i, (name, curve) in enumerate(systems.items()):
            # All at once has no rate of its own: the one that the server has kept up with stands for it.
            rates = [result["request_throughput"] if math.isinf(rate) else rate for rate, result in curve]
            for key, style in ((f"median_{metric}_ms", "-"), (_highest(curve[0][1], metric), "--")):
                label = f"{name}, {key.split('_')[0]}"
                axes.plot(
                    rates, [result[key] for _, result in curve], style, marker="o", color=f"C{i}", label=label
                )
        axes.set(title=title, xlabel="Requests per second", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise HexError(f"--plot {path}: {error}") from error


def _highest(result: Result, metric: str) -> str:
    keys = [key for key in result if key.startswith("p") and key.endswith(f"_{metric}_ms")]
    return max(keys, key=lambda key: float(key[1:].split("_")[0]))
