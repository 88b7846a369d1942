"""The lock's files on disk, each checked against its sha256, the weights checked as a whole.

What was hashed once is remembered by file identity in `.duopack-verified.json`, so that a second run reads
no weights. Files beyond the lock's never leave this stage. The caller holds the directory for itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

from pipeline.catalog.schema import Model
from pipeline.errors import DuopackError, quoted
from pipeline.files import FileRecord, disk_errors, human_size, require_space, sha256_file, write_atomically
from pipeline.hubs.faults import read_errors
from pipeline.hubs.hub import Hub
from pipeline.lock.values import LockedModel
from pipeline.oci.hashing import StatIdentity
from pipeline.reports.progress import Bar, Progress
from pipeline.weights.check import WeightSummary, check_weights

RECORD = ".duopack-verified.json"
WORTH_A_BAR = 8 << 20
"""Bytes from which on a file is shown on its own, beside the total."""


@dataclass(frozen=True)
class VerifiedFile:
    """A file whose bytes had the record's sha256 when the file had this identity."""

    record: FileRecord
    path: Path
    identity: StatIdentity


@dataclass(frozen=True)
class Downloaded:
    """A model on disk: the lock's files and no others, sorted by path."""

    directory: Path
    files: tuple[VerifiedFile, ...]
    weights: tuple[WeightSummary, ...]
    """One for each directory that a profile loads."""


@dataclass(frozen=True)
class Framed:
    """Something that is a file with a few bytes around it, and who wants to know the sha256 of it all, in hex."""

    before: bytes
    after: bytes
    tell: Callable[[str], None]


def download(
    key: str,
    model: Model,
    locked: LockedModel,
    hub: Hub,
    directory: Path,
    progress: Progress,
    framed: Mapping[str, Framed] | None = None,
) -> Downloaded:
    """Brings the locked files into `directory` (a directory source stays where it is) and checks them.

    A file of `framed`, by its path, that has to be read is hashed for that in the same reading; `tell` is called
    from any thread, and only for a file that is right.

    Raises DuopackError when the disk is too small, when the hub fails or no longer has what was locked, when
    a file is wrong twice (with both digests), or when the weights are not whole.
    """
    place = Place(key, hub.location or directory, directory / RECORD, framed or {})
    records = tuple(sorted(locked.files))
    identities = place.verify(records, progress)
    wrong = [record for record in records if record not in identities]
    if wrong and hub.location:
        raise place.differs(
            wrong[0], "put the file back, or run 'duopack lock --update' to take what is there now"
        )
    if wrong:
        identities |= _fetch(place, wrong, locked, hub, progress)
    files = tuple(VerifiedFile(record, place.path(record), identities[record]) for record in records)
    return Downloaded(place.directory, files, tuple(_check_weights(key, model, records, place.directory)))


def _fetch(
    place: Place, wanted: Sequence[FileRecord], locked: LockedModel, hub: Hub, progress: Progress
) -> dict[FileRecord, StatIdentity]:
    """Fetches what is missing or wrong, and once more what came wrong."""
    missing = sum(record.size for record in wanted) - place.partial(wanted)
    require_space(place.directory, missing, purpose=f"downloading {place.key}")
    if locked.commit is None:
        _require_still_locked(place.key, hub, wanted)
    identities: dict[FileRecord, StatIdentity] = {}
    for _ in range(2):
        left = [record for record in wanted if record not in identities]
        if not left:
            break
        place.clear(left)
        with FileBars(progress, f"{place.key}: downloading", left) as bars, disk_errors(place.directory):
            hub.fetch(left, place.directory, bars.advance)
        identities |= place.verify(left, progress)
    left = [record for record in wanted if record not in identities]
    if left:
        fault = place.differs(left[0], "try again later, or take the model from another source")
        place.clear(left)
        raise fault
    return identities


def _require_still_locked(key: str, hub: Hub, wanted: Iterable[FileRecord]) -> None:
    """A hub without commits may have moved on: better to know before gigabytes are fetched."""
    listed = {file.path: file for file in hub.listing().files}
    changed = []
    for record in wanted:
        file = listed.get(record.path)
        if file is None:
            changed.append(f"'{quoted(record.path)}' is gone")
        elif file.size != record.size:
            changed.append(f"'{quoted(record.path)}' had {record.size} bytes and has {file.size}")
        elif file.sha256 not in {None, record.sha256}:
            changed.append(f"'{quoted(record.path)}' has another sha256")
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise DuopackError(
            f"the model changed at the hub since it was locked: {changed[0]}{more}",
            where=f"model '{key}'",
            mend=f"run 'duopack lock --update {key}' and see what changed, or pin a revision",
        )


def _check_weights(
    key: str, model: Model, records: Sequence[FileRecord], directory: Path
) -> Iterable[WeightSummary]:
    """Each directory that a profile loads, once for each way in which it is loaded."""
    paths = [PurePosixPath(record.path) for record in records]
    checked = set()
    for name, profile in model.profiles.items():
        below, load_format = profile.weights or ".", profile.load_format
        ranks = profile.tensor_parallel if load_format == "sharded_state" else 1
        if (below, load_format, ranks) in checked:
            continue
        checked.add((below, load_format, ranks))
        names = {path.name for path in paths if path.parent == PurePosixPath(below)}
        if not names:
            raise DuopackError(
                f"profile '{name}' loads '{below}', but no locked file is there",
                where=f"model '{key}'",
                mend="correct the profile's weights or the model's file patterns in models.yaml",
            )
        yield check_weights(
            directory / below, load_format=load_format, tensor_parallel=ranks, allow=model.allow, files=names
        )


