"""A checkpoint split into one file set per rank, in a directory that a server loads as `sharded_state`.

Everything is written into a hidden directory beside the destination and put in place by a rename: killed at any
point, there is the old result or none. A result made from the same source with the same options stays.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pipeline import __version__
from pipeline.errors import DuopackError, UsageError
from pipeline.files import (
    CHUNK,
    FileRecord,
    check_relative_path,
    disk_errors,
    exclusive,
    require_space,
    sha256_file,
    sync_directory,
    write_atomically,
)
from pipeline.hubs.directory import Directory
from pipeline.reports.progress import Progress
from pipeline.weights.check import INDEX_SUFFIX
from pipeline.weights.shards.binding import Bound, bind
from pipeline.weights.shards.config import Config, read_config
from pipeline.weights.shards.layers import Platform
from pipeline.weights.shards.plans import plan_model
from pipeline.weights.shards.quantization import read_quantization
from pipeline.weights.shards.record import RECORD, VLLM, Options, ShardRecord, read_record
from pipeline.weights.shards.source import Source, changed, open_source

if TYPE_CHECKING:
    from pipeline.weights.shards.writer import OnBytes

PART_SIZE = 5 << 30
"""Bytes of tensors per file: what upstream's example of saving sharded states takes, so that parts are equal too."""
OTHER_WEIGHTS = (".safetensors", INDEX_SUFFIX, ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
"""Endings of files that hold the model in another form, or index it: the shards take their place."""
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
    _check_places(source, destination)
    names = tuple(_check_name(one.path) for one in files) if files is not None else _list(source)
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
    with exclusive(destination.with_name(f".{destination.name}.lock"), progress.note):
        work = _Work(source, names, destination, checkpoint, bound, wanted, progress)
        record, new = work.run(known=files is not None)
    return Sharded(destination, record, new, round(time.monotonic() - started, 3))


@dataclass(frozen=True)
class _Work:
    """One run, alone at its destination."""

    source: Path
    names: tuple[str, ...]
    destination: Path
    checkpoint: Source
    bound: tuple[Bound, ...]
    wanted: ShardRecord
    progress: Progress

    def run(self, *, known: bool) -> tuple[ShardRecord, bool]:
        """The record, and whether it is new; `known` tells that the source's digests are in `wanted` already."""
        self._remove_leftovers()
        there = self._there()
        if there and not known and _differ_only_in_digests(there, self.wanted, self.names):
            # Worth hashing first: most likely nothing is left to do.
            wanted, known = replace(self.wanted, source=self._hash_source()), True
        else:
            wanted = self.wanted
        if there and known and there.same_inputs(wanted) and self._whole(there):
            self.progress.note(f"there already: {self.destination}")
            return there, False
        return self._make(wanted, known), True

    def _make(self, wanted: ShardRecord, known: bool) -> ShardRecord:
        from pipeline.weights.shards.writer import size_of_ranks, write_ranks

        ranks = wanted.tensor_parallel
        side = [name for name in self.names if name != RECORD and not name.lower().endswith(OTHER_WEIGHTS)]
        needed = size_of_ranks(self.bound, ranks) + sum((self.source / name).stat().st_size for name in side)
        require_space(self.destination.parent, needed + SLACK, purpose=f"splitting {self.source.name}")
        total = sum((self.source / name).stat().st_size for name in self.checkpoint.files)
        partial = self._beside("partial")
        try:
            with (
                _Digests(self.source, () if known else self.names) as digests,
                self.progress.bar(f"split for TP {ranks}", total) as bar,
            ):
                with disk_errors(partial):
                    partial.mkdir()
                on_bytes: OnBytes = bar.advance
                shards = write_ranks(
                    self.bound,
                    self.checkpoint,
                    partial,
                    ranks=ranks,
                    part_size=wanted.part_size,
                    on_bytes=on_bytes,
                )
                copied = [_copy(self.source, name, partial) for name in side]
                source = wanted.source if known else digests.result()
                _check_copies(self.source, copied, source)
                record = replace(wanted, source=source, files=tuple(sorted([*shards, *copied])))
                write_atomically(partial / RECORD, record.encode())
            self._put_in_place(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return record

    def _put_in_place(self, partial: Path) -> None:
        """Two renames when there is an old result: between them there is none, and never half of one."""
        old = self._beside("old")
        with disk_errors(self.destination):
            if self.destination.exists():
                self.destination.rename(old)
            partial.rename(self.destination)
            sync_directory(self.destination.parent)
        shutil.rmtree(old, ignore_errors=True)

    def _there(self) -> ShardRecord | None:
        """The record of an older result; a directory with anything else in it is not ours to replace."""
        if not self.destination.exists():
            return None
        with suppress(DuopackError):
            if record := read_record(self.destination):
                return record
        if any(path.name != RECORD for path in self.destination.iterdir()):
            raise UsageError(
                f"it holds files that are no finished result of 'duopack shard' (it has no {RECORD})",
                where=str(self.destination),
                mend="name a new directory, or empty this one yourself",
            )
        return None

    def _whole(self, record: ShardRecord) -> bool:
        """Whether every file is there in full size; their digests are `duopack check --shards`' work."""
        paths = [(self.destination / one.path, one.size) for one in record.files]
        return all(path.is_file() and path.stat().st_size == size for path, size in paths)

    def _hash_source(self) -> tuple[FileRecord, ...]:
        self.progress.note(
            f"hashing {self.source.name}, to see whether {self.destination.name} is made from it"
        )
        with _Digests(self.source, self.names) as digests:
            return digests.result()

    def _beside(self, kind: str) -> Path:
        return self.destination.with_name(f".{self.destination.name}.{kind}")

    def _remove_leftovers(self) -> None:
        """What a killed run left; the lock says that it is nobody's."""
        for kind in ("partial", "old"):
            if (leftover := self._beside(kind)).exists():
                with disk_errors(leftover):
                    shutil.rmtree(leftover)


class _Digests:
    """The records of a directory's files, hashed in a thread beside the work of the block."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self._directory = directory
        self._names = names
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._stop = False

    def __enter__(self) -> _Digests:
        self._futures: list[Future[FileRecord]] = [self._pool.submit(self._one, name) for name in self._names]
        return self

    def result(self) -> tuple[FileRecord, ...]:
        return tuple(sorted(future.result() for future in self._futures))

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _one(self, name: str) -> FileRecord:
        path = self._directory / name
        before = path.stat()
        digest = sha256_file(path, self._check_stopped)
        after = path.stat()
        if (before.st_size, before.st_mtime_ns, before.st_ino) != (
            after.st_size,
            after.st_mtime_ns,
            after.st_ino,
        ):
            raise changed(path)
        return FileRecord(name, after.st_size, digest)

    def _check_stopped(self, count: int) -> None:
        del count
        if self._stop:
            raise InterruptedError(errno.EINTR, "the run ended before the source was hashed")


def _check_places(source: Path, destination: Path) -> None:
    if not source.is_dir():
        raise UsageError(
            "there is no such directory", where=str(source), mend="name the directory of a model"
        )
    inner, outer = destination.resolve(), source.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise UsageError(
            f"the destination {destination} and the source {source} lie in each other",
            mend="name a directory outside the source: everything in it is replaced",
        )
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise UsageError(
            "it is there, and no directory", where=str(destination), mend="name another destination"
        )


def _check_version(vllm: str) -> None:
    if vllm not in VLLM:
        raise UsageError(
            f"what vLLM {vllm} registers is not known: the plans were proved against {', '.join(VLLM)}",
            where="--vllm",
            mend=f"serve the shards with {', '.join(VLLM)}, or serve the model unsplit",
        )


def _list(source: Path) -> tuple[str, ...]:
    return tuple(_check_name(file.path) for file in Directory(source).listing().files)


def _check_name(name: str) -> str:
    return check_relative_path(name, where="the model's files")


def _has_vision(config: Config) -> bool:
    return "vision_config" in config.values


def _differ_only_in_digests(there: ShardRecord, wanted: ShardRecord, names: Sequence[str]) -> bool:
    return replace(there, source=()).same_inputs(replace(wanted, source=())) and sorted(names) == [
        one.path for one in there.source
    ]


def _copy(source: Path, name: str, directory: Path) -> FileRecord:
    """Copies a side file for all to read: quantizers write 0600, and a server may run as another user."""
    target = directory / name
    with (source / name).open("rb") as old, disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as new:
            shutil.copyfileobj(old, new, CHUNK)
            new.flush()
            os.fchmod(new.fileno(), 0o644)
            os.fsync(new.fileno())
    return FileRecord(name, target.stat().st_size, sha256_file(target))


def _check_copies(directory: Path, copied: Sequence[FileRecord], source: Sequence[FileRecord]) -> None:
    """A copy equals the file that was hashed, or that a lock names."""
    known = {one.path: one for one in source}
    for one in copied:
        if one != known[one.path]:
            raise changed(directory / one.path)
