"""Safetensors files written as a stream: first every tensor is declared, then the bytes come in file order.

The header equals the one of the safetensors library 0.8 byte for byte: compact JSON, tensors from the widest
dtype to the narrowest and by name within one, padded with spaces to a multiple of 8. Hashing and writing
happen in a thread of their own (both free the interpreter), so that the caller can read the next block.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

from pipeline.errors import DuopackError, quoted
from pipeline.files import FileRecord, disk_errors, sync_directory
from pipeline.weights.safetensors import DTYPE_BITS, LENGTH_BYTES, MAX_HEADER

BLOCK = 4 << 20
"""Bytes handed to the writing thread at once."""
BLOCKS = 3
"""Blocks per file: one being filled, one being written, one on its way."""

DTYPE_ORDER = (
    "U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E5M2FNUZ", "F8_E4M3FNUZ",
    "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F6_E3M2", "F6_E2M3", "F4", "BOOL",
)  # fmt: skip
"""The order of tensors in a file: seen in files that the library wrote."""


@dataclass(frozen=True)
class Declared:
    """A tensor that will be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of data."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class Layout:
    """A file before its data: `header` with its length in front, and the tensors in the order of their data."""

    header: bytes
    tensors: tuple[Declared, ...]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(tensor.size for tensor in self.tensors)


def lay_out(tensors: Iterable[Declared], metadata: Mapping[str, str] | None = None) -> Layout:
    """The header and the order of the data. Raises DuopackError when the format cannot hold it."""
    ordered = tuple(sorted(tensors, key=lambda one: (DTYPE_ORDER.index(one.dtype), one.name.encode())))
    entries: dict[str, object] = {}
    if metadata:
        entries["__metadata__"] = dict(sorted(metadata.items()))
    end = 0
    for one in ordered:
        if one.name in entries or one.name == "__metadata__":
            raise DuopackError(f"the tensor '{quoted(one.name)}' would be written twice into one file")
        begin, end = end, end + one.size
        entries[one.name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": (begin, end)}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise DuopackError(
            f"{len(ordered)} tensors need a header of {len(text)} bytes, over the format's limit of {MAX_HEADER}",
            mend="spread them over more files: give a smaller part size",
        )
    return Layout(len(text).to_bytes(LENGTH_BYTES, "little") + text, ordered)


class SafetensorsWriter:
    """One file, complete and synced when the `with` block ends without an error, else not there at all.

    Data goes in through `write`, or without a copy through `space` and `advance`; its total must be what the
    layout says. `record` is set at the end. Raises DuopackError when the disk is full or may not be written.
    """

    record: FileRecord

    def __init__(self, path: Path, layout: Layout) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}.partial")
        self._layout = layout
        self._left = layout.size
        self._filled = 0
        self._written = 0
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._digest = hashlib.sha256()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._drain, name=f"write {path.name}", daemon=True)

    def __enter__(self) -> Self:
        with disk_errors(self._path):
            self._handle = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        block = min(BLOCK, max(self._layout.size, 1))
        for _ in range(BLOCKS):
            self._free.put(memoryview(bytearray(block)))
        self._block = self._free.get()
        self._thread.start()
        self.write(self._layout.header)
        return self

    def space(self, limit: int) -> memoryview:
        """Room for up to `limit` bytes, at least one; fill some of it from the start, then call `advance`."""
        if limit > self._left:
            raise ValueError(f"{limit} bytes for {self._path.name}, which has room for {self._left}")
        return self._block[self._filled : self._filled + limit]

    def advance(self, count: int) -> None:
        """Takes the first `count` bytes of what `space` gave."""
        self._filled += count
        self._left -= count
        if self._filled == len(self._block):
            self._hand_over()

    def write(self, data: bytes | memoryview) -> None:
        """Copies `data`, of any length, into the stream."""
        view = memoryview(data)
        while view:
            room = self.space(len(view))
            room[:] = view[: len(room)]
            view = view[len(room) :]
            self.advance(len(room))

    def _hand_over(self) -> None:
        self._full.put(self._block[: self._filled])
        self._filled = 0
        # On a fault the thread returns blocks unwritten, so this never waits for ever.
        self._block = self._free.get()
        self._raise_fault()

    def _drain(self) -> None:
        """The thread: hashes and writes blocks in order until it gets None."""
        while (block := self._full.get()) is not None:
            try:
                if self._fault is None:
                    _write_all(self._handle, block)
                    self._digest.update(block)
                    self._start_writeback(len(block))
            except BaseException as error:
                self._fault = error
            self._free.put(memoryview(block.obj))

    def _start_writeback(self, count: int) -> None:
        """Lets the disk begin while the next block is hashed: the sync at the end then finds little to do."""
        os.posix_fadvise(self._handle, self._written, count, os.POSIX_FADV_DONTNEED)
        self._written += count

    def _raise_fault(self) -> None:
        if self._fault is not None:
            with disk_errors(self._path):
                raise self._fault

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._filled:
                self._full.put(self._block[: self._filled])
            self._full.put(None)
            self._thread.join()
            if error is None:
                self._finish()
        finally:
            os.close(self._handle)
            with suppress(FileNotFoundError):
                self._partial.unlink()

    def _finish(self) -> None:
        self._raise_fault()
        if self._left:
            raise ValueError(f"{self._path.name} lacks {self._left} bytes of data")
        with disk_errors(self._path):
            os.fsync(self._handle)
            self._partial.replace(self._path)
            sync_directory(self._path.parent)
        self.record = FileRecord(self._path.name, self._layout.size, self._digest.hexdigest())


def _write_all(handle: int, block: memoryview) -> None:
    while block:
        block = block[os.write(handle, block) :]
