"""Charts as hand-written SVG: lines over a numeric axis, and grouped bars. No dependency.

Knows nothing of what is drawn. Invariant: the output is well-formed XML, all text is escaped, and the
colours differ in lightness as well as in hue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

COLORS = (
    "#1f5fa8", "#d9541e", "#2a8c55", "#8a4fb5", "#c9a227", "#5b6470",
    "#12a5b5", "#b8336a", "#7a9a2e", "#3b3b8f", "#a06a42", "#e08fb3",
)  # fmt: skip
WIDTH, PLOT_WIDTH, PLOT_HEIGHT = 980, 600, 340
LEFT, TOP = 64, 78
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line or one colour of bars; y is None where there is no value."""

    label: str
    values: Sequence[float | None]
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """What surrounds the data. x: numbers for lines, ignored by bars, which have `groups`."""

    title: str
    subtitle: str
    y_label: str
    series: Sequence[Series]
    x_label: str = ""
    x: Sequence[float] = ()
    groups: Sequence[str] = ()
    x_marks: Sequence[tuple[float, str]] = field(default=())


def lines(chart: Chart) -> str:
    """Draw one line a series over `chart.x` (a square-root axis, which keeps small values apart)."""
    low, high = math.sqrt(min(chart.x)), math.sqrt(max(chart.x))
    span = (high - low) or 1.0

    def at(value: float) -> float:
        return LEFT + 14 + (math.sqrt(value) - low) / span * (PLOT_WIDTH - 28)

    top, parts = _frame(chart)
    for value, label in chart.x_marks:
        if low <= math.sqrt(value) <= high:
            parts += [_line((at(value), TOP), (at(value), TOP + PLOT_HEIGHT), "#999", "4 3")]
            parts += [_text(at(value) + 4, TOP + 12, label, size=11, fill="#777")]
    for value in chart.x:
        parts.append(_text(at(value), TOP + PLOT_HEIGHT + 18, f"{value:g}", anchor="middle"))
    for number, series in enumerate(chart.series):
        color = COLORS[number % len(COLORS)]
        dash = " stroke-dasharray='6 4'" if series.dashed else ""
        points = [
            (at(x), _height(y, top)) for x, y in zip(chart.x, series.values, strict=True) if y is not None
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='2'{dash}/>")
        parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{color}'/>" for x, y in points]
    return _document(chart, parts)


def bars(chart: Chart) -> str:
    """Draw one bar a series in each of `chart.groups`, the value above it."""
    top, parts = _frame(chart)
    slot = PLOT_WIDTH / max(1, len(chart.groups))
    width = min(34.0, slot * 0.82 / max(1, len(chart.series)))
    for group, name in enumerate(chart.groups):
        middle = LEFT + slot * (group + 0.5)
        parts.append(_text(middle, TOP + PLOT_HEIGHT + 18, name, anchor="middle"))
        start = middle - width * len(chart.series) / 2
        for number, series in enumerate(chart.series):
            value = series.values[group]
            if value is None:
                continue
            x, y = start + number * width, _height(value, top)
            parts.append(
                f"<rect x='{x + 1:.1f}' y='{y:.1f}' width='{width - 2:.1f}' "
                f"height='{TOP + PLOT_HEIGHT - y:.1f}' fill='{COLORS[number % len(COLORS)]}' rx='1.5'/>"
            )
            label = f"{value:.0f}" if value >= 10 else f"{value:.1f}"
            parts.append(_text(x + width / 2, y - 4, label, anchor="middle", size=9.5, fill="#444"))
    return _document(chart, parts)


def _frame(chart: Chart) -> tuple[float, list[str]]:
    """The value at the top of the axis; grid, ticks and axis titles."""
    values = [v for s in chart.series for v in s.values if v is not None]
    highest = max(values, default=0.0) or 1.0
    step = _tick(highest)
    top = step * math.ceil(highest * 1.02 / step)
    parts = []
    for i in range(round(top / step) + 1):
        y = _height(i * step, top)
        parts.append(_line((LEFT, y), (LEFT + PLOT_WIDTH, y), "#333" if i == 0 else "#e4e4e4"))
        parts.append(_text(LEFT - 8, y + 4, f"{i * step:g}", anchor="end"))
    middle = TOP + PLOT_HEIGHT / 2
    parts.append(
        f"<text x='18' y='{middle}' transform='rotate(-90 18 {middle})' text-anchor='middle' "
        f"font-size='13' fill='#333'>{escape(chart.y_label)}</text>"
    )
    parts.append(
        _text(LEFT + PLOT_WIDTH / 2, TOP + PLOT_HEIGHT + 42, chart.x_label, anchor="middle", size=13)
    )
    return top, parts


def _document(chart: Chart, parts: list[str]) -> str:
    height = max(TOP + PLOT_HEIGHT + 58, TOP + 20 * len(chart.series) + 20)
    legend = []
    for number, series in enumerate(chart.series):
        y = TOP + 8 + 20 * number
        x = LEFT + PLOT_WIDTH + 22
        color = COLORS[number % len(COLORS)]
        legend.append(
            _line((x, y), (x + 22, y), color, "6 4" if series.dashed else "", 2.5)
            if chart.x
            else f"<rect x='{x + 6}' y='{y - 6}' width='12' height='12' rx='2' fill='{color}'/>"
        )
        legend.append(_text(x + 29, y + 4, series.label))
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' "
            f"viewBox='0 0 {WIDTH} {height}' role='img' aria-label={quoteattr(chart.title)} {FONT}>",
            f"<rect width='{WIDTH}' height='{height}' fill='#ffffff'/>",
            _text(LEFT, 32, chart.title, size=18, fill="#111"),
            _text(LEFT, 54, chart.subtitle, size=12.5, fill="#666"),
            *parts,
            *legend,
            "</svg>",
            "",
        ]
    )


def _height(value: float, top: float) -> float:
    return TOP + PLOT_HEIGHT * (1 - value / top)


def _tick(top: float) -> float:
    """A round step that gives four to eight ticks."""
    unit = 10.0 ** math.floor(math.log10(max(top, 1e-9)))
    return next(unit * f for f in (0.1, 0.2, 0.5, 1, 2) if top / (unit * f) <= 8)


def _line(start: Point, end: Point, color: str, dash: str = "", width: float = 1) -> str:
    dashes = f" stroke-dasharray='{dash}'" if dash else ""
    return (
        f"<line x1='{start[0]:.1f}' y1='{start[1]:.1f}' x2='{end[0]:.1f}' y2='{end[1]:.1f}' "
        f"stroke='{color}' stroke-width='{width}'{dashes}/>"
    )


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: float = 12, fill: str = "#333"
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-size='{size}' fill='{fill}'>"
        f"{escape(text)}</text>"
    )
