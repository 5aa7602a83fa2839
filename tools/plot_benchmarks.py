"""Draws tables of docs/benchmarks.md as SVGs beside it: `python -m tools.plot_benchmarks` from the root.

A table is found by its first header.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.ticker import LogLocator, NullLocator

DOCS = Path("docs")
OURS, THEIRS, INK = "#2f81f7", "#bf8700", "#808890"  # seen on white and on black
STYLE = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "savefig.transparent": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "hex_llm",  # the same table gives the same file
    "xtick.color": INK,
    "ytick.color": INK,
}


def table(text: str, first_header: str) -> list[list[str]]:
    """The rows below the header, each a list of cells without emphasis."""
    start = text.index(f"\n| {first_header} |")
    lines = text[start:].strip().splitlines()[2:]
    end = next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return [[cell.strip().replace("*", "") for cell in line.strip("|").split("|")] for line in lines[:end]]


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def draw_offline(rows: list[list[str]]) -> Any:
    figure, axes = pyplot.subplots(figsize=(8.6, 3.2), layout="constrained")
    places = range(len(rows))
    ratios = [number(row[1]) / number(row[2]) for row in rows]
    axes.barh(places, [ratio - 1 for ratio in ratios], 0.6, left=1, color=OURS, label="hex_llm")
    axes.axvline(1, color=THEIRS, label="vLLM")
    for place, row, ratio in zip(places, rows, ratios, strict=True):
        label = f"{ratio:.2f}  ({row[1]} to {row[2]} tok/s)"
        axes.text(max(ratio, 1) + 0.005, place, label, va="center", color=INK, fontsize=9)
    axes.set(yticks=places, yticklabels=[row[0] for row in rows], xlim=(0.94, 1.36))
    axes.set_xlabel("output tokens a second, ours over vLLM's")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    return figure


def draw_arrivals(rows: list[list[str]]) -> Any:
    """p50 to p99 of both systems for each load."""
    figure, both = pyplot.subplots(1, 2, figsize=(8.6, 3.6), layout="constrained", sharey=True)
    for axes, name, column in zip(both, ("TTFT", "TPOT"), (3, 4), strict=True):
        for i, pair in enumerate(zip(rows[::2], rows[1::2], strict=True)):
            for row, color, shift in zip(pair, (THEIRS, OURS), (-0.14, 0.14), strict=True):
                p50, p90, p99 = map(number, row[column].split(" / "))
                axes.plot([p50, p99], [i + shift] * 2, color=color, lw=2)
                axes.plot([p50, p90, p99], [i + shift] * 3, "o", color=color, ms=4)
        axes.set(xscale="log", xlabel=f"{name}, ms: p50, p90, p99")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
    both[0].set(yticks=range(len(rows) // 2), yticklabels=[row[0] for row in rows[::2]])
    both[0].invert_yaxis()
    for color, name in ((THEIRS, "vLLM"), (OURS, "hex_llm")):
        both[1].plot([], [], color=color, lw=2, label=name)
    both[1].legend(loc="upper right")
    return figure


PICTURES = {
    "offline.svg": ("workload (tokens in / out)", draw_offline),
    "arrivals.svg": ("load, requests a second", draw_arrivals),
}


def described(rows: list[list[str]]) -> str:
    """Of a picture: what it was drawn from."""
    return "; ".join(", ".join(row) for row in rows)


def main() -> None:
    text = (DOCS / "benchmarks.md").read_text()
    for name, (first_header, draw) in PICTURES.items():
        rows = table(text, first_header)
        with matplotlib.rc_context(STYLE):
            metadata = {"Date": None, "Creator": None, "Description": described(rows)}
            draw(rows).savefig(DOCS / name, metadata=metadata)


if __name__ == "__main__":
    main()
