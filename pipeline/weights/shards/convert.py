"""From the dtypes of a checkpoint to those of vLLM's parameters, as torch's copy does it, but never in silence.

Arrays hold raw little-endian values; bf16, which numpy does not know, is its 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[Any]

NUMPY: Final = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "I8": "|i1", "I32": "<i4", "I64": "<i8"}
"""The array dtype of each dtype that takes part in a conversion."""

F16_MAX: Final = 65504.0
BF16_TOO_LARGE: Final = 0x4780
"""The smallest positive bf16 that is infinite in fp16: 65536; the one below, 65280, is exact."""
SIGN_OFF: Final = 0x7FFF


@dataclass(frozen=True)
class Loss:
    """Values of a block that the target's dtype cannot hold: how many, the worst by magnitude, and why."""

    count: int
    largest: float
    why: str
    mend: str

    def __add__(self, other: Loss) -> Loss:
        worse = max(self, other, key=lambda loss: _magnitude(loss.largest))
        return replace(worse, count=self.count + other.count)


Convert = Callable[["Array", "Array"], Loss | None]
"""Converts the first array into the second, of equal length."""

CACHED: Final = 1 << 15
"""Elements converted at once: what numpy makes on the way stays in the processor's cache."""


def conversion(source: str, target: str) -> Convert | None:
    """How values go from one dtype to the other. Raises KeyError when they cannot; None when they are the same."""
    return None if source == target else CONVERSIONS[source, target]


def convert_all(convert: Convert, block: Array, out: Array) -> Loss | None:
    """Converts arrays of any length; the loss is that of all of it."""
    total: Loss | None = None
    for first in range(0, block.size, CACHED):
        if lost := convert(block[first : first + CACHED], out[first : first + CACHED]):
            total = total + lost if total else lost
    return total


def convertible(source: str, target: str) -> bool:
    return source == target or (source, target) in CONVERSIONS


def _bf16_to_f16(block: Array, out: Array) -> Loss | None:
    import numpy as np

    # A table of all 65536 values is four times as fast as numpy's own float32 → float16.
    np.take(_bf16_table(), block, out=out, mode="wrap")
    magnitudes = np.bitwise_and(block, SIGN_OFF)
    if magnitudes.max(initial=0) < BF16_TOO_LARGE:
        return None
    return _overflow(_widen(block[magnitudes >= BF16_TOO_LARGE]))


def _f32_to_f16(block: Array, out: Array) -> Loss | None:
    import numpy as np

    with np.errstate(over="ignore"):
        out[:] = block
    lost = ~np.isfinite(out)
    return _overflow(block[lost]) if lost.any() else None


def _to_f32(block: Array, out: Array) -> Loss | None:
    out[:] = _widen(block) if block.dtype.kind == "u" else block
    return None


def _float_to_i8(block: Array, out: Array) -> Loss | None:
    """An offset: a whole number that the quantizer left as a float."""
    import numpy as np

    values = _widen(block) if block.dtype.kind == "u" else block
    good = (values == np.rint(values)) & (np.abs(values) <= 128) & (values < 128)
    if not good.all():
        wrong = values[~good]
        why, mend = (
            "is no whole number from -128 to 127",
            "quantize the model again: this is no offset for int8",
        )
        return Loss(wrong.size, float(wrong[0]), why, mend)
    out[:] = values.astype("|i1")
    return None


def _f32_bits_to_i64(block: Array, out: Array) -> Loss | None:
    """deq_scale: 310P wants the float's bits; by value nearly every one would become 0."""
    out[:] = block.view("<i4")
    return None


CONVERSIONS: Final[dict[tuple[str, str], Convert]] = {
    ("BF16", "F16"): _bf16_to_f16,
    ("F32", "F16"): _f32_to_f16,
    ("BF16", "F32"): _to_f32,
    ("F16", "F32"): _to_f32,
    ("F32", "I8"): _float_to_i8,
    ("F16", "I8"): _float_to_i8,
    ("BF16", "I8"): _float_to_i8,
    ("F32", "I64"): _f32_bits_to_i64,
}


@cache
def _bf16_table() -> NDArray[np.float16]:
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        table: NDArray[np.float16] = _widen(np.arange(1 << 16, dtype="<u2")).astype("<f2")
    return table


def _widen(bits: Array) -> Array:
    """bf16 to float32: its bits are the upper half."""
    wide: Array = (bits.astype("<u4") << 16).view("<f4")
    return wide


def _overflow(values: Array) -> Loss:
    import numpy as np

    finite = values[np.isfinite(values)]
    if not finite.size:
        return Loss(
            values.size, float(values[0]), "is no finite number", "download it again: a whole model has none"
        )
    why = f"is beyond fp16's {F16_MAX:.0f}"
    mend = "the 310P has no bf16 to hold it; take a checkpoint of this model that runs in fp16"
    return Loss(values.size, float(finite[np.abs(finite).argmax()]), why, mend)


def _magnitude(value: float) -> float:
    """For choosing the worst: a finite value says more than an infinite one."""
    return abs(value) if isfinite(value) else -1.0
