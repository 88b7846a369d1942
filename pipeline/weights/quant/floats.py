"""Floating-point values as torch keeps them in a dtype, held in float32: every F16 and BF16 value fits.

Arrays hold raw little-endian values; BF16, which numpy does not know, is its 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[Any]
    Wide = NDArray[np.float32]

FLOATS: Final = ("F32", "F16", "BF16")
STORED: Final = {"F32": "<u4", "F16": "<u2", "BF16": "<u2"}
"""The bits of each dtype as whole numbers: without their sign they are ordered as the magnitudes are."""
INFINITY: Final = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
"""The bits of infinity; above them, without the sign, is NaN."""
DROPPED: Final = {"F16": 13, "BF16": 16}
"""Bits of a float32's fraction that a dtype does not keep."""


def widen(bits: Array, dtype: str, out: Wide) -> None:
    """The values as float32; `bits` are whole numbers as `STORED` says, or of the dtype itself."""
    import numpy as np

    if dtype == "BF16":
        np.left_shift(bits, 16, out=out.view("<u4"), dtype="<u4", casting="unsafe")
    else:
        out[...] = bits.view("<f4" if dtype == "F32" else "<f2")


def narrow(values: Wide, dtype: str) -> Array:
    """The bits of values that the dtype holds exactly: what `settle` gives."""

    bits: Array = values.view("<u4") if dtype != "F16" else values.astype("<f2").view("<u2")
    if dtype == "BF16":
        return (bits >> 16).astype("<u2")
    return bits


def settle(values: Wide, dtype: str, scratch: Array) -> None:
    """Rounds to the nearest value of the dtype, ties to even, in place; what is too large becomes infinite.

    `scratch` has the values' shape and 32-bit whole numbers.
    """
    import numpy as np

    if dtype == "F16":
        with np.errstate(over="ignore"):
            values[...] = values.astype("<f2")
    elif dtype == "BF16":
        unordered = np.isnan(values)
        round_off(values, dtype, scratch)
        if unordered.any():
            values[unordered] = np.nan


def round_off(values: Wide, dtype: str, scratch: Array) -> None:
    """Rounds the fraction to the dtype's, ties to even, in place.

    Right for BF16, and for F16 from its smallest normal number to its largest. No NaN may be among them.
    """
    import numpy as np

    if dtype == "F32":
        return
    dropped = DROPPED[dtype]
    bits = values.view("<u4")
    np.right_shift(bits, dropped, out=scratch)
    np.bitwise_and(scratch, 1, out=scratch)
    np.add(scratch, (1 << (dropped - 1)) - 1, out=scratch)
    np.add(bits, scratch, out=bits)
    np.bitwise_and(bits, (0xFFFFFFFF << dropped) & 0xFFFFFFFF, out=bits)


def passage(source: str, casts: Iterable[str]) -> tuple[str, ...]:
    """The dtypes of a chain of casts that differ from the one before; empty when the values stay as they are."""
    kept, last = [], source
    for dtype in casts:
        if dtype != last:
            kept.append(dtype)
        last = dtype
    return tuple(kept)
