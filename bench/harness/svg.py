"""Plots as SVG text: bars, ratios around 1, latencies by percentile, flame graphs.  Only rectangles, lines and text.

The same figures give the same bytes, so a plot in the documents changes only if they do.  Colours are readable on the
white background, and distinguishable without red and green.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from bench.harness.measure import three_digits

AHEAD: Final = "#0072b2"
BEHIND: Final = "#d55e00"
GREY: Final = "#777777"
PALETTE: Final = (AHEAD, BEHIND, "#009e73", "#cc79a7", "#e69f00", "#56b4e9", GREY)
WIDTH: Final = 900
LABEL_WIDTH: Final = 330
VALUE_WIDTH: Final = 110
LEGEND_WIDTH: Final = 300
RATIO_MIN: Final = 1 / 32
RATIO_MAX: Final = 32.0
"""Ratios further from 1 are drawn at this value; the figure beside them is exact."""
LINE: Final = 22
TOP: Final = 40


class Canvas:
    """A picture that shapes are added to, and that is then rendered as text."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]
        self.words(10, 20, title, size=14)

    def words(self, x: float, y: float, text: str, *, end: str = "start", size: int = 12) -> None:
        """Add text at its base line; `end`: start, middle or end of the text is at x."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{end}" font-size="{size}">{escape(text)}</text>'
        )

    def bar(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Add a filled rectangle."""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{colour}"/>'
        )

    def box(self, x: float, y: float, width: float, words: str, colour: str, told: str) -> None:
        """Add a labelled rectangle of a flame graph; `told` is its tooltip."""
        room = int((width - 4) / 6.2)
        label = words if len(words) <= room else f"{words[: room - 1]}…" if room > 3 else ""
        self._parts.append(
            f'<g><title>{escape(told)}</title><rect x="{x:.1f}" y="{y:.1f}" width="{max(width - 0.5, 0.5):.1f}" '
            f'height="16" fill="{colour}"/>'
            f'<text x="{x + 3:.1f}" y="{y + 12:.1f}" font-size="10">{escape(label)}</text></g>'
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1, *, dashes: str = "") -> None:
        """Add a line through all points; `dashes`: lengths of strokes and gaps in turn."""
        where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._parts.append(
            f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashed}/>'
        )

    def text(self) -> str:
        """Return the whole file."""
        return "\n".join([*self._parts, "</svg>", ""])


@dataclass(frozen=True)
class Bar:
    """One side's figure, with its spread."""

    label: str
    value: float
    low: float
    high: float


def bars(title: str, unit: str, sides: Sequence[Bar]) -> str:
    """Return horizontal bars from 0; whiskers from the lowest to the highest round.  The first side is ours."""
    canvas = Canvas(WIDTH, TOP + LINE * len(sides) + 10, title)
    room = WIDTH - LABEL_WIDTH - VALUE_WIDTH
    scale = room / max([1e-12, *(side.high for side in sides)])
    for number, side in enumerate(sides):
        y = TOP + LINE * number
        canvas.words(LABEL_WIDTH - 8, y + 13, _short(side.label), end="end")
        canvas.bar(LABEL_WIDTH, y + 2, side.value * scale, LINE - 7, GREY if number else AHEAD)
        _whisker(canvas, LABEL_WIDTH + side.low * scale, LABEL_WIDTH + side.high * scale, y + LINE / 2 - 1.5)
        canvas.words(WIDTH - VALUE_WIDTH + 8, y + 13, f"{three_digits(side.value)} {unit}".rstrip())
    return canvas.text()


@dataclass(frozen=True)
class Ratio:
    """A ratio to another side; above 1 is ahead.  `goal`: the value the bar should reach; 0 for none."""

    label: str
    value: float
    low: float
    high: float
    goal: float = 0.0


