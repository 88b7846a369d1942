"""A checkpoint split into one file set per rank, in a directory that a server loads as `sharded_state`.

Everything is written into a hidden directory beside the destination and put in place by a rename: killed at any
point, there is the old result or none. A result made from the same source with the same options stays.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from pipeline import __version__
from pipeline.errors import DuopackError, UsageError
from pipeline.files import FileRecord, disk_errors, exclusive, require_space, write_atomically
from pipeline.reports.progress import Progress
from pipeline.stages.made_directory import (
    Digests,
    MadeDirectory,
    check_copies,
    check_file_name,
    check_places,
    copy_side_file,
    list_files,
    side_files,
)
from pipeline.weights.shards.binding import Bound, bind
from pipeline.weights.shards.config import Config, read_config
from pipeline.weights.shards.layers import Platform
from pipeline.weights.shards.plans import plan_model
from pipeline.weights.shards.quantization import read_quantization
from pipeline.weights.shards.record import RECORD, VLLM, Options, ShardRecord, read_record
from pipeline.weights.shards.source import Source, open_source

PART_SIZE = 5 << 30
"""Bytes of tensors per file: what upstream's example of saving sharded states takes, so that parts are equal too."""
SLACK = 64 << 20
"""Bytes kept free beyond what is written, for file system overhead."""


@dataclass(frozen=True)
class Sharded:
    """A directory of shards: the record is in it, and names every other file of it."""

    directory: Path
    record: ShardRecord
    new: bool
    """False when a result from the same source and options was there already."""
    seconds: float

    @property
    def size(self) -> int:
        """Bytes of all files that the record names."""
        return sum(one.size for one in self.record.files)


def shard_directory(model: str, ranks: int) -> PurePosixPath:
    """Where a model's shards lie below /models by convention: `<Model>/TP{n}/<Model>-tp{n}`."""
    return PurePosixPath(model) / f"TP{ranks}" / f"{PurePosixPath(model).name}-tp{ranks}"


def shard(
    source: Path,
    destination: Path,
    progress: Progress,
    *,
    ranks: int,
    platform: Platform = "310p",
    vllm: str = "0.20.2",
    files: Sequence[FileRecord] | None = None,
    part_size: int = PART_SIZE,
) -> Sharded:
    """Splits the checkpoint in `source` for `ranks` ranks into `destination`.

    `files` are the source's files that count, with known digests (a lock's); absent, every file counts and is
    hashed meanwhile. Raises UsageError for a TP, version or destination that cannot be, and DuopackError for what
    is wrong with the source or the disk; before anything is written, except for values that do not fit into fp16.
    """
    started = time.monotonic()
    _check_version(vllm)
    check_places(source, destination)
    names = tuple(check_file_name(one.path) for one in files) if files is not None else list_files(source)
    config, quantization = read_config(source), read_quantization(source)
    plan = plan_model(config, quantization, ranks, platform)
    checkpoint = open_source(source, [name for name in names if "/" not in name])
    bound = bind(plan, checkpoint)
    wanted = ShardRecord(
        duopack=__version__,
        architecture=plan.architecture,
        tensor_parallel=ranks,
        platform=platform,
        vllm=vllm,
        vllm_ascend=VLLM[vllm] if platform == "310p" else None,
        quantization=quantization.name,
        options=Options(vision=_has_vision(config)),
        part_size=part_size,
        source=tuple(sorted(files or ())),
    )
    with disk_errors(destination.parent):
        destination.parent.mkdir(parents=True, exist_ok=True)
    made = MadeDirectory(destination)
    with exclusive(made.lock, progress.note):
        made.remove("partial", "old")
        work = _Work(source, names, made, checkpoint, bound, wanted, progress)
        record, new = work.run(known=files is not None)
    return Sharded(destination, record, new, round(time.monotonic() - started, 3))


@dataclass(frozen=True)
class _Work:
    """One run, alone at its destination."""

    source: Path
    names: tuple[str, ...]
    made: MadeDirectory
    checkpoint: Source
    bound: tuple[Bound, ...]
    wanted: ShardRecord
    progress: Progress

    def run(self, *, known: bool) -> tuple[ShardRecord, bool]:
        """The record, and whether it is new; `known` tells that the source's digests are in `wanted` already."""
        there = self._there()
        if there and not known and _differ_only_in_digests(there, self.wanted, self.names):
            # Worth hashing first: most likely nothing is left to do.
            wanted, known = replace(self.wanted, source=self._hash_source()), True
        else:
            wanted = self.wanted
        if there and known and there.same_inputs(wanted) and self._whole(there):
            self.progress.note(f"there already: {self.made.place}")
            return there, False
        return self._make(wanted, known), True

    def _make(self, wanted: ShardRecord, known: bool) -> ShardRecord:
        from pipeline.weights.shards.writer import size_of_ranks, write_ranks

        ranks = wanted.tensor_parallel
        side = [name for name in side_files(self.names) if name != RECORD]
        needed = size_of_ranks(self.bound, ranks) + sum((self.source / name).stat().st_size for name in side)
        require_space(self.made.place.parent, needed + SLACK, purpose=f"splitting {self.source.name}")
        total = sum((self.source / name).stat().st_size for name in self.checkpoint.files)
        partial = self.made.partial
        try:
            with (
                Digests(self.source, () if known else self.names) as digests,
                self.progress.bar(f"split for TP {ranks}", total) as bar,
            ):
                with disk_errors(partial):
                    partial.mkdir()
                shards = write_ranks(
                    self.bound,
                    self.checkpoint,
                    partial,
                    ranks=ranks,
                    part_size=wanted.part_size,
                    on_bytes=bar.advance,
                )
                copied = [copy_side_file(self.source, name, partial) for name in side]
                source = wanted.source if known else digests.result()
                check_copies(self.source, copied, source)
                record = replace(wanted, source=source, files=tuple(sorted([*shards, *copied])))
                write_atomically(partial / RECORD, record.encode())
            self.made.put_in_place()
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return record

    def _there(self) -> ShardRecord | None:
        """The record of an older result; a directory with anything else in it is not ours to replace."""
        if not self.made.place.exists():
            return None
        with suppress(DuopackError):
            if record := read_record(self.made.place):
                return record
        if any(path.name != RECORD for path in self.made.place.iterdir()):
            raise UsageError(
                f"it holds files that are no finished result of 'duopack shard' (it has no {RECORD})",
                where=str(self.made.place),
                mend="name a new directory, or empty this one yourself",
            )
        return None

    def _whole(self, record: ShardRecord) -> bool:
        """Whether every file is there in full size; their digests are `duopack check --shards`' work."""
        paths = [(self.made.place / one.path, one.size) for one in record.files]
        return all(path.is_file() and path.stat().st_size == size for path, size in paths)

    def _hash_source(self) -> tuple[FileRecord, ...]:
        self.progress.note(
            f"hashing {self.source.name}, to see whether {self.made.place.name} is made from it"
        )
        with Digests(self.source, self.names) as digests:
            return digests.result()


def _check_version(vllm: str) -> None:
    if vllm not in VLLM:
        raise UsageError(
            f"what vLLM {vllm} registers is not known: the plans were proved against {', '.join(VLLM)}",
            where="--vllm",
            mend=f"serve the shards with {', '.join(VLLM)}, or serve the model unsplit",
        )


def _has_vision(config: Config) -> bool:
    return "vision_config" in config.values


def _differ_only_in_digests(there: ShardRecord, wanted: ShardRecord, names: Sequence[str]) -> bool:
    return replace(there, source=()).same_inputs(replace(wanted, source=())) and sorted(names) == [
        one.path for one in there.source
    ]
