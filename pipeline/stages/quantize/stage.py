"""From a directory of float weights to one that vllm-ascend loads on 310P, whichever engine does the work."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline import __version__
from pipeline.errors import DuopackError, UsageError, quoted
from pipeline.files import FileRecord, disk_errors, exclusive, require_space, write_atomically
from pipeline.reports.progress import Progress
from pipeline.stages.made_directory import (
    MadeDirectory,
    check_copies,
    check_file_name,
    check_places,
    copy_side_file,
    hashed,
    list_files,
    side_files,
)
from pipeline.stages.quantize.contract import Engine, Job
from pipeline.stages.quantize.journal import Journal
from pipeline.stages.quantize.recipes import W8A8SC, find_recipe
from pipeline.stages.quantize.record import RECORD, QuantizationRecord, read_record
from pipeline.stages.quantize.streaming import StreamingEngine
from pipeline.weights.check import DESCRIPTION
from pipeline.weights.quant.checks import check_quantized
from pipeline.weights.shards.config import Config, read_config
from pipeline.weights.shards.source import open_source

SLACK = 64 << 20
"""Bytes kept free beyond what is written, for file system overhead."""


@dataclass(frozen=True)
class Quantized:
    """A directory of quantized weights: the record is in it, and names every other file of it."""

    directory: Path
    record: QuantizationRecord
    new: bool
    """False when a result from the same source and recipe was there already."""
    size_before: int
    """Bytes of the source's weight files."""
    seconds: float

    @property
    def size(self) -> int:
        """Bytes of the result's weight files."""
        return sum(one.size for one in self.record.files if one.path.endswith(".safetensors"))


def quantize(
    source: Path,
    destination: Path,
    progress: Progress,
    *,
    recipe: str,
    engine: str = "auto",
    engines: Mapping[str, Engine] | None = None,
    files: Sequence[FileRecord] | None = None,
    allow_nonfinite: bool = False,
) -> Quantized:
    """Quantizes the checkpoint in `source` into `destination` by a recipe.

    `engine` names one of `engines` (absent: the streaming one alone), or `auto`: streaming where it covers the
    recipe. `files` are the source's files that count, with known digests (a lock's); absent, every file counts. The
    source is only read. Raises UsageError for a recipe, engine or destination that cannot be,
    and DuopackError for what is wrong with the source, the disk, the engine or the result.
    """
    started = time.monotonic()
    check_places(source, destination)
    names = tuple(check_file_name(one.path) for one in files) if files is not None else list_files(source)
    config = read_config(source)
    _refuse_quantized(source, names, config)
    checkpoint = open_source(source, [name for name in names if "/" not in name])
    chosen = find_recipe(recipe, config.architecture, where=str(source))
    job = Job(source, names, config, checkpoint, chosen, allow_nonfinite, progress)
    worker = _engine(engine, engines or {}, job)
    needed = worker.check(job)
    wanted = QuantizationRecord(
        duopack=__version__,
        engine=worker.name,
        engine_version=worker.version,
        recipe=chosen.name,
        recipe_sha256=hashlib.sha256(chosen.text.encode()).hexdigest(),
        allow_nonfinite=allow_nonfinite,
        source=tuple(sorted(files or ())),
    )
    made = MadeDirectory(destination)
    with disk_errors(destination):
        destination.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(made.lock, progress.note):
        record, new = _Work(job, worker, needed, made, wanted).run()
    size_before = sum((source / name).stat().st_size for name in checkpoint.files)
    return Quantized(destination, record, new, size_before, round(time.monotonic() - started, 3))


def _engine(name: str, engines: Mapping[str, Engine], job: Job) -> Engine:
    streaming = StreamingEngine()
    if name == "streaming":
        return streaming
    if name == "auto":
        uncovered = streaming.covers(job)
        if uncovered is None:
            return streaming
        name = W8A8SC if job.recipe.name == W8A8SC else "msmodelslim"
        job.progress.note(f"by {name}: {uncovered.what}")
        if name not in engines:
            raise uncovered
    if (name == W8A8SC) != (job.recipe.name == W8A8SC):
        raise UsageError(
            f"the engine {quoted(name)} does not run the recipe {quoted(job.recipe.name)}",
            where="--engine",
            mend=f"the recipe and the engine {W8A8SC} go together; leave out --engine",
        )
    if name not in engines:
        raise UsageError(
            f"there is no engine '{quoted(name)}'",
            where="--engine",
            mend=f"choose one of auto, streaming{''.join(f', {each}' for each in engines)}",
        )
    return engines[name]


