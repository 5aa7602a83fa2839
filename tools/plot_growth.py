"""Draws what tools/growth.py has measured as one SVG: two plots, ours and the floor, both axes logarithmic.

Knows nothing of engines. Colours are those of the reader's light or dark scheme; the background is not drawn.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

WIDTH, HEIGHT = 860, 360  # of the picture
PLOT_WIDTH, PLOT_HEIGHT, TOP = 340, 240, 56
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333 }
.title { font-weight: 600; font-size: 14px }
.grid { stroke: #8884 } .axis { stroke: #888 }
.ours { stroke: #0969da; fill: #0969da } .floor { stroke: #9a6700; fill: #9a6700 }
path { fill: none !important; stroke-width: 2 } path.floor { stroke-dasharray: 6 4 }
.name { stroke: none; font-weight: 600 }
@media (prefers-color-scheme: dark) {
text { fill: #ccc }
.ours { stroke: #58a6ff; fill: #58a6ff } .floor { stroke: #d29922; fill: #d29922 }
}
"""
Row = dict[str, Any]


class Plot(NamedTuple):
    left: int
    title: str
    x_label: str
    x_name: str  # of a row's number
    rows: list[Row]
    lowest: float  # of y, in milliseconds
    highest: float

    def x(self, value: float) -> float:
        values = [row[self.x_name] for row in self.rows]
        return self.left + PLOT_WIDTH * _share(value, values[0], values[-1])

    def y(self, ms: float) -> float:
        return TOP + PLOT_HEIGHT * (1 - _share(ms, self.lowest, self.highest))

    def draw(self) -> list[str]:
        right, bottom = self.left + PLOT_WIDTH, TOP + PLOT_HEIGHT
        parts = [_text(self.left, TOP - 18, self.title, "title")]
        parts.append(_text((self.left + right) / 2, bottom + 38, self.x_label, anchor="middle"))
        for ms in ticks(self.lowest, self.highest):
            parts.append(_line(self.left, self.y(ms), right, self.y(ms), "grid"))
            parts.append(_text(self.left - 6, self.y(ms) + 4, f"{ms:g} ms", anchor="end"))
        for row in self.rows:
            x = self.x(row[self.x_name])
            parts.append(_line(x, bottom, x, bottom + 4, "axis"))
            parts.append(_text(x, bottom + 18, shortened(row[self.x_name]), anchor="middle"))
        parts.append(_line(self.left, bottom, right, bottom, "axis"))
        parts += [
            *self._curve("floor", lambda row: row["floor_ms"]),
            *self._curve("ours", lambda row: row["ms"]),
        ]
        return parts

    def _curve(self, name: str, value: Callable[[Row], float]) -> list[str]:
        points = [(self.x(row[self.x_name]), self.y(value(row))) for row in self.rows]
        path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dots = [
            f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{value(row):.2f} ms</title>'
            "</circle>"
            for (x, y), row in zip(points, self.rows, strict=True)
        ]
        return [f'<path class="{name}" d="{path}"/>', *dots]


def _share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [n * 10.0**power for power in powers for n in (1, 2, 5) if low <= n * 10.0**power <= high]


def shortened(n: int) -> str:
    return f"{n >> 10}k" if n >= 1024 else str(n)


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{text}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def legend(found: dict[str, Any]) -> list[str]:
    floor = f"floor: weights and KV cache read once at {found['bandwidth'] / 1e12:g} TB/s"
    y = HEIGHT - 10
    return [
        _text(60, y, f"hex_llm, one decode step on {found['device']}, jax {found['jax']}", "name ours"),
        _text(WIDTH - 20, y, floor, "name floor", anchor="end"),
    ]


def drawn(found: dict[str, Any]) -> str:
    """The SVG. Both plots have the same scale of time."""
    times = [
        row[name] for key in ("contexts", "batches") for row in found[key] for name in ("ms", "floor_ms")
    ]
    scale = min(times) / 1.2, max(times) * 1.2
    context = shortened(found["batches"][0]["context"])
    plots = [
        Plot(60, "Time of a step, one sequence", "context, tokens", "context", found["contexts"], *scale),
        Plot(
            500,
            f"Time of a step, contexts of {context}",
            "sequences at once",
            "batch",
            found["batches"],
            *scale,
        ),
    ]
    body = [line for plot in plots for line in plot.draw()] + legend(found)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *body, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", type=Path, help="what tools/growth.py wrote")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    options.picture.write_text(drawn(json.loads(options.numbers.read_text())))


if __name__ == "__main__":
    main()
