"""Results on stdout: text for people, one JSON value for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any


def print_json(value: Any) -> None:
    """A command's result for machines."""
    plain = (sys.stdout.encoding or "utf-8").lower().replace("-", "") != "utf8"
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=plain, default=str) + "\n")


def print_text(text: str) -> None:
    """A command's result for people."""
    sys.stdout.write(text + "\n")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as left-aligned columns; wide (Chinese) characters count as two."""
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    )


def _width(text: str) -> int:
    import unicodedata

    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
