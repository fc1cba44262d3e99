"""Small charts as inline SVG, without scripts. Pure: numbers in, markup out.

Colours are CSS classes (`s1` … `s4`), so that one drawing serves light and dark pages.
A missing or non-finite value leaves a gap in its line; it is never drawn as zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 30
_MAX_POINTS = 600
_MAX_TOOLTIPS = 150

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Series:
    """One line (or one layer of a stack): a value a step, None where there is none."""

    name: str
    values: Values
    colour: str  # s1 … s4


@dataclass(frozen=True, slots=True)
class Band:
    """The area between two lines, drawn behind the series."""

    name: str
    low: Values
    high: Values
    colour: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps steps and values to the drawing; `ticks` are the values with a grid line."""

    first: float
    last: float
    low: float
    high: float
    ticks: tuple[float, ...]

    def x(self, step: float) -> float:
        """Across, in the drawing's units."""
        span = (self.last - self.first) or 1.0
        return LEFT + (step - self.first) / span * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Down, in the drawing's units."""
        span = (self.high - self.low) or 1.0
        return TOP + (self.high - value) / span * (HEIGHT - TOP - BOTTOM)


def line_chart(
    title: str,
    steps: Sequence[float],
    series: Sequence[Series],
    band: Band | None = None,
    limit: tuple[str, float] | None = None,
    floor: float | None = None,
    ceiling: float | None = None,
) -> str:
    """Lines over steps. `limit` is a named dashed line; floor and ceiling widen the axis."""
    everything = [value for line in series for value in line.values]
    everything += [*band.low, *band.high] if band is not None else []
    everything += [value for value in (floor, ceiling, limit[1] if limit else None)]
    scale = scale_of(steps, everything)
    parts = [_axes(scale)]
    if band is not None:
        parts.append(_band(scale, steps, band))
    if limit is not None:
        y = scale.y(limit[1])
        parts.append(
            f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
    parts += [_line(scale, steps, line) for line in series]
    parts.append(_tooltips(scale, steps, series))
    keys = [_key(line.colour, line.name, last_finite(line.values)) for line in series]
    if band is not None:
        keys.append(_key(f"{band.colour} area", band.name, None))
    if limit is not None:
        keys.append(_key("limit", limit[0], limit[1]))
    return _figure(title, "".join(parts), keys, bool(finite(v for s in series for v in s.values)))


def stack_chart(title: str, steps: Sequence[float], layers: Sequence[Series]) -> str:
    """Bars over steps, layers on top of each other; missing layers count nothing."""
    totals = [sum(_number(layer.values[i]) or 0.0 for layer in layers) for i in range(len(steps))]
    every = max(1, -(-len(steps) // _MAX_POINTS))
    scale = scale_of([steps[0] - 0.5, steps[-1] + 0.5] if steps else [], [0.0, *totals])
    pitch = (WIDTH - LEFT - RIGHT) / max(1, len(steps)) * every
    parts = [_axes(scale)]
    for i in range(0, len(steps), every):
        bottom = 0.0
        for layer in layers:
            value = _number(layer.values[i])
            if not value or value < 0:
                continue
            y, base = scale.y(bottom + value), scale.y(bottom)
            x = scale.x(steps[i]) - pitch * 0.4
            tip = escape(f"step {steps[i]:g}: {layer.name} {nice(value)}")
            parts.append(
                f'<rect class="{layer.colour} fill" x="{x:.1f}" y="{y:.1f}"'
                f' width="{pitch * 0.8:.1f}" height="{base - y:.1f}"><title>{tip}</title></rect>'
            )
            bottom += value
    keys = [_key(f"{layer.colour} area", layer.name, last_finite(layer.values)) for layer in layers]
    return _figure(title, "".join(parts), keys, any(totals))


def scale_of(steps: Sequence[float], values: Iterable[float | None]) -> Scale:
    """A scale that holds every finite value, with 3 to 6 round ticks."""
    numbers = finite(values) or [0.0, 1.0]
    low, high = min(numbers), max(numbers)
    if low == high:
        low, high = (low - 0.5, high + 0.5) if low else (0.0, 1.0)
    gap = _round_gap((high - low) / 4)
    low, high = math.floor(low / gap + 1e-9) * gap, math.ceil(high / gap - 1e-9) * gap
    ticks = tuple(low + gap * i for i in range(round((high - low) / gap) + 1))
    first, last = (steps[0], steps[-1]) if steps else (0.0, 1.0)
    return Scale(first, last, low, high, ticks)


def nice(value: float | None) -> str:
    """A number for people, three significant digits; a dash where there is none."""
    number = _number(value)
    if number is None:
        return "–"
    if number == int(number) and abs(number) < 1e6:
        return f"{int(number)}"
    if abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def finite(values: Iterable[float | None]) -> list[float]:
    """The values that are numbers."""
    return [number for value in values if (number := _number(value)) is not None]


def last_finite(values: Values) -> float | None:
    """The last value that is a number."""
    return next(iter(finite(reversed(values))), None)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _round_gap(raw: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(raw))
    return next(m * magnitude for m in (1, 2, 2.5, 5, 10) if raw <= m * magnitude * 1.0000001)


def _axes(scale: Scale) -> str:
    parts = []
    for tick in scale.ticks:
        y = scale.y(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_tick(tick)}</text>')
    for mark in step_marks(math.ceil(scale.first), math.floor(scale.last)):
        parts.append(
            f'<text x="{scale.x(mark):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{mark}</text>'
        )
    return "".join(parts)


def step_marks(first: int, last: int) -> list[int]:
    """Steps to name under the axis: the first, then round ones, seven at most."""
    gap = max(1, round(_round_gap(max(1, last - first) / 5)))
    return [first, *(m for m in range(gap, last + 1, gap) if m - first > gap / 3)]


def _tick(value: float) -> str:
    if abs(value) >= 1e6 or 0 < abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{round(value, 6):g}" if abs(value) < 1000 else f"{value:,.0f}"


def _runs(steps: Sequence[float], values: Values) -> list[list[tuple[float, float]]]:
    """Unbroken stretches of (step, value); long lines are thinned evenly."""
    every = max(1, -(-len(steps) // _MAX_POINTS))
    runs: list[list[tuple[float, float]]] = [[]]
    for i, (step, value) in enumerate(zip(steps, values, strict=True)):
        number = _number(value)
        if number is None:
            runs.append([])
        elif i % every == 0 or i == len(steps) - 1:
            runs[-1].append((step, number))
    return [run for run in runs if run]


def _line(scale: Scale, steps: Sequence[float], line: Series) -> str:
    parts = []
    for run in _runs(steps, line.values):
        if len(run) == 1:
            x, y = scale.x(run[0][0]), scale.y(run[0][1])
            parts.append(f'<circle class="{line.colour} fill" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>')
            continue
        points = " ".join(f"{scale.x(s):.1f},{scale.y(v):.1f}" for s, v in run)
        parts.append(f'<polyline class="{line.colour} line" points="{points}"/>')
    return "".join(parts)


def _band(scale: Scale, steps: Sequence[float], band: Band) -> str:
    both: list[float | None] = [
        high if _number(low) is not None else None
        for low, high in zip(band.low, band.high, strict=True)
    ]
    lows = dict(zip(steps, band.low, strict=True))
    parts = []
    for run in _runs(steps, both):
        top = [f"{scale.x(s):.1f},{scale.y(v):.1f}" for s, v in run]
        bottom = [f"{scale.x(s):.1f},{scale.y(lows[s] or 0.0):.1f}" for s, _ in reversed(run)]
        parts.append(f'<polygon class="{band.colour} band" points="{" ".join(top + bottom)}"/>')
    return "".join(parts)


def _tooltips(scale: Scale, steps: Sequence[float], series: Sequence[Series]) -> str:
    """An unseen column a step that tells all values on hover."""
    if not 0 < len(steps) <= _MAX_TOOLTIPS:
        return ""
    width = (WIDTH - LEFT - RIGHT) / max(1, len(steps) - 1)
    parts = []
    for i, step in enumerate(steps):
        told = ", ".join(f"{line.name} {nice(line.values[i])}" for line in series)
        tip = escape(f"step {step:g}: {told}")
        parts.append(
            f'<rect class="hover" x="{scale.x(step) - width / 2:.1f}" y="{TOP}" width="{width:.1f}"'
            f' height="{HEIGHT - TOP - BOTTOM}"><title>{tip}</title></rect>'
        )
    return "".join(parts)


def _key(colour: str, name: str, value: float | None) -> str:
    told = f" <b>{nice(value)}</b>" if value is not None else ""
    return f'<span class="key"><i class="{colour}"></i>{escape(name)}{told}</span>'


def _figure(title: str, drawing: str, keys: Sequence[str], has_data: bool) -> str:
    if not has_data:
        return f'<figure><h3>{escape(title)}</h3><p class="none">nothing was recorded</p></figure>'
    name = escape(title)
    return (
        f'<figure><h3>{name}</h3><div class="keys">{"".join(keys)}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{drawing}</svg>'
        "</figure>"
    )
