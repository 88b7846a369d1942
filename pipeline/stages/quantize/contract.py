"""What a quantizing engine gets, and what it gives back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.files import FileRecord, write_atomically
from pipeline.reports.progress import Progress
from pipeline.stages.quantize.journal import Journal
from pipeline.weights.quant.groups import group_of, group_order
from pipeline.weights.quant.recipe import Recipe
from pipeline.weights.shards.config import Config
from pipeline.weights.shards.source import Source


@dataclass(frozen=True)
class Job:
    """One model to quantize. `names` are the source's files that count; the source is only read."""

    source: Path
    names: tuple[str, ...]
    config: Config
    checkpoint: Source
    recipe: Recipe
    allow_nonfinite: bool
    progress: Progress


@dataclass(frozen=True)
class Group:
    """One kind of layer: its tensors by what became of them, and what that cost at worst.

    `error` is the root mean square of a weight's error relative to that of its values, the largest of the group, in
    `worst`; None where the engine does not tell.
    """

    name: str
    quantized: int
    left_float: int
    error: float | None = None
    worst: str | None = None


@dataclass(frozen=True)
class Made:
    """What an engine wrote: weights, index and description, and what a person should know of it."""

    files: tuple[FileRecord, ...]
    groups: tuple[Group, ...]
    notes: tuple[str, ...] = ()


class Engine(Protocol):
    """A way to quantize."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str:
        """Of what does the work: part of what decides whether a result is still right."""
        ...

    @property
    def resumes(self) -> bool:
        """Whether a run that was interrupted can be taken up."""
        ...

    def check(self, job: Job) -> int:
        """The bytes that the result and what is made on the way will take.

        Raises DuopackError for whatever would fail later: nothing has been written, and no minutes spent.
        """
        ...

    def run(self, job: Job, directory: Path, journal: Journal) -> Made:
        """Writes into `directory`; the journal knows the whole files of an earlier run with the same inputs."""
        ...


def summarize(
    types: Iterable[tuple[str, str]], errors: Iterable[tuple[str, float]] = ()
) -> tuple[Group, ...]:
    """Groups from each weight's type, and from each weight's error where that is known."""
    counts: dict[str, list[int]] = {}
    for name, type_ in types:
        counts.setdefault(group_of(name), [0, 0])[type_ == "FLOAT"] += 1
    worst: dict[str, tuple[float, str]] = {}
    for name, error in errors:
        group = group_of(name)
        worst[group] = max(worst.get(group, (-1.0, "")), (error, name))
    return tuple(
        Group(name, quantized, left, *_cost(worst.get(name)))
        for name, (quantized, left) in sorted(counts.items(), key=lambda item: group_order(item[0]))
    )


def write_text(path: Path, text: str) -> FileRecord:
    """Writes a small file, and says what it is."""
    data = text.encode()
    write_atomically(path, data)
    return FileRecord(path.name, len(data), hashlib.sha256(data).hexdigest())


def _cost(worst: tuple[float, str] | None) -> tuple[float | None, str | None]:
    # Four digits: more would differ from machine to machine.
    return (float(f"{worst[0]:.4g}"), worst[1]) if worst else (None, None)
