"""The header of a safetensors file, read and checked without its data.

Layout (the format document of the safetensors project): 8 bytes, little-endian, N; N bytes of JSON that
maps each tensor's name to dtype, shape and data_offsets, the offsets relative to the first byte behind the
header; then the data, which the tensors cover without a hole and without overlap. `__metadata__` maps
strings to strings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

from pipeline.errors import DuopackError, quoted
from pipeline.files import human_size
from pipeline.weights.place import Place

LENGTH_BYTES = 8
MAX_HEADER = 100_000_000
"""The format's own limit on N, in bytes."""
MAX_RANK = 64

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits per element of every dtype that the format knows."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file; `begin` and `end` are bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Bytes of data."""
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """The tensors of one file by name, in the order of their data, and the file's metadata."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    data_start: int
    """Bytes from the start of the file to the first tensor."""

    @property
    def data_size(self) -> int:
        return sum(tensor.size for tensor in self.tensors.values())


def read_header(path: Place) -> Header:
    """Reads and checks the header of a file; its data is not read.

    Raises DuopackError when the header breaks the format or the file's length disagrees with it.
    """
    with path.open("rb") as file:
        file_size = file.seek(0, 2)
        file.seek(0)
        length = header_length(file.read(LENGTH_BYTES), file_size, where=str(path))
        return _parse(file.read(length), file_size, where=str(path))


def header_length(prefix: bytes, file_size: int, *, where: str) -> int:
    """The JSON's length in bytes, from a file's first 8 bytes: a reader over HTTP then knows its next range.

    Raises DuopackError when the file is too short for its header or the header exceeds the format's limit.
    """
    if file_size < LENGTH_BYTES or len(prefix) < LENGTH_BYTES:
        _refuse(f"it has {file_size} bytes, too few for a safetensors header", where)
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > MAX_HEADER:
        _refuse(f"its header would be {length} bytes long, over the format's limit of {MAX_HEADER}", where)
    if LENGTH_BYTES + length > file_size:
        missing = LENGTH_BYTES + length - file_size
        _refuse(f"it is cut off inside its header: at least {human_size(missing)} are missing", where)
    return length


def parse_header(prefix: bytes, file_size: int, *, where: str) -> Header:
    """The header of a file of `file_size` bytes from its first bytes; `prefix` holds the header or more.

    Raises DuopackError as `read_header` does, and ValueError when `prefix` ends before the header does.
    """
    length = header_length(prefix, file_size, where=where)
    if len(prefix) < LENGTH_BYTES + length:
        raise ValueError(f"the prefix has {len(prefix)} bytes, the header needs {LENGTH_BYTES + length}")
    return _parse(prefix[LENGTH_BYTES : LENGTH_BYTES + length], file_size, where=where)


def _parse(text: bytes, file_size: int, *, where: str) -> Header:
    entries = _entries(text, where)
    metadata = _metadata(entries.pop("__metadata__", {}), where)
    data_start = LENGTH_BYTES + len(text)
    parsed = ((name, _tensor(name, entry, data_start, where)) for name, entry in entries.items())
    tensors = dict(sorted(parsed, key=lambda item: (item[1].begin, item[1].end)))
    end = _covered(tensors.items(), data_start, where)
    if file_size < end:
        _refuse(f"it is cut off: {human_size(end - file_size)} of {human_size(end)} are missing", where)
    if file_size > end:
        _refuse(f"{file_size - end} bytes follow the last tensor", where)
    return Header(tensors, metadata, data_start)


def _entries(text: bytes, where: str) -> dict[str, Any]:
    if not text.startswith(b"{"):
        _refuse("its header does not begin with '{'", where)
    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        _refuse(f"its header is not valid JSON ({quoted(str(error))})", where)
    if not isinstance(value, dict):
        _refuse("its header is not a JSON object", where)
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name '{quoted(twice)}' occurs twice")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _metadata(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        _refuse("its __metadata__ is not a map of strings", where)
    return value


def _tensor(name: str, entry: Any, data_start: int, where: str) -> Tensor:
    shown = f"tensor '{quoted(name)}'"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _refuse(f"{shown} does not have exactly dtype, shape and data_offsets", where)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _refuse(f"{shown} has the unknown dtype '{quoted(str(dtype))}'", where)
    if not _naturals(shape) or len(shape) > MAX_RANK:
        _refuse(f"{shown} has a shape that is not a list of sizes", where)
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(f"{shown} has offsets that are not a begin and an end", where)
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or bits // 8 != offsets[1] - offsets[0]:
        _refuse(f"{shown} is {dtype} {shape}, but its offsets span {offsets[1] - offsets[0]} bytes", where)
    return Tensor(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _covered(tensors: Iterable[tuple[str, Tensor]], data_start: int, where: str) -> int:
    """The end of the data, when the tensors follow each other without a hole and without overlap."""
    end = data_start
    for name, tensor in tensors:
        if tensor.begin != end:
            fault = "overlaps the one before it" if tensor.begin < end else "leaves a hole before it"
            _refuse(f"tensor '{quoted(name)}' {fault} in the data", where)
        end = tensor.end
    return end


def _refuse(what: str, where: str) -> NoReturn:
    raise DuopackError(
        f"this is not a whole safetensors file: {what}",
        where=where,
        mend="delete the file and download it again; if it comes back the same, the model's source is broken",
    )