@dataclass(frozen=True)
class Place:
    """Where a model's files lie, and the record of what was found right there."""

    key: str
    directory: Path
    record: Path
    framed: Mapping[str, Framed] = field(default_factory=dict)

    def path(self, record: FileRecord) -> Path:
        return self.directory / record.path

    def verify(self, records: Sequence[FileRecord], progress: Progress) -> dict[FileRecord, StatIdentity]:
        """The files that have their sha256, by reading only those that are not known to have it."""
        known = self._known()
        found = {record: identity for record in records if (identity := self._identity(record))}
        unread = [record for record in found if known.get(record.path) != (record, found[record])]
        right = {record: identity for record, identity in found.items() if record not in unread}
        if not unread:
            return right
        try:
            with FileBars(progress, f"{self.key}: checking", unread) as bars:
                right.update(self._hash(unread, bars))
        finally:
            self._remember(right)
        return right

    def _hash(
        self, records: Sequence[FileRecord], bars: FileBars
    ) -> Iterator[tuple[FileRecord, StatIdentity]]:
        """The right ones, as they are found. Hashing frees the interpreter: a thread per core is enough."""

        def one(record: FileRecord) -> tuple[FileRecord, StatIdentity | None]:
            before = self._identity(record)
            frame = self.framed.get(record.path)
            around = hashlib.sha256(frame.before) if frame else None
            with read_errors(self.path(record)):
                digest = sha256_file(
                    self.path(record), lambda count: bars.advance(record.path, count), also=around
                )
            same = before == self._identity(record) and digest == record.sha256
            if same and frame and around:
                around.update(frame.after)
                frame.tell(around.hexdigest())
            return record, before if same else None

        with ThreadPoolExecutor(min(len(records), os.cpu_count() or 1)) as pool:
            yield from ((record, identity) for record, identity in pool.map(one, records) if identity)

    def _identity(self, record: FileRecord) -> StatIdentity | None:
        """A regular file's identity when it has the record's size; a symlink is never taken for one."""
        try:
            status = self.path(record).lstat()
        except OSError:
            return None
        if not stat.S_ISREG(status.st_mode) or status.st_size != record.size:
            return None
        return StatIdentity.of(status)

    def clear(self, records: Iterable[FileRecord]) -> None:
        """Removes what stands where good files are to be written."""
        with disk_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
        for record in records:
            with disk_errors(self.path(record)):
                self.path(record).unlink(missing_ok=True)

    def partial(self, records: Iterable[FileRecord]) -> int:
        """Bytes that an earlier attempt left and that the client goes on from."""
        sizes = (
            self.path(record).with_name(f"{PurePosixPath(record.path).name}.incomplete") for record in records
        )
        return sum(path.stat().st_size for path in sizes if path.is_file())

    def differs(self, record: FileRecord, mend: str) -> DuopackError:
        """What is wrong with a file, in sizes or digests."""
        path = self.path(record)
        if path.is_symlink() or not path.is_file():
            what = "it is not a regular file" if path.is_symlink() or path.exists() else "it is missing"
        elif (size := path.stat().st_size) != record.size:
            difference = (
                f"{human_size(abs(size - record.size))} too {'many' if size > record.size else 'few'}"
            )
            what = f"it has {size} bytes, the lock says {record.size}: {difference}"
        else:
            with read_errors(path):
                what = f"its sha256 is {sha256_file(path)}, the lock says {record.sha256}"
        return DuopackError(what, where=str(path), mend=mend)

    def _known(self) -> Mapping[str, tuple[FileRecord, StatIdentity]]:
        """What the record holds; one that cannot be read only costs hashing again."""
        try:
            value = json.loads(self.record.read_bytes())
            entries = [
                (FileRecord(path, item["identity"]["size"], item["sha256"]), StatIdentity(**item["identity"]))
                for path, item in value.items()
            ]
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}
        return {record.path: (record, identity) for record, identity in entries}

    def _remember(self, right: Mapping[FileRecord, StatIdentity]) -> None:
        entries = {record.path: (record, identity) for record, identity in right.items()}
        value = {
            path: {"sha256": record.sha256, "identity": asdict(identity)}
            for path, (record, identity) in {**self._known(), **entries}.items()
        }
        write_atomically(self.record, json.dumps(value, indent=1, sort_keys=True).encode())


class FileBars:
    """A bar for all files and one for each large file while it moves; may be told from any thread."""

    def __init__(self, progress: Progress, label: str, records: Sequence[FileRecord]) -> None:
        self._progress = progress
        self._label = label
        self._sizes = {record.path: record.size for record in records}
        self._done = dict.fromkeys(self._sizes, 0)
        self._bars: dict[str, tuple[Bar, ExitStack]] = {}
        self._stack = ExitStack()
        self._mutex = threading.Lock()

    def __enter__(self) -> Self:
        self._total = self._stack.enter_context(self._progress.bar(self._label, sum(self._sizes.values())))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def advance(self, path: str, count: int) -> None:
        """Tells of `count` bytes more, or fewer, of one file."""
        with self._mutex:
            self._total.advance(count)
            size = self._sizes.get(path, 0)
            if size < WORTH_A_BAR or len(self._sizes) == 1:
                return
            self._done[path] += count
            self._bar(path, size).advance(count)
            if self._done[path] >= size:
                self._bars.pop(path)[1].close()

    def _bar(self, path: str, size: int) -> Bar:
        if path not in self._bars:
            own = self._stack.enter_context(ExitStack())
            self._bars[path] = (own.enter_context(self._progress.bar(f"{self._label} {path}", size)), own)
        return self._bars[path][0]
