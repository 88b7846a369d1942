"""A directory or file of an image as `weights.place.Place`: what is read of it comes from the layer's blob."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Literal

from pipeline.errors import DuopackError
from pipeline.files import human_size
from pipeline.oci.contents import LayerContents
from pipeline.oci.limits import Budget, LimitError
from pipeline.oci.model import Source
from pipeline.oci.ranges import read_range
from pipeline.oci.tree import Entry, Tree

BUFFER = 64 << 10


class UnreadError(DuopackError):
    """These bytes are in a part of a compressed layer that was not unpacked."""


@dataclass
class Reading:
    """How bytes of one image are had, and what is held of them."""

    source: Source
    layers: tuple[LayerContents, ...]
    tree: Tree
    budget: Budget
    deep: bool
    fetched: int = field(default=0, init=False)
    """Bytes that were read from layers for this."""
    _held: int = field(default=0, init=False)

    def read(self, path: str, entry: Entry, offset: int, size: int) -> bytes:
        """Bytes of a file, fewer than `size` where only its beginning was kept.

        Raises UnreadError when there is none of them, or DuopackError when the place fails.
        """
        layer, member = self.layers[entry.layer], entry.member
        head = layer.heads.get(member.path, b"")
        end = min(offset + size, member.size)
        if offset < len(head) or end <= offset:
            return head[offset:end]
        if layer.method or self.deep:
            raise UnreadError(
                f"byte {offset} of it is in a part of layer {entry.layer} that was not kept",
                where=f"/{path}",
                mend="read the whole image: --deep",
            )
        self.budget.check_time()
        self.budget.hold(end - offset)
        self._held += end - offset
        self.fetched += end - offset
        return read_range(self.source.blob(layer.descriptor), member.offset + offset, end - offset)

    def release(self) -> None:
        """What was read is not needed any more."""
        self.budget.release(self._held)
        self._held = 0


@dataclass(frozen=True)
class ImagePlace:
    """A path of the tree, links followed as a container would."""

    reading: Reading
    path: str

    def __str__(self) -> str:
        return f"/{self.path}"

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def __truediv__(self, key: str, /) -> ImagePlace:
        return ImagePlace(self.reading, f"{self.path}/{key}".lstrip("/"))

    def iterdir(self) -> Iterator[ImagePlace]:
        for name in self.reading.tree.children(self.path):
            yield self / name

    def is_file(self) -> bool:
        found = self.reading.tree.resolve(self.path)
        return found is not None and found.member.kind == "file"

    @dataclass(frozen=True)
    class Status:
        st_size: int

    def stat(self) -> Status:
        return self.Status(self._entry.member.size)

    def open(self, mode: Literal["rb"]) -> IO[bytes]:  # noqa: ARG002
        entry = self._entry
        return io.BufferedReader(
            _Part(lambda offset, size: self._read(entry, offset, size), entry.member.size, self._check),
            BUFFER,
        )

    def read_bytes(self) -> bytes:
        """The whole file, of bounded size. Raises LimitError."""
        entry = self._entry
        data = self._read(entry, 0, entry.member.size)
        if len(data) < entry.member.size:
            raise UnreadError(
                f"only {len(data)} bytes of it were kept",
                where=str(self),
                mend="read the whole image: --deep",
            )
        self._check(_values(data) if self.name.endswith(".json") else 0)
        return data

    def _read(self, entry: Entry, offset: int, size: int) -> bytes:
        most = self.reading.budget.limits.document
        if size > most:
            what = f"{human_size(size)} of it would have to be read at once; {human_size(most)} are accepted"
            raise LimitError("document", what, where=str(self))
        return self.reading.read(self.path, entry, offset, size)

    def _check(self, values: int) -> None:
        most = self.reading.budget.limits.values
        if values > most:
            raise LimitError("values", f"it has more than {most} JSON values", where=str(self))

    @property
    def _entry(self) -> Entry:
        found = self.reading.tree.resolve(self.path)
        if found is None or found.member.kind != "file":
            raise DuopackError("there is no such file", where=str(self), mend="build the image again")
        return found


def _values(data: bytes) -> int:
    """How many JSON values there can be at most."""
    return sum(map(data.count, (b"[", b"{", b",")))


class _Part(io.RawIOBase):
    """A file of which only what is asked for is read; `check` is told the number of JSON values in it so far."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, check: Callable[[int], None]) -> None:
        self._fetch, self._size, self._check = read, size, check
        self._position = self._values = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._fetch(self._position, max(0, min(len(buffer), self._size - self._position)))
        self._values += _values(data)
        self._check(self._values)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
