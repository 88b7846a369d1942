"""Reads what `npu-smi info` prints: chips, their health and memory, and the processes on them.

The table has changed with every driver: one or two lines a chip, a device id or none, memory as `used / total` or
`used/total`, HBM beside memory, cells more or less. So it is read by its own headings: a heading names one value, and
values follow each other as their headings do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.errors import DuopackError, quoted

MAX_TEXT, MAX_LINE = 1 << 20, 400
_RULE = re.compile(r"^\s*[+|][-=+ ]*[+|]\s*$")
_PAIR = re.compile(r"(\S+?)\s*/\s*(\S+)")
_ERROR = re.compile(r"(?:ret|result|errcode|error code)\D{0,12}?(-?\d{3,6})", re.IGNORECASE)
_TITLE = re.compile(r"[A-Za-z][\w-]*(?:\([^)]*\))?")
HELD = -8005
"""The error of npu-smi in a container when the chip is held by another one, or not mapped at all."""


@dataclass(frozen=True)
class Chip:
    """One chip: `card` is npu-smi's NPU id, `number` the chip's on that card, `device` the N of /dev/davinciN.

    Memory in MiB, temperature in °C; None where npu-smi has no value.
    """

    card: int
    number: int
    device: int
    name: str
    health: str
    temperature: float | None
    memory_used: int | None
    memory_total: int | None
    bus: str = ""

    @property
    def healthy(self) -> bool:
        return self.health.upper() == "OK"


@dataclass(frozen=True)
class Process:
    """A process on a chip, by npu-smi's card and chip number; memory in MiB."""

    card: int
    number: int
    pid: int
    name: str
    memory: int | None


@dataclass(frozen=True)
class NpuSmi:
    """What one call of `npu-smi info` told. `error` is its error code when it told nothing, e.g. -8005."""

    version: str
    chips: tuple[Chip, ...]
    processes: tuple[Process, ...]
    error: int | None = None

    def on(self, chip: Chip) -> tuple[Process, ...]:
        """The processes on a chip."""
        return tuple(one for one in self.processes if (one.card, one.number) == (chip.card, chip.number))

    def chip(self, device: int) -> Chip | None:
        return next((one for one in self.chips if one.device == device), None)


def parse_npu_smi(text: str) -> NpuSmi:
    """Raises DuopackError for a text that is neither the table nor an error of npu-smi."""
    lines = text[:MAX_TEXT].splitlines()
    version = re.search(r"npu-smi\s+v?(\S+)", text)
    chips = tuple(_chips(lines))
    if chips:
        return NpuSmi(version[1] if version else "", _numbered(chips), tuple(_processes(lines)))
    if failed := _ERROR.search(text):
        return NpuSmi(version[1] if version else "", (), (), int(failed[1]))
    if "npu" in text.lower() and any(_RULE.match(line) for line in lines):
        return NpuSmi(version[1] if version else "", (), ())
    raise DuopackError(
        f"this is not what npu-smi info prints: {quoted(text.strip(), 120) or 'nothing'}",
        where="npu-smi info",
        mend="install the Ascend driver, and run it as a user who may use it",
    )


@dataclass(frozen=True)
class _Row:
    """The values of a chip's lines by their headings, in lower case without units: `memory-usage` is a pair."""

    values: Mapping[str, str]

    def text(self, *names: str) -> str:
        return next((self.values[name] for name in names if name in self.values), "")

    def number(self, *names: str) -> int | None:
        found = self.text(*names)
        return int(found) if re.fullmatch(r"\d{1,9}", found) else None

    def real(self, *names: str) -> float | None:
        found = self.text(*names)
        return float(found) if re.fullmatch(r"-?\d{1,4}(\.\d+)?", found) else None


def _chips(lines: Sequence[str]) -> Iterator[Chip]:
    headings: list[list[list[str]]] = []
    pending: dict[str, str] = {}
    rows = 0
    for cells in _table(lines):
        titles = [_titles(cell) for cell in cells]
        words = {title for cell in titles for title in cell}
        if {"process", "id"} <= words:
            return
        if words & {"health", "bus-id"} and words & {"npu", "chip"}:
            headings = [*headings, titles] if not rows and headings else [titles]
            pending, rows = {}, 0
            continue
        if not headings:
            continue
        layout = headings[rows % len(headings)]
        values = _values(layout, cells)
        if values is None:
            continue
        pending = {**pending, **values} if rows % len(headings) else values
        rows += 1
        if rows % len(headings) == 0 and (made := _chip(_Row(pending))):
            yield made


def _chip(row: _Row) -> Chip | None:
    card = row.number("npu")
    if card is None or not row.text("name"):
        return None
    used, total = _memory(row)
    number = row.number("chip")
    device = row.number("device", "phy-id", "chip-phy-id", "logic-id")
    return Chip(
        card=card,
        number=number or 0,
        device=-1 if device is None else device,
        name=row.text("name").removeprefix("Ascend"),
        health=row.text("health"),
        temperature=row.real("temp"),
        memory_used=used,
        memory_total=total,
        bus=row.text("bus-id"),
    )


def _memory(row: _Row) -> tuple[int | None, int | None]:
    """Memory and HBM stand beside each other on chips that have HBM; the one that exists has a total."""
    for name in ("memory-usage", "hbm-usage"):
        used, _, total = row.text(name).partition("/")
        if total.isdigit() and int(total):
            return (int(used) if used.isdigit() else None), int(total)
    return None, None


def _numbered(chips: tuple[Chip, ...]) -> tuple[Chip, ...]:
    """Tables without a device id count chips in order, as the driver does."""
    if all(chip.device >= 0 for chip in chips):
        return chips
    return tuple(replace(chip, device=place) for place, chip in enumerate(chips))


def _processes(lines: Sequence[str]) -> Iterator[Process]:
    inside = False
    for cells in _table(lines):
        text = " ".join(cells).lower()
        if "process id" in text:
            inside = True
            continue
        if not inside or len(cells) < 4:
            continue
        head = re.fullmatch(r"(\d+)(?:\s+(\d+))?", cells[0])
        if head and re.fullmatch(r"\d+", cells[1]):
            memory = re.match(r"\d+", cells[3])
            yield Process(
                int(head[1]), int(head[2] or 0), int(cells[1]), cells[2], int(memory[0]) if memory else None
            )


def _table(lines: Sequence[str]) -> Iterator[list[str]]:
    for line in lines:
        bare = line[:MAX_LINE].strip()
        if bare.startswith("|") and not _RULE.match(bare):
            yield [cell.strip() for cell in bare.strip("|").split("|")]


def _titles(cell: str) -> list[str]:
    return [title.partition("(")[0].lower() for title in _TITLE.findall(cell)]


def _values(layout: Sequence[Sequence[str]], cells: Sequence[str]) -> dict[str, str] | None:
    """A line's values by heading; None when the line is not of this layout."""
    if len(cells) != len(layout):
        return None
    values: dict[str, str] = {}
    for titles, cell in zip(layout, cells, strict=True):
        words = _PAIR.sub(r"\1/\2", cell).split()
        if len(words) > len(titles):
            return None
        values |= dict(zip(titles, words, strict=False))
    return values
