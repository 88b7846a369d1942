"""Stacked bars: sums made of named parts, as text for a terminal and as an SVG picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

FILLS = "█▓▒░▚▞▤▥"
PLAIN = "#=+-:%*o"
COLOURS = ("#4269d0", "#efb118", "#3ca951", "#ff725c", "#a463f2", "#6cc5b0", "#9c6b4e", "#97bbf5")
SPARE = "#e8e8e8"


@dataclass(frozen=True)
class Stack:
    """One bar: its label, its parts (name, size), and the size that they should stay within."""

    label: str
    parts: Sequence[tuple[str, float]]
    limit: float


def text_bar(stack: Stack, *, width: int = 60, plain: bool = False) -> str:
    """The bar on one line and its legend below; what is over the limit stands behind a `|`."""
    fills = PLAIN if plain else FILLS
    scale = width / max(stack.limit, 1e-9)
    cells, at, end = "", 0.0, 0
    for number, (_, size) in enumerate(stack.parts):
        at += size
        grown = max(end, round(at * scale))
        cells += fills[number % len(fills)] * (grown - end)
        end = grown
    bar = cells[:width].ljust(width, "." if plain else "·") + "|" + cells[width : 2 * width]
    legend = "  ".join(f"{fills[number % len(fills)]} {name}" for number, (name, _) in enumerate(stack.parts))
    return f"{bar}\n{legend}"


def svg_bars(title: str, stacks: Sequence[Stack], *, unit: str) -> str:
    """Bars below each other on one scale, each with a line where its limit is, and a legend."""
    names = list(dict.fromkeys(name for stack in stacks for name, _ in stack.parts))
    left, width, height, gap = 170, 640, 24, 12
    most = max([stack.limit for stack in stacks] + [sum(size for _, size in one.parts) for one in stacks])
    top, rows = 40, []
    for row, stack in enumerate(stacks):
        y = top + row * (height + gap)
        rows.append(f'<text x="{left - 10}" y="{y + 16}" text-anchor="end">{escape(stack.label)}</text>')
        limit = stack.limit / most * width
        rows.append(f'<rect x="{left}" y="{y}" width="{limit:.1f}" height="{height}" fill="{SPARE}"/>')
        x = float(left)
        for name, size in stack.parts:
            part = size / most * width
            tip = f"{name}: {size:.2f} {unit}"
            rows.append(
                f'<rect x="{x:.1f}" y="{y}" width="{part:.1f}" height="{height}" '
                f'fill="{COLOURS[names.index(name) % len(COLOURS)]}"><title>{escape(tip)}</title></rect>'
            )
            x += part
        line = left + limit
        rows.append(f'<path d="M{line:.1f} {y - 3}v{height + 6}" stroke="#000"/>')
    bottom = top + len(stacks) * (height + gap) + 8
    for number, name in enumerate(names):
        x, y = left + number % 3 * 215, bottom + number // 3 * 20
        rows.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[number % len(COLOURS)]}"/>')
        rows.append(f'<text x="{x + 18}" y="{y + 11}">{escape(name)}</text>')
    total = bottom + -(-len(names) // 3) * 20 + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 30}" height="{total}" '
        f'font-family="sans-serif" font-size="13" role="img">\n'
        f'<title>{escape(title)}</title>\n<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text x="{left}" y="22" font-weight="bold">{escape(title)}</text>\n'
        + "\n".join(rows)
        + "\n</svg>\n"
    )