def ratios(title: str, rows: Sequence[Ratio]) -> str:
    """Return bars from 1 on a logarithmic scale: to the right for ahead, to the left for behind; goals as ticks."""
    canvas = Canvas(WIDTH, TOP + LINE * (len(rows) + 1) + 16, title)
    found = [value for row in rows for value in (row.low, row.high, row.goal) if 0 < value < math.inf]
    low, high = max(RATIO_MIN, min([0.5, *found])), min(RATIO_MAX, max([2.0, *found]))
    room = WIDTH - LABEL_WIDTH - VALUE_WIDTH

    def place(value: float) -> float:
        share = math.log(min(max(value, low), high) / low) / math.log(high / low)
        return LABEL_WIDTH + share * room

    bottom = TOP + LINE * len(rows)
    for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1):
        x = place(2.0**power)
        canvas.line([(x, TOP - 6), (x, bottom)], "#000000" if not power else "#dddddd")
        canvas.words(x, bottom + 16, f"{2**power}x" if power >= 0 else f"1/{2**-power}", end="middle")
    for number, row in enumerate(rows):
        y = TOP + LINE * number
        ends = sorted((place(1), place(row.value)))
        canvas.words(LABEL_WIDTH - 8, y + 13, _short(row.label), end="end")
        canvas.bar(ends[0], y + 2, ends[1] - ends[0], LINE - 7, AHEAD if row.value >= 1 else BEHIND)
        _whisker(canvas, place(row.low), place(row.high), y + LINE / 2 - 1.5)
        if row.goal:
            canvas.line([(place(row.goal), y), (place(row.goal), y + LINE - 3)], "#000000", 3)
        canvas.words(WIDTH - VALUE_WIDTH + 8, y + 13, f"{row.value:.3g}x")
    return canvas.text()


Curve = Sequence[tuple[float, float]]
"""(share of all, latency in us), rising."""


def percentiles(title: str, curves: Sequence[tuple[str, Curve]]) -> str:
    """Return latency by percentile, both on logarithmic scales: 50%, 90%, 99%, 99.9%, 99.99%."""
    height, left, right, foot = 420, 80, WIDTH - LEGEND_WIDTH, 380
    canvas = Canvas(WIDTH, height, title)
    every = [value for _, curve in curves for _, value in curve if value > 0]
    low, high = 10 ** math.floor(math.log10(min(every))), 10 ** math.ceil(math.log10(max(every) * 1.01))
    nines = 4.0

    def x_of(share: float) -> float:
        return left + min(nines, -math.log10(max(1 - share, 1e-9))) / nines * (right - left)

    def y_of(value: float) -> float:
        return foot - math.log10(max(value, low) / low) / math.log10(high / low) * (foot - TOP)

    for share in (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999):
        canvas.line([(x_of(share), TOP), (x_of(share), foot)], "#dddddd")
        canvas.words(x_of(share), foot + 18, f"{share * 100:g}%", end="middle")
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        canvas.line([(left, y_of(10.0**power)), (right, y_of(10.0**power))], "#dddddd")
        canvas.words(left - 8, y_of(10.0**power) + 4, _duration(10.0**power), end="end")
    for number, (label, curve) in enumerate(curves):
        colour, dashes = PALETTE[number % len(PALETTE)], "6 3" if number >= len(PALETTE) else ""
        canvas.line([(x_of(share), y_of(value)) for share, value in curve], colour, 2, dashes=dashes)
        y = TOP + LINE * number
        canvas.line([(right + 16, y + 6), (right + 38, y + 6)], colour, 3, dashes=dashes)
        canvas.words(right + 46, y + 11, label)
    return canvas.text()


FLAMES: Final = ("#e69f00", "#eeb52e", "#f0c661", "#dd8f1d")


def flames(title: str, boxes: Sequence[tuple[int, float, float, str]]) -> str:
    """Return a flame graph: (depth, begin, width, frame) of each box; the frame's whole name is the tooltip."""
    seen = [box for box in boxes if box[2] * WIDTH >= 1]
    depth = 1 + max((box[0] for box in seen), default=0)
    height = TOP + 17 * depth + 10
    canvas = Canvas(WIDTH, height, title)
    for level, begin, width, frame in seen:
        y = height - 10 - 17 * (level + 1)
        colour = FLAMES[sum(frame.encode()) % len(FLAMES)]
        canvas.box(begin * WIDTH, y, width * WIDTH, frame, colour, f"{frame}: {width:.1%}")
    return canvas.text()


def _whisker(canvas: Canvas, low: float, high: float, y: float) -> None:
    canvas.line([(low, y), (high, y)], "#000000")
    for x in (low, high):
        canvas.line([(x, y - 4), (x, y + 4)], "#000000")


def _duration(value_us: float) -> str:
    for limit, unit in ((1e6, "s"), (1e3, "ms")):
        if value_us >= limit:
            return f"{value_us / limit:g} {unit}"
    return f"{value_us:g} us"


def _short(label: str) -> str:
    return label if len(label) <= 52 else f"{label[:51]}…"
