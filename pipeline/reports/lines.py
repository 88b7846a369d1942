"""Line charts as SVG: some series over one axis, in one picture that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from pipeline.reports.bars import COLOURS

_LEFT, _WIDTH, _TOP, _HEIGHT = 70, 560, 40, 220


@dataclass(frozen=True)
class Series:
    """A line: its name and its points (x, y) from left to right."""

    name: str
    points: Sequence[tuple[float, float]]


def svg_lines(title: str, series: Sequence[Series], *, x_label: str, y_label: str) -> str:
    """The lines on one scale from 0 up; x stands evenly, in the order of its values."""
    places = sorted({x for one in series for x, _ in one.points})
    top = nice_ceiling(max((y for one in series for _, y in one.points), default=1.0))
    step = _WIDTH / max(len(places) - 1, 1)
    across = {
        x: _LEFT + (number * step if len(places) > 1 else _WIDTH / 2) for number, x in enumerate(places)
    }
    parts = [
        *_grid(top),
        *(
            f'<text x="{at:.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{x:g}</text>'
            for x, at in across.items()
        ),
    ]
    for number, one in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        spots = [(across[x], _TOP + _HEIGHT * (1 - y / top), x, y) for x, y in one.points]
        path = "L".join(f"{at:.1f} {height:.1f}" for at, height, _, _ in spots)
        if spots:
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for at, height, x, y in spots:
            tip = escape(f"{one.name}, {x:g}: {y:g}")
            parts.append(
                f'<circle cx="{at:.1f}" cy="{height:.1f}" r="4" fill="{colour}"><title>{tip}</title></circle>'
            )
        legend = _LEFT + number % 4 * 145
        bottom = _TOP + _HEIGHT + 48 + number // 4 * 20
        parts.append(f'<rect x="{legend}" y="{bottom}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{legend + 18}" y="{bottom + 11}">{escape(one.name)}</text>')
    total = _TOP + _HEIGHT + 70 + (len(series) - 1) // 4 * 20
    middle = _LEFT + _WIDTH / 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 30}" height="{total}" '
        f'font-family="sans-serif" font-size="13" role="img">\n'
        f'<title>{escape(title)}</title>\n<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text x="{_LEFT}" y="22" font-weight="bold">{escape(title)}</text>\n'
        f'<text x="{middle:.0f}" y="{_TOP + _HEIGHT + 36}" text-anchor="middle">{escape(x_label)}</text>\n'
        f'<text transform="translate(16 {_TOP + _HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def nice_ceiling(value: float) -> float:
    """The next of 1, 2, 2.5, 5 or 10 times a power of ten; 1 for nothing."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if value <= power * factor * (1 + 1e-9))


def _grid(top: float) -> list[str]:
    lines = []
    for number in range(5):
        height = _TOP + _HEIGHT * (1 - number / 4)
        lines.append(f'<path d="M{_LEFT} {height:.1f}h{_WIDTH}" stroke="#ddd"/>')
        lines.append(
            f'<text x="{_LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{top * number / 4:g}</text>'
        )
    return lines
