"""Symmetric int8 per output channel: the data-free half of W8A8_DYNAMIC, in msmodelslim's arithmetic.

For each row of a weight, s = max(largest magnitude / 127, float32's epsilon) and q = w / s, rounded half to even
and kept within -128 and 127. Every step is done in the weight's dtype, as torch does it on a CPU: computed in
float32 and rounded. The scale is stored widened to float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pipeline.weights.quant.floats import INFINITY, STORED, round_off, settle, widen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[Any]
    Wide = NDArray[np.float32]

LARGEST: Final = 127
EPSILON: Final = 2.0**-23
"""Of float32: the smallest scale, so that a row of zeros does not divide by zero. F16 and BF16 hold it exactly."""
CACHED: Final = 1 << 15
"""Elements worked on at once: what is made on the way stays in the processor's cache."""


@dataclass(frozen=True)
class Rows:
    """Rows of a weight as they lie in a file, and the dtypes that their values go through."""

    bits: Array
    """Two-dimensional, whole numbers as `STORED` says."""
    dtype: str
    casts: tuple[str, ...] = ()

    @property
    def working(self) -> str:
        """The dtype in which the formula is computed."""
        return self.casts[-1] if self.casts else self.dtype


class Quantizer:
    """The formula, with memory of its own: one for each thread."""

    def __init__(self) -> None:
        import numpy as np

        self._np = np
        self._room = 0

    def magnitudes(self, rows: Rows) -> Wide:
        """The largest magnitude of each row: infinite when a value is, NaN when one is no number."""
        np = self._np
        largest: Wide = np.empty(len(rows.bits), "<f4")
        for first, part in self._parts(rows):
            found = largest[first : first + len(part)]
            if rows.casts:
                np.abs(self._settled(part, rows), out=self._values[: len(part)])
                np.max(self._values[: len(part)], axis=1, out=found)
            else:
                widen(self._top(part, rows.dtype), rows.dtype, found)
        return largest

    def scales(self, magnitudes: Wide, dtype: str) -> Wide:
        """The scale of each row, from its largest magnitude; values of `dtype`, in float32."""
        np = self._np
        with np.errstate(invalid="ignore"):
            scales: Wide = magnitudes / np.float32(LARGEST)
        settle(scales, dtype, np.empty(scales.shape, "<u4"))
        np.maximum(scales, np.float32(EPSILON), out=scales)
        return scales

    def quantize(self, rows: Rows, scales: Wide) -> tuple[Array, float, float]:
        """The rows as int8, the squares of what that loses, and the squares of all values, summed."""
        np = self._np
        result = np.empty(rows.bits.shape, "|i1")
        lost = whole = 0.0
        for first, part in self._parts(rows):
            count = len(part)
            scale = scales[first : first + count, None]
            values, exact = self._settled(part, rows), self._exact[:count]
            with np.errstate(invalid="ignore"):
                np.divide(values, scale, out=values)
            exact[...] = values
            round_off(values, rows.working, self._scratch[:count])
            np.rint(values, out=values)
            np.clip(values, -LARGEST - 1, LARGEST, out=values)
            with np.errstate(invalid="ignore"):
                np.copyto(result[first : first + count], values, casting="unsafe")
            np.subtract(exact, values, out=values)
            squares = scale[:, 0].astype("<f8") ** 2
            lost += float(np.sum(squares * self._squared(values)))
            whole += float(np.sum(squares * self._squared(exact)))
        return result, lost, whole

    def _squared(self, values: Wide) -> Wide:
        # numpy's own sum adds in the same order on every machine; a product by BLAS does not.
        np = self._np
        np.multiply(values, values, out=values)
        total: Wide = np.sum(values, axis=1)
        return total

    def _settled(self, part: Array, rows: Rows) -> Wide:
        """The values of a part in the working dtype; valid until the next call."""
        values: Wide = self._values[: len(part)]
        widen(part, rows.dtype, values)
        for dtype in rows.casts:
            settle(values, dtype, self._scratch[: len(part)])
        return values

    def _top(self, part: Array, dtype: str) -> Array:
        """The largest bits of each row without their sign."""
        np = self._np
        bits = self._scratch.view("<u2" if STORED[dtype] == "<u2" else "<u4")
        bits = bits.reshape(-1)[: part.size].reshape(part.shape)
        np.bitwise_and(part, 0x7FFF if STORED[dtype] == "<u2" else 0x7FFFFFFF, out=bits)
        top: Array = np.max(bits, axis=1)
        return top

    def _parts(self, rows: Rows) -> list[tuple[int, Array]]:
        """The rows in pieces that stay in the cache, each with the number of its first row."""
        np = self._np
        width = max(rows.bits.shape[1], 1)
        step = max(CACHED // width, 1)
        if self._room != width:
            self._room = width
            self._values, self._exact = (np.empty((step, width), "<f4") for _ in range(2))
            self._scratch = np.empty((step, width), "<u4")
        return [(first, rows.bits[first : first + step]) for first in range(0, len(rows.bits), step)]


def finite(bits: Array, dtype: str) -> bool:
    """Whether no value is infinite or no number."""
    import numpy as np

    sign = 0x7FFF if STORED[dtype] == "<u2" else 0x7FFFFFFF
    step = CACHED
    flat = bits.reshape(-1)
    return all(
        int(np.bitwise_and(flat[first : first + step], sign).max()) < INFINITY[dtype]
        for first in range(0, flat.size, step)
    )
