"""W8A8_DYNAMIC from safetensors to safetensors, some rows at a time: what msmodelslim writes, without torch.

A weight is read twice, for the scales, which come first in a file, and for the values; what lies in memory is a few
blocks of rows, whatever the model's size.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import local
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from pipeline.errors import DuopackError, quoted
from pipeline.files import FileRecord
from pipeline.weights.quant.floats import STORED, narrow, settle, widen
from pipeline.weights.quant.formula import Quantizer, Rows, finite
from pipeline.weights.quant.modules import Parameter
from pipeline.weights.quant.parts import Part, Written
from pipeline.weights.safetensors_writer import SafetensorsWriter, lay_out
from pipeline.weights.shards.source import Reader, Source, reading

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

T = TypeVar("T")
OnBytes = Callable[[int], None]
BLOCK: Final = 2 << 20
"""Bytes of the source that one thread takes at once, or a row where that is longer."""
MOST_THREADS: Final = 4


@dataclass(frozen=True)
class Loss:
    """What quantizing a weight loses: the root mean square of the error relative to that of the values."""

    tensor: str
    relative: float
    zero_rows: int
    """Rows without a value other than 0: they stay so."""


@dataclass(frozen=True)
class _Scales:
    values: Array
    zero_rows: int


def bytes_to_read(written: Iterable[Written]) -> int:
    """Bytes that writing these tensors reads: what `on_bytes` is told in all."""
    return sum(_source_size(one.parameter) for one in written if one.role != "offset")


@contextmanager
def streaming(source: Source, *, allow_nonfinite: bool, on_bytes: OnBytes) -> Iterator[Stream]:
    """A stream from a source, which must not change while it is open."""
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with reading(source) as reader, ThreadPoolExecutor(threads, thread_name_prefix="quantize") as pool:
        try:
            yield Stream(source, reader, pool, threads, allow_nonfinite, on_bytes)
        finally:
            pool.shutdown(cancel_futures=True)


class Stream:
    """Writes parts; a weight's scales are kept, since they may lie in the part behind the weight's."""

    def __init__(
        self,
        source: Source,
        reader: Reader,
        pool: ThreadPoolExecutor,
        threads: int,
        allow_nonfinite: bool,
        on_bytes: OnBytes,
    ) -> None:
        self._source = source
        self._reader = reader
        self._pool = pool
        self._ahead = 2 * threads
        self._allow = allow_nonfinite
        self._on_bytes = on_bytes
        self._scales: dict[str, _Scales] = {}
        self._own = local()

    def write(self, part: Part, directory: Path) -> tuple[FileRecord, tuple[Loss, ...]]:
        """Writes one file, whole or not at all.

        Raises DuopackError for a value that is infinite or no number, for a source that changes, and for a disk
        that is full.
        """
        makers: dict[str, Callable[[SafetensorsWriter, Written], Loss | None]] = {
            "float": self._copy,
            "weight": self._quantize,
            "scale": self._write_scales,
            "offset": self._write_offsets,
        }
        by_name = {one.name: one for one in part.tensors}
        layout = lay_out(one.declared for one in part.tensors)
        losses = []
        with SafetensorsWriter(directory / part.name, layout) as writer:
            for declared in layout.tensors:
                one = by_name[declared.name]
                if loss := makers[one.role](writer, one):
                    losses.append(loss)
        return writer.record, tuple(losses)

    def _copy(self, writer: SafetensorsWriter, one: Written) -> None:
        parameter = one.parameter
        count, step = prod(one.shape), BLOCK // _width(parameter)
        tasks = (
            (lambda first=first: self._cast(parameter, first, min(step, count - first)))
            for first in range(0, count, step)
        )
        for values in self._in_order(tasks):
            writer.write(_bytes_of(values))
            self._on_bytes(values.size * _width(parameter))

    def _cast(self, parameter: Parameter, first: int, count: int) -> Array:
        bits = self._read(parameter, first, np.empty(count, STORED[parameter.dtype]))
        self._check(parameter, parameter.dtype, bits, first)
        if not parameter.casts:
            return bits
        values = np.empty(count, "<f4")
        widen(bits, parameter.dtype, values)
        for dtype in parameter.casts:
            settle(values, dtype, np.empty(count, "<u4"))
        result = narrow(values, parameter.working)
        self._check(parameter, parameter.working, result, first)
        return result

    def _write_scales(self, writer: SafetensorsWriter, one: Written) -> None:
        writer.write(_bytes_of(self._scales_of(one.parameter).values))

    def _write_offsets(self, writer: SafetensorsWriter, one: Written) -> None:
        writer.write(bytes(one.size))

    def _quantize(self, writer: SafetensorsWriter, one: Written) -> Loss:
        parameter, scales = one.parameter, self._scales_of(one.parameter)
        lost = whole = 0.0
        tasks = (
            (lambda first=first, rows=rows: self._quantize_rows(parameter, first, rows, scales.values))
            for first, rows in _row_blocks(parameter)
        )
        for values, lost_here, whole_here in self._in_order(tasks):
            writer.write(_bytes_of(values))
            lost, whole = lost + lost_here, whole + whole_here
            self._on_bytes(values.size * _width(parameter))
        return Loss(one.name, (lost / whole) ** 0.5 if whole else 0.0, scales.zero_rows)

    def _quantize_rows(
        self, parameter: Parameter, first: int, rows: int, scales: Array
    ) -> tuple[Array, float, float]:
        return self._quantizer().quantize(self._rows(parameter, first, rows), scales[first : first + rows])

    def _scales_of(self, parameter: Parameter) -> _Scales:
        if parameter.name not in self._scales:
            blocks = list(_row_blocks(parameter))
            tasks = ((lambda f=first, r=rows: self._magnitudes(parameter, f, r)) for first, rows in blocks)
            found = []
            for block in self._in_order(tasks):
                found.append(block)
                self._on_bytes(block.size * parameter.slab.shape[1] * _width(parameter))
            magnitudes = np.concatenate(found) if found else np.empty(0, "<f4")
            values = self._quantizer().scales(magnitudes, parameter.working)
            self._scales[parameter.name] = _Scales(values, int(np.count_nonzero(magnitudes == 0)))
        return self._scales[parameter.name]

    def _magnitudes(self, parameter: Parameter, first: int, rows: int) -> Array:
        magnitudes = self._quantizer().magnitudes(self._rows(parameter, first, rows))
        if not self._allow and not np.isfinite(magnitudes).all():
            row = first + int(np.argmin(np.isfinite(magnitudes)))
            self._refuse_nonfinite(parameter, f"row {row}")
        return magnitudes

    def _rows(self, parameter: Parameter, first: int, rows: int) -> Rows:
        """Some rows, in this thread's memory: valid until its next call."""
        width = parameter.slab.shape[1]
        room = self._room(rows * width * _width(parameter)).view(STORED[parameter.dtype])
        bits = self._read(parameter, first * width, room)
        return Rows(bits.reshape(rows, width), parameter.dtype, parameter.casts)

    def _read(self, parameter: Parameter, first: int, bits: Array) -> Array:
        """Fills `bits` with elements of a parameter, counted from its own first."""
        slab = parameter.slab
        file, tensor = self._source.tensors[slab.tensor]
        before = slab.first * prod(slab.shape[1:]) + first
        self._reader.fill(_bytes_of(bits), file, tensor.begin + before * _width(parameter))
        return bits

    def _room(self, size: int) -> Array:
        """Bytes of this thread's own: memory that is new each time costs the system more than the work."""
        if getattr(self._own, "room", np.empty(0)).size < size:
            self._own.room = np.empty(max(size, BLOCK), "|u1")
        room: Array = self._own.room[:size]
        return room

    def _quantizer(self) -> Quantizer:
        """This thread's."""
        if not hasattr(self._own, "quantizer"):
            self._own.quantizer = Quantizer()
        quantizer: Quantizer = self._own.quantizer
        return quantizer

    def _in_order(self, tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
        """The results in the tasks' order, a few of them being made meanwhile."""
        running: deque[Future[T]] = deque()
        for task in tasks:
            running.append(self._pool.submit(task))
            if len(running) >= self._ahead:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()

    def _check(self, parameter: Parameter, dtype: str, bits: Array, first: int) -> None:
        if not self._allow and not finite(bits, dtype):
            self._refuse_nonfinite(parameter, f"one of its elements from {first} to {first + bits.size - 1}")

    def _refuse_nonfinite(self, parameter: Parameter, place: str) -> None:
        through = f" as {parameter.working}" if parameter.casts else ""
        raise DuopackError(
            f"{quoted(parameter.name)} has a value that is infinite or no number{through} ({place})",
            where=str(self._source.directory / self._source.tensors[parameter.slab.tensor][0]),
            mend="the model is damaged: download it again; if its source is known to be so, --allow-nonfinite",
        )


def _bytes_of(values: Array) -> memoryview:
    """An array's memory, which may be written to."""
    return memoryview(values.reshape(-1).view("|u1"))  # type: ignore[arg-type]


def _row_blocks(parameter: Parameter) -> Iterator[tuple[int, int]]:
    """First row and number of rows, block by block."""
    rows, width = parameter.slab.shape
    step = max(BLOCK // max(width * _width(parameter), 1), 1)
    for first in range(0, rows, step):
        yield first, min(step, rows - first)


def _width(parameter: Parameter) -> int:
    """Bytes per element in the source."""
    return 4 if parameter.dtype == "F32" else 2


def _source_size(parameter: Parameter) -> int:
    return prod(parameter.slab.shape) * _width(parameter)
