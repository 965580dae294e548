"""Two pictures as SVG, written by hand so that no plotting library is needed: bars, and lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_COLOURS = ("#2f6db5", "#d9822b", "#3a9a5c", "#a8478f", "#7a6a53", "#c23b3b", "#4c4c9d", "#5b8f8f")
_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 190, 44, 52
_STYLE = "font-family='system-ui, sans-serif' font-size='12' fill='#333'"


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float]]],
    title: str,
    x_label: str,
    y_label: str,
    fits: Mapping[str, tuple[float, float]] | None = None,
) -> str:
    """An SVG of one line a name through its (x, y) points; `fits` adds dashed lines (slope, intercept).

    Both axes start at 0, so that slopes can be compared by eye.
    """
    points = [point for line in series.values() for point in line]
    top_x = max((x for x, _ in points), default=1.0)
    top_y = max((y for _, y in points), default=1.0)
    ticks_x, ticks_y = ticks(top_x), ticks(top_y)
    top_x, top_y = max(top_x, ticks_x[-1]), max(top_y, ticks_y[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (_WIDTH - _LEFT - _RIGHT) * x / top_x,
            _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * y / top_y,
        )

    parts = _frame(title, x_label, y_label)
    for tick in ticks_y:
        (x0, y), (x1, _) = at(0, tick), at(top_x, tick)
        parts.append(f"<line x1='{x0:.1f}' y1='{y:.1f}' x2='{x1:.1f}' y2='{y:.1f}' stroke='#ddd'/>")
        parts.append(f"<text x='{x0 - 6:.1f}' y='{y + 4:.1f}' text-anchor='end' {_STYLE}>{tick:g}</text>")
    for tick in ticks_x:
        x, y = at(tick, 0)
        parts.append(f"<text x='{x:.1f}' y='{y + 18:.1f}' text-anchor='middle' {_STYLE}>{tick:g}</text>")
    for index, (name, line) in enumerate(series.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line))
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>")
        parts += [
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.5' fill='{colour}'/>"
            for x, y in (at(*point) for point in line)
        ]
        if fits and name in fits:
            slope, intercept = fits[name]
            (x0, y0), (x1, y1) = at(0, max(intercept, 0.0)), at(top_x, intercept + slope * top_x)
            if y1 >= _TOP:
                parts.append(
                    f"<line x1='{x0:.1f}' y1='{y0:.1f}' x2='{x1:.1f}' y2='{y1:.1f}' stroke='{colour}' "
                    "stroke-dasharray='4 4' stroke-opacity='0.6'/>"
                )
        parts += _legend(index, name, colour)
    return "\n".join([*parts, "</svg>\n"])


def bar_chart(values: Mapping[str, float], title: str, unit: str) -> str:
    """An SVG of horizontal bars from 0, longest scale first as given, the figure beside each bar."""
    height = _TOP + 30 * len(values) + 20
    longest = max(values.values(), default=1.0) or 1.0
    label = 240
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' role='img'>",
        f"<title>{escape(title)}</title>",
        "<rect width='100%' height='100%' fill='white'/>",
        f"<text x='12' y='24' font-weight='600' {_STYLE}>{escape(title)}</text>",
    ]
    for index, (name, value) in enumerate(values.items()):
        y = _TOP + 30 * index
        width = (_WIDTH - label - 120) * value / longest
        colour = _COLOURS[index % len(_COLOURS)]
        parts += [
            f"<text x='{label - 8}' y='{y + 15}' text-anchor='end' {_STYLE}>{escape(name)}</text>",
            f"<rect x='{label}' y='{y}' width='{width:.1f}' height='20' fill='{colour}'/>",
            f"<text x='{label + width + 6:.1f}' y='{y + 15}' {_STYLE}>{value:.4g} {escape(unit)}</text>",
        ]
    return "\n".join([*parts, "</svg>\n"])


def report_chart(report: dict[str, Any]) -> str:
    """The picture of a bench report (its JSON form): the context sweep, or decode speed without one."""
    swept = [result for result in report["results"] if result["sweep"]]
    if swept:
        series = {
            result["engine"]: [(p["context"], p["ms_per_token"]) for p in result["sweep"]["points"]]
            for result in swept
        }
        fits = {
            result["engine"]: (
                result["sweep"]["us_per_context_token"] / 1e3,
                result["sweep"]["intercept_ms"],
            )
            for result in swept
            if result["sweep"]["us_per_context_token"] is not None
        }
        title = f"{report['model']}: decode cost by context length"
        return line_chart(series, title, "tokens held", "ms per token", fits)
    speeds = {r["engine"]: r["tok_per_s"] for r in report["results"] if r["tok_per_s"] is not None}
    return bar_chart(speeds, f"{report['model']}: decode speed", "tok/s")


def ticks(top: float, wanted: int = 5) -> list[float]:
    """Round steps (1, 2 or 5 times a power of ten) from 0 to at least `top`."""
    if top <= 0:
        return [0.0, 1.0]
    rough = top / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return [step * index for index in range(math.ceil(top / step - 1e-9) + 1)]


def _frame(title: str, x_label: str, y_label: str) -> list[str]:
    bottom = _HEIGHT - _BOTTOM
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img'>",
        f"<title>{escape(title)}</title>",
        "<rect width='100%' height='100%' fill='white'/>",
        f"<text x='12' y='24' font-weight='600' {_STYLE}>{escape(title)}</text>",
        f"<line x1='{_LEFT}' y1='{bottom}' x2='{_WIDTH - _RIGHT}' y2='{bottom}' stroke='#888'/>",
        f"<text x='{middle}' y='{_HEIGHT - 12}' text-anchor='middle' {_STYLE}>{escape(x_label)}</text>",
        f"<text x='16' y='{_HEIGHT / 2}' text-anchor='middle' transform='rotate(-90 16 {_HEIGHT / 2})' "
        f"{_STYLE}>{escape(y_label)}</text>",
    ]


def _legend(index: int, name: str, colour: str) -> list[str]:
    x, y = _WIDTH - _RIGHT + 14, _TOP + 22 * index
    return [
        f"<rect x='{x}' y='{y}' width='12' height='12' fill='{colour}'/>",
        f"<text x='{x + 18}' y='{y + 11}' {_STYLE}>{escape(name)}</text>",
    ]
