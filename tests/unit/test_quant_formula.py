"""The formula against a plain reading of it, one value at a time, for every dtype and in pieces of any size."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipeline.weights.quant.floats import INFINITY, narrow, settle, widen
from pipeline.weights.quant.formula import EPSILON, Quantizer, Rows, finite

FRACTION = {"BF16": 7, "F16": 10, "F32": 23}
SMALLEST_EXPONENT = {"BF16": -126, "F16": -14, "F32": -126}


def rounded(value: Fraction, dtype: str) -> Fraction:
    """To the nearest value of a dtype, ties to even, by whole numbers alone. No overflow here."""
    if value == 0:
        return value
    exponent = SMALLEST_EXPONENT[dtype]
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    step = Fraction(2) ** (exponent - FRACTION[dtype])
    return round(value / step) * step


def expected(row: list[Fraction], dtype: str) -> tuple[Fraction, list[int]]:
    """One row by the book; each quotient is a float32 before it is a value of the dtype."""
    largest = max(abs(value) for value in row)
    scale = max(rounded(rounded(largest / 127, "F32"), dtype), Fraction(EPSILON))
    quotients = (rounded(rounded(value / scale, "F32"), dtype) for value in row)
    return scale, [min(max(round(each), -128), 127) for each in quotients]


def values_of(bits: np.ndarray, dtype: str) -> np.ndarray:
    out = np.empty(bits.shape, "<f4")
    widen(bits, dtype, out)
    return out


@st.composite
def weights(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    dtype = draw(st.sampled_from(["BF16", "F16", "F32"]))
    kind, top = ("<u4", 0x7FFFFFFF) if dtype == "F32" else ("<u2", 0x7FFF)
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    # From zero and the subnormal numbers to large ones; near the end float32 itself would overflow.
    limit = INFINITY[dtype] - (INFINITY[dtype] >> 3)
    bits = draw(arrays(kind, (rows, columns), elements=st.integers(0, min(limit, top))))
    signs = draw(arrays("u1", (rows, columns), elements=st.integers(0, 1)))
    return dtype, (bits | signs.astype(kind) << (31 if dtype == "F32" else 15)).astype(kind)


@settings(max_examples=150, deadline=None)
@given(weights())
def test_every_value_is_as_the_formula_says(drawn: tuple[str, np.ndarray]) -> None:
    dtype, bits = drawn
    quantizer, rows = Quantizer(), Rows(bits, dtype)
    scales = quantizer.scales(quantizer.magnitudes(rows), dtype)
    result, lost, whole = quantizer.quantize(rows, scales)
    for row, scale, found in zip(values_of(bits, dtype), scales, result, strict=True):
        wanted_scale, wanted = expected([Fraction(float(value)) for value in row], dtype)
        assert Fraction(float(scale)) == wanted_scale
        assert found.tolist() == wanted
    assert 0 <= lost <= whole or whole == 0


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_pieces_make_the_same_as_the_whole(dtype: str) -> None:
    source = np.random.default_rng(1)
    values = (source.standard_normal((70, 1500)) * 0.02).astype("<f4")
    settle(values, dtype, np.empty(values.shape, "<u4"))
    bits, quantizer = narrow(values, dtype), Quantizer()
    magnitudes = quantizer.magnitudes(Rows(bits, dtype))
    assert (magnitudes == np.abs(values).max(axis=1)).all()
    scales = quantizer.scales(magnitudes, dtype)
    whole = quantizer.quantize(Rows(bits, dtype), scales)[0]
    single = [
        quantizer.quantize(Rows(bits[n : n + 1], dtype), scales[n : n + 1])[0] for n in range(len(bits))
    ]
    assert (np.concatenate(single) == whole).all()
    restored = whole.astype("<f4") * scales[:, None]
    # Half a step by rounding, and what a quotient near 127 loses in the dtype.
    assert (np.abs(restored - values) <= scales[:, None] * (1.01 if dtype == "BF16" else 0.6)).all()


def test_the_error_is_that_of_the_restored_weights() -> None:
    values = np.random.default_rng(2).standard_normal((9, 400)).astype("<f4")
    quantizer, rows = Quantizer(), Rows(values.view("<u4"), "F32")
    scales = quantizer.scales(quantizer.magnitudes(rows), "F32")
    result, lost, whole = quantizer.quantize(rows, scales)
    difference = values.astype("<f8") - result * scales.astype("<f8")[:, None]
    assert (lost / whole) ** 0.5 == pytest.approx(
        np.linalg.norm(difference) / np.linalg.norm(values), rel=1e-4
    )


def test_zero_rows_stay_zero_and_divide_nothing() -> None:
    quantizer = Quantizer()
    rows = Rows(np.zeros((2, 8), "<u2"), "BF16")
    scales = quantizer.scales(quantizer.magnitudes(rows), "BF16")
    assert scales.tolist() == [EPSILON, EPSILON]
    result, lost, whole = quantizer.quantize(rows, scales)
    assert not result.any()
    assert (lost, whole) == (0.0, 0.0)


@given(st.sampled_from(["BF16", "F16"]), arrays("<u4", 40))
def test_settling_rounds_every_float32(dtype: str, bits: np.ndarray) -> None:
    values = bits.view("<f4").copy()
    settled = values.copy()
    settle(settled, dtype, np.empty(settled.shape, "<u4"))
    limit = 65520.0 if dtype == "F16" else float.fromhex("0x1.ffp127")
    for before, after in zip(values.tolist(), settled.tolist(), strict=True):
        if before != before:
            assert after != after
        elif abs(before) >= limit:
            assert abs(after) == float("inf")
        else:
            assert Fraction(after) == rounded(Fraction(before), dtype)
    known = settled[~np.isnan(settled)]
    assert (values_of(narrow(known.copy(), dtype), dtype) == known).all()


@pytest.mark.parametrize(("dtype", "kind"), [("BF16", "<u2"), ("F16", "<u2"), ("F32", "<u4")])
def test_finite_knows_infinity_and_nan(dtype: str, kind: str) -> None:
    sign = 1 << (31 if dtype == "F32" else 15)
    for bits, good in ((INFINITY[dtype] - 1, True), (INFINITY[dtype], False), (INFINITY[dtype] + 1, False)):
        values = np.zeros(70_000, kind)
        for place in (0, 40_000, 69_999):
            for value in (bits, bits | sign):
                one = values.copy()
                one[place] = value
                assert finite(one, dtype) is good
