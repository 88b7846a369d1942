"""A safetensors file written anew with some tensors in another dtype, streamed and put in place whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.errors import DuopackError, quoted
from pipeline.files import FileRecord
from pipeline.weights.quant.floats import STORED, narrow, settle, widen
from pipeline.weights.quant.formula import finite
from pipeline.weights.safetensors import read_header
from pipeline.weights.safetensors_writer import Declared, SafetensorsWriter, lay_out
from pipeline.weights.shards.source import changed

BLOCK: Final = 4 << 20
"""Bytes taken at once."""


@dataclass(frozen=True)
class Change:
    """A tensor's new dtype, and how a piece of its data becomes the new one."""

    dtype: str
    convert: Callable[[bytes], bytes]


def rewrite(
    path: Path,
    target: Path,
    changes: Mapping[str, Change],
    on_bytes: Callable[[int], None] | None = None,
) -> FileRecord:
    """Writes `path` to `target`, which may be the same, with the tensors named in `changes` in their new form."""
    header = read_header(path)
    declared = [
        Declared(name, changes[name].dtype if name in changes else one.dtype, one.shape)
        for name, one in header.tensors.items()
    ]
    layout = lay_out(declared, header.metadata)
    with path.open("rb") as file, SafetensorsWriter(target, layout) as writer:
        for one in layout.tensors:
            tensor = header.tensors[one.name]
            change = changes.get(one.name)
            file.seek(tensor.begin)
            left = tensor.size
            while left:
                data = file.read(min(left, BLOCK))
                if not data:
                    raise changed(path)
                writer.write(change.convert(data) if change else data)
                if on_bytes:
                    on_bytes(len(data))
                left -= len(data)
    return writer.record


def scale_by_bits() -> Change:
    """float32 to int64 as vllm-ascend wants a deq_scale: the float's bits as an int32, widened."""

    def convert(data: bytes) -> bytes:
        import numpy as np

        return np.frombuffer(data, "<i4").astype("<i8").tobytes()

    return Change("I64", convert)


def cast(tensor: str, source: str, target: str, where: str) -> Change:
    """From one float dtype to another, as torch casts; a value that becomes infinite is refused with its tensor."""

    def convert(data: bytes) -> bytes:
        import numpy as np

        bits = np.frombuffer(data, STORED[source])
        values = np.empty(bits.size, "<f4")
        widen(bits, source, values)
        settle(values, target, np.empty(bits.size, "<u4"))
        result = narrow(values, target)
        if finite(bits, source) and not finite(result, target):
            raise DuopackError(
                f"{quoted(tensor)} has a value that {target} cannot hold",
                where=where,
                mend="use a recipe without calibration, which keeps the checkpoint's dtype",
            )
        return result.tobytes()

    return Change(target, convert)