def _refuse_quantized(source: Path, names: Sequence[str], config: Config) -> None:
    text = config.values.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    if DESCRIPTION in names or config.values.get("quantization_config") or inner:
        raise DuopackError(
            "these weights are quantized already",
            where=str(source),
            mend="take the model's float weights; 'duopack check --weights DIR' tells whether these load on 310P",
        )


@dataclass(frozen=True)
class _Work:
    """One run, alone at its destination."""

    job: Job
    engine: Engine
    needed: int
    made: MadeDirectory
    wanted: QuantizationRecord

    def run(self) -> tuple[QuantizationRecord, bool]:
        """The record, and whether it is new."""
        self.made.remove("old")
        there = self._there()
        if (
            there
            and there.same_inputs(self.wanted)
            and self._whole(there)
            and self._stamp() == self._stamped()
        ):
            self.made.remove("partial")
            self.job.progress.note(f"there already: {self.made.place}")
            return there, False
        return self._make(), True

    def _make(self) -> QuantizationRecord:
        job, partial = self.job, self.made.partial
        stamp = self._stamp()
        try:
            with disk_errors(partial):
                journal = Journal(partial, stamp)
                self._require_space(journal)
                result = self.engine.run(job, partial, journal)
                written = {one.path for one in result.files}
                side = [name for name in side_files(job.names) if name != RECORD and name not in written]
                copied = [copy_side_file(job.source, name, partial) for name in side]
                check_copies(job.source, copied, self.wanted.source or hashed(job.source, side))
                files = tuple(sorted((*result.files, *copied)))
                journal.remove()
                _remove_strays(partial, files)
                _check_result(partial)
                record = replace(self.wanted, groups=result.groups, notes=result.notes, files=files)
                write_atomically(partial / RECORD, record.encode())
            self.made.put_in_place()
            write_atomically(self.made.beside("stamp"), stamp.encode())
        except BaseException as error:
            if not (self.engine.resumes and _may_go_on(error)):
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return record

    def _require_space(self, journal: Journal) -> None:
        """Counts what lies in the partial directory already as room."""
        side = sum((self.job.source / name).stat().st_size for name in side_files(self.job.names))
        there = (
            sum(path.stat().st_size for path in self.made.partial.rglob("*") if path.is_file())
            if journal
            else 0
        )
        purpose = f"quantizing {self.job.source.name}"
        require_space(self.made.place.parent, self.needed + side + SLACK - there, purpose=purpose)

    def _stamped(self) -> str | None:
        with suppress(OSError, UnicodeDecodeError):
            return self.made.beside("stamp").read_text(encoding="ascii")
        return None

    def _stamp(self) -> str:
        """Tells results with different inputs apart, without reading the source."""
        identities = [
            (name, status.st_size, status.st_mtime_ns, status.st_ino)
            for name in self.job.names
            for status in [(self.job.source / name).stat()]
        ]
        text = self.wanted.encode() + json.dumps([str(self.job.source.resolve()), identities]).encode()
        return hashlib.sha256(text).hexdigest()

    def _there(self) -> QuantizationRecord | None:
        """The record of an older result; a directory with anything else in it is not ours to replace."""
        place = self.made.place
        if not place.exists():
            return None
        with suppress(DuopackError):
            if record := read_record(place):
                return record
        if any(path.name != RECORD for path in place.iterdir()):
            raise UsageError(
                f"it holds files that are no finished result of 'duopack quantize' (it has no {RECORD})",
                where=str(place),
                mend="name a new directory, or empty this one yourself",
            )
        return None

    def _whole(self, record: QuantizationRecord) -> bool:
        """Whether every file is there in full size."""
        paths = [(self.made.place / one.path, one.size) for one in record.files]
        return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def _remove_strays(directory: Path, files: Sequence[FileRecord]) -> None:
    """What an engine left besides its result: logs, caches."""
    wanted = {one.path.partition("/")[0] for one in files}
    for path in directory.iterdir():
        if path.name in wanted:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _check_result(directory: Path) -> None:
    """The checks that downloaded weights pass too. What fails them is our fault or the engine's, never shipped."""
    errors = [one for one in check_quantized(directory) if one.severity == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise DuopackError(
            f"the result would not load on 310P: {errors[0].sentence}; vllm-ascend {errors[0].effect}{more} "
            f"[{errors[0].id}]",
            mend="correct the recipe, or choose another",
        )


def _may_go_on(error: BaseException) -> bool:
    """Whether the same command may succeed where this one ended: after Ctrl-C, or with more room on the disk."""
    cause = error.__cause__
    full = isinstance(cause, OSError) and cause.errno in {errno.ENOSPC, errno.EDQUOT}
    return isinstance(error, KeyboardInterrupt) or full
