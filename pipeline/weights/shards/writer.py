"""All ranks' files, written together in one pass: every byte of the checkpoint is read once, in large blocks.

Ranks have the same tensors in the same order, so their files grow side by side; each has a thread that hashes
and writes. Memory is a few blocks per rank, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from pipeline.errors import DuopackError, quoted
from pipeline.files import FileRecord
from pipeline.weights.safetensors import DTYPE_BITS, Tensor
from pipeline.weights.safetensors_writer import BLOCK, Declared, SafetensorsWriter, lay_out
from pipeline.weights.shards.binding import Bound
from pipeline.weights.shards.convert import NUMPY, Convert, Loss, conversion, convert_all
from pipeline.weights.shards.plan import Piece
from pipeline.weights.shards.source import Reader, Source, reading

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

OnBytes = Callable[[int], None]


def shard_name(rank: int, part: int) -> str:
    """The name that vLLM's loader looks for by default."""
    return f"model-rank-{rank}-part-{part}.safetensors"


def split_parts(bound: Sequence[Bound], part_size: int) -> Iterator[tuple[Bound, ...]]:
    """The targets of each part, as upstream's own saver cuts them: before `part_size` bytes would be exceeded."""
    part: list[Bound] = []
    size = 0
    for one in bound:
        needed = _declared(one).size
        if part and size + needed > part_size:
            yield tuple(part)
            part, size = [], 0
        part.append(one)
        size += needed
    yield tuple(part)


def size_of_ranks(bound: Sequence[Bound], ranks: int) -> int:
    """Bytes of tensor data of all ranks together."""
    return ranks * sum(_declared(one).size for one in bound)


def write_ranks(
    bound: Sequence[Bound], source: Source, directory: Path, *, ranks: int, part_size: int, on_bytes: OnBytes
) -> tuple[FileRecord, ...]:
    """Writes `model-rank-*-part-*.safetensors` into `directory`; `on_bytes` is told of bytes read.

    Raises DuopackError before it writes when linears that vLLM fuses have input scales that differ; and when the
    disk is full, when the source changes meanwhile, or when a value does not fit into its new dtype, with the
    tensor, the number of such values and the largest.
    """
    records: list[FileRecord] = []
    with reading(source) as reader:
        _refuse_unlike(bound, source, reader)
        for number, part in enumerate(split_parts(bound, part_size)):
            layout = lay_out(_declared(one) for one in part)
            by_name = {one.target.name: one for one in part}
            with ExitStack() as stack:
                writers = [
                    stack.enter_context(SafetensorsWriter(directory / shard_name(rank, number), layout))
                    for rank in range(ranks)
                ]
                share_out = _SharingOut(reader, source, writers, on_bytes)
                for tensor in layout.tensors:
                    share_out.target(by_name[tensor.name])
            records += [writer.record for writer in writers]
    return tuple(sorted(records))


def _refuse_unlike(bound: Sequence[Bound], source: Source, reader: Reader) -> None:
    """Linears that vLLM fuses share one input scale and offset; of different ones it would keep the last in silence."""
    for one in bound:
        if not one.target.alike:
            continue
        values = {}
        for piece in one.pieces:
            file, tensor = source.tensors[piece.source]
            room = bytearray(tensor.size)
            reader.fill(memoryview(room), file, tensor.begin)
            values[bytes(room)] = piece.source
        if len(values) > 1:
            first, other, *_ = values.values()
            raise DuopackError(
                f"{quoted(first)} and {quoted(other)} differ, but vLLM fuses their linears and would keep only one",
                where=str(source.directory),
                mend="quantize the model again so that fused linears share their input's scale and offset",
            )


def _declared(one: Bound) -> Declared:
    return Declared(one.target.name, one.target.dtype, one.target.shape)


@dataclass(frozen=True)
class _Stream:
    """A source tensor on its way into targets of one dtype."""

    name: str
    file: str
    tensor: Tensor
    width: int
    """Bytes of one source element."""
    convert: Convert | None
    out: np.dtype[Any]


