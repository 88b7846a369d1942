"""Casts: the values of numpy's and torch's, and none lost in silence."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.weights.shards.convert import CACHED, NUMPY, conversion, convert_all, convertible


def converted(values: np.ndarray, source: str, target: str):
    out = np.zeros(values.size, NUMPY[target])
    return out, convert_all(conversion(source, target), values, out)


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype("<u4") << 16).view("<f4")


def test_every_bf16_becomes_the_fp16_that_rounding_gives():
    bits = np.arange(1 << 16, dtype="<u2")
    out, lost = converted(bits, "BF16", "F16")
    with np.errstate(over="ignore", invalid="ignore"):
        expected = widened(bits).astype("<f2")
    assert (out.view("<u2") == expected.view("<u2")).all()
    assert lost.count == (~np.isfinite(expected)).sum()


def test_values_beyond_fp16_are_counted_and_the_largest_is_named():
    values = np.full(3 * CACHED, 0x3F80, "<u2")
    for place, value in ((5, 65536.0), (CACHED, -1e30), (2 * CACHED + 1, 1e6)):
        values[place] = np.array([value], "<f4").view("<u2")[1]
    _, lost = converted(values, "BF16", "F16")
    assert lost.count == 3
    assert lost.largest == pytest.approx(-1e30, rel=0.01)
    assert "beyond fp16's 65504" in lost.why


@pytest.mark.parametrize(("dtype", "values"), [("BF16", [0x477F, 0xC77F]), ("F32", [65504.0, -65519.0])])
def test_the_largest_values_that_fit_are_not_called_lost(dtype, values):
    out, lost = converted(np.array(values, NUMPY[dtype]), dtype, "F16")
    assert lost is None
    assert np.isfinite(out).all()


@pytest.mark.parametrize(
    ("dtype", "values"), [("BF16", [0x7F80, 0x7FC0]), ("F32", [np.inf, np.nan]), ("F32", [-np.inf, 0.0])]
)
def test_what_is_no_finite_number_is_lost(dtype, values):
    _, lost = converted(np.array(values, NUMPY[dtype]), dtype, "F16")
    assert lost.count >= 1
    assert "no finite number" in lost.why


def test_float32_beyond_fp16_is_lost():
    _, lost = converted(np.array([1.0, 65520.0, 7e4], "<f4"), "F32", "F16")
    assert (lost.count, lost.largest) == (2, pytest.approx(7e4))


def test_a_float32_deq_scale_keeps_its_bits_where_its_value_would_become_zero():
    scales = np.array([1.5e-4, 3.0, 0.25], "<f4")
    out, lost = converted(scales, "F32", "I64")
    assert lost is None
    assert (out == scales.view("<i4")).all()
    assert (out.astype("<i4").view("<f4") == scales).all()


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_a_whole_offset_becomes_int8(dtype):
    out, lost = converted(np.array([-128, -1, 0, 127], NUMPY[dtype]), dtype, "I8")
    assert lost is None
    assert out.tolist() == [-128, -1, 0, 127]


@pytest.mark.parametrize("value", [0.5, 128.0, -129.0, np.nan, np.inf])
def test_an_offset_that_int8_cannot_hold_is_lost(value):
    _, lost = converted(np.array([0.0, value], "<f4"), "F32", "I8")
    assert lost.count == 1
    assert "whole number" in lost.why


def test_bf16_and_fp16_widen_to_float32_exactly():
    bits = np.array([0x3F81, 0x8000, 0x0001], "<u2")
    assert (converted(bits, "BF16", "F32")[0] == widened(bits)).all()
    halves = np.array([1.1, -0.0, 6e-8], "<f2")
    assert (converted(halves, "F16", "F32")[0] == halves.astype("<f4")).all()


@pytest.mark.parametrize(
    ("source", "target"), [("I8", "F16"), ("F16", "I32"), ("I32", "I64"), ("F8_E4M3", "F16")]
)
def test_what_torch_would_cast_by_value_in_silence_is_not_converted(source, target):
    assert not convertible(source, target)
