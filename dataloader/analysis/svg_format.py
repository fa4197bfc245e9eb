"""Plots as SVG text, made by hand: they take their colours from the page, and need no script and no library."""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 520, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 16, 48
_TICKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of a bar: its name, its length and its class in the page's style."""

    name: str
    value: float
    style: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of pieces, one after the other."""

    name: str
    parts: Sequence[Part]

    @property
    def value(self) -> float:
        """The whole length."""
        return sum(part.value for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A line across a plot, with its name."""

    name: str
    value: float
    style: str


def bars(title: str, rows: Sequence[Bar], *, unit: str) -> str:
    """Return horizontal bars of pieces, one below the other, with their whole length written at the end."""
    left, row_height, top = 84, 46, 8
    height = top + row_height * len(rows) + 44
    longest = _top(row.value for row in rows)
    ticks = _ticks(longest)
    scale = (WIDTH - left - 84) / max(longest, ticks[-1])
    out = [_open(title, height)]
    bottom = top + row_height * len(rows)
    for tick in ticks:
        x = left + scale * tick
        out.append(_line(x, top, x, bottom, "grid"))
        out.append(_text(x, bottom + 18, _number(tick), "middle", "tick"))
    out.append(_text((left + WIDTH - 84) / 2, bottom + 38, unit, "middle", "label"))
    for place, row in enumerate(rows):
        y = top + place * row_height + 8
        out.append(_text(left - 8, y + 20, row.name, "end", "label"))
        x = float(left)
        for part in row.parts:
            width = scale * part.value
            if width > 0.0:
                tip = f"{row.name}, {part.name}: {_number(part.value)} {unit}"
                out.append(
                    f'<rect class="{part.style}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="30">'
                    f"<title>{html.escape(tip)}</title></rect>"
                )
            x += width
        out.append(_text(x + 6, y + 20, f"{_number(row.value)} {unit}", "start", "value"))
    return "\n".join([*out, "</svg>"])


def curve(
    title: str,
    points: Sequence[tuple[float, float]],
    *,
    x_label: str,
    y_label: str,
    levels: Sequence[Level] = (),
    mark: tuple[float, str] | None = None,
    as_columns: bool = False,
) -> str:
    """Return a curve (or columns) over x from its least to its largest, y from 0; `mark` names one x."""
    highest = _top([y for _, y in points] + [level.value for level in levels])
    ticks = _ticks(highest * 1.08)
    top = max(highest * 1.08, ticks[-1])
    xs = [x for x, _ in points]
    low, high = min(xs), max(xs)
    pad = 0.5 if as_columns else 0.0
    span = (high - low + 2 * pad) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - low + pad) / span * (WIDTH - _LEFT - _RIGHT),
            _TOP + (1 - y / top) * (HEIGHT - _TOP - _BOTTOM),
        )

    out = [_open(title, HEIGHT)]
    for tick in ticks:
        _, y = at(low, tick)
        out += [
            _line(_LEFT, y, WIDTH - _RIGHT, y, "grid"),
            _text(_LEFT - 8, y + 4, _number(tick), "end", "tick"),
        ]
    for x in xs if as_columns else _x_ticks(low, high):
        out.append(_text(at(x, 0)[0], HEIGHT - _BOTTOM + 18, _number(x), "middle", "tick"))
    if as_columns:
        width = 0.6 * (WIDTH - _LEFT - _RIGHT) / span
        out += [
            _column(at(x, y), at(x, 0)[1], width, f"{_number(x)} {x_label}: {_number(y)}") for x, y in points
        ]
    else:
        path = " ".join(
            f"{'L' if number else 'M'}{x:.1f} {y:.1f}" for number, (x, y) in enumerate(at(*p) for p in points)
        )
        out.append(f'<path class="curve" d="{path}"/>')
    for level in levels:
        _, y = at(low, level.value)
        out.append(_line(_LEFT, y, WIDTH - _RIGHT, y, f"level {level.style}"))
        out.append(_text(WIDTH - _RIGHT, y - 5, level.name, "end", "tick"))
    if mark is not None:
        x, _ = at(mark[0], 0)
        side = "end" if x > WIDTH / 2 else "start"
        out.append(_line(x, _TOP, x, HEIGHT - _BOTTOM, "mark"))
        out.append(_text(x + (-6 if side == "end" else 6), HEIGHT - _BOTTOM - 8, mark[1], side, "value"))
    out.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, x_label, "middle", "label"))
    out.append(
        f'<text class="label" text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2:.0f})" x="14"'
        f' y="{HEIGHT / 2:.0f}">{html.escape(y_label)}</text>'
    )
    return "\n".join([*out, "</svg>"])


def _column(top: tuple[float, float], bottom: float, width: float, tip: str) -> str:
    x, y = top
    return (
        f'<rect class="column" x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{bottom - y:.1f}">'
        f"<title>{html.escape(tip)}</title></rect>"
    )


def _open(title: str, height: float) -> str:
    return (
        f'<svg role="img" viewBox="0 0 {WIDTH} {height:.0f}" aria-label="{html.escape(title)}">'
        f"<title>{html.escape(title)}</title>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _top(values: Iterable[float]) -> float:
    """Return the largest value; 1 where all are nothing."""
    found = max(values, default=0.0)
    return found if found > 1e-12 else 1.0


def _ticks(highest: float) -> list[float]:
    """Return round numbers from 0 to about the highest."""
    assert highest > 0.0
    raw = highest / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= raw * (1 - 1e-9))
    return [number * step for number in range(math.floor(highest / step * (1 + 1e-9)) + 1)]


def _x_ticks(low: float, high: float) -> list[float]:
    """Return round numbers from the lowest to the highest."""
    return [tick for tick in _ticks(_top([high])) if low * (1 - 1e-9) <= tick <= high]


def _number(value: float) -> str:
    """Return a number for people: three digits, and separators from a thousand on."""
    if abs(value) < 1e-9:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