class _SharingOut:
    """Gives each rank its share of the targets of one part, in the files' order."""

    def __init__(
        self, reader: Reader, source: Source, writers: Sequence[SafetensorsWriter], on_bytes: OnBytes
    ) -> None:
        self._reader = reader
        self._source = source
        self._writers = writers
        self._on_bytes = on_bytes
        self._scratch = memoryview(bytearray(BLOCK))
        self._converted = memoryview(bytearray(BLOCK))

    def target(self, one: Bound) -> None:
        if not one.pieces:
            value = np.full(prod(one.target.shape), one.target.fill, NUMPY[one.target.dtype])
            return _write(self._writers, value)
        streams = [self._stream(piece, one) for piece in one.pieces]
        if one.target.alike:
            return _write(self._writers, self._read(streams[0], 0, 1))
        for piece, stream in zip(one.pieces, streams, strict=True):
            self._piece(piece, stream)
        return None

    def _stream(self, piece: Piece, one: Bound) -> _Stream:
        file, tensor = self._source.tensors[piece.source]
        dtype = one.target.dtype
        width = DTYPE_BITS[tensor.dtype] // 8
        convert = conversion(tensor.dtype, dtype)
        return _Stream(piece.source, file, tensor, width, convert, np.dtype(NUMPY[dtype]))

    def _piece(self, piece: Piece, stream: _Stream) -> None:
        cut, shape = piece.cut, stream.tensor.shape
        shards = cut.shards or len(self._writers)
        each = len(self._writers) // shards
        groups = [self._writers[number * each : (number + 1) * each] for number in range(shards)]
        if shards == 1 and cut.padded is None:
            return self._run(stream, 0, prod(shape), groups[0])
        outer, along, inner = prod(shape[: cut.axis]), shape[cut.axis], prod(shape[cut.axis + 1 :])
        lengths = cut.lengths(shape)
        row = along * inner
        if outer > 1 and row * max(stream.width, stream.out.itemsize) <= BLOCK:
            return self._strided(stream, outer, inner, lengths, groups)
        for begin in range(0, outer * row, row):
            start = 0
            for length in lengths:
                share = length // shards
                for number, group in enumerate(groups):
                    first = start + number * share
                    valid = max(0, min(share, along - first))
                    self._run(stream, begin + first * inner, valid * inner, group)
                    _write(group, np.zeros((share - valid) * inner, stream.out))
                start += length
        return None

    def _run(self, stream: _Stream, first: int, count: int, group: Sequence[SafetensorsWriter]) -> None:
        """Copies consecutive elements to one group of ranks: into the first one's next block, then to the others."""
        leader, width = group[0], stream.out.itemsize
        while count:
            room = leader.space(min(count * width, self._most(stream) * width))
            taken = len(room) // width
            if stream.convert is None:
                self._fill(room, stream, first)
            else:
                self._convert(stream, first, np.frombuffer(room, stream.out))
            for other in group[1:]:
                other.write(room)
            leader.advance(len(room))
            first, count = first + taken, count - taken

    def _strided(
        self,
        stream: _Stream,
        outer: int,
        inner: int,
        lengths: Sequence[int],
        groups: Sequence[Sequence[SafetensorsWriter]],
    ) -> None:
        """Cuts many rows at once: each is short enough for a block to hold several."""
        row = sum(lengths) * inner
        step = self._most(stream) // row
        for done in range(0, outer, step):
            rows = min(step, outer - done)
            block = self._read(stream, done * row, rows * row).reshape(rows, -1, inner)
            for number, group in enumerate(groups):
                columns = _shares(block, lengths, number, len(groups))
                for writer in group:
                    _write_rows(writer, columns)

    def _most(self, stream: _Stream) -> int:
        """Elements that fit into a block before and after conversion."""
        return BLOCK // max(stream.width, stream.out.itemsize)

    def _read(self, stream: _Stream, first: int, count: int) -> Array:
        """Up to a block of elements, converted; valid until the next call."""
        if stream.convert is None:
            room = self._scratch[: count * stream.width]
            self._fill(room, stream, first)
            return np.frombuffer(room, stream.out)
        out = np.frombuffer(self._converted[: count * stream.out.itemsize], stream.out)
        self._convert(stream, first, out)
        return out

    def _convert(self, stream: _Stream, first: int, out: Array) -> None:
        """Reads as many elements as `out` holds, and converts them into it."""
        assert stream.convert is not None
        room = self._scratch[: out.size * stream.width]
        self._fill(room, stream, first)
        if lost := convert_all(stream.convert, np.frombuffer(room, NUMPY[stream.tensor.dtype]), out):
            self._refuse_lost(stream, lost)

    def _fill(self, room: memoryview, stream: _Stream, first: int) -> None:
        """Reads elements as they are in the source."""
        self._reader.fill(room, stream.file, stream.tensor.begin + first * stream.width)
        self._on_bytes(len(room))

    def _refuse_lost(self, stream: _Stream, first: Loss) -> NoReturn:
        """Counts what else of the tensor does not fit, and refuses."""
        assert stream.convert is not None
        total: Loss | None = None
        elements, step = prod(stream.tensor.shape), self._most(stream)
        for done in range(0, elements, step):
            room = self._scratch[: min(step, elements - done) * stream.width]
            self._reader.fill(room, stream.file, stream.tensor.begin + done * stream.width)
            values = np.frombuffer(room, NUMPY[stream.tensor.dtype])
            if lost := convert_all(stream.convert, values, np.empty(values.size, stream.out)):
                total = total + lost if total else lost
        lost = total or first
        raise DuopackError(
            f"{lost.count} of {elements} values of {quoted(stream.name)} do not fit: "
            f"the largest, {lost.largest:g}, {lost.why}",
            where=str(self._source.directory / stream.file),
            mend=lost.mend,
        )


def _shares(block: Array, lengths: Sequence[int], number: int, shards: int) -> list[Array]:
    """One rank's columns of all rows: its share of each segment."""
    columns, start = [], 0
    for length in lengths:
        first = start + number * (length // shards)
        columns.append(block[:, first : first + length // shards])
        start += length
    return columns


def _write_rows(writer: SafetensorsWriter, columns: Sequence[Array]) -> None:
    """Writes rows whose parts lie apart, as many at once as the writer's block has room for."""
    rows, inner = columns[0].shape[0], columns[0].shape[2]
    width = sum(part.shape[1] for part in columns)
    row = width * inner * columns[0].itemsize
    done = 0
    while done < rows:
        room = writer.space((rows - done) * row)
        taken = len(room) // row
        if not taken:
            # The block's end cuts a row in two.
            _write([writer], np.concatenate([part[done] for part in columns]))
            done += 1
            continue
        room = room[: taken * row]
        into = np.frombuffer(room, columns[0].dtype).reshape(taken, width, inner)
        start = 0
        for part in columns:
            into[:, start : start + part.shape[1]] = part[done : done + taken]
            start += part.shape[1]
        writer.advance(len(room))
        done += taken


def _write(group: Sequence[SafetensorsWriter], values: Array) -> None:
    if values.size:
        data = values.reshape(-1).view(np.uint8).data
        for writer in group:
            writer.write(data)
