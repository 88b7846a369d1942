"""What a safetensors header must be, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import DuopackError
from pipeline.weights.safetensors import DTYPE_BITS, header_length, parse_header, read_header

ENTRY = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}


def packed(header, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def refused(content: bytes, tmp_path: Path) -> str:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(DuopackError) as caught:
        read_header(path)
    assert caught.value.where == str(path)
    return str(caught.value)


def test_a_whole_file_gives_its_tensors_in_data_order_and_its_metadata(tmp_path):
    header = {
        "b": {"dtype": "F32", "shape": [], "data_offsets": [12, 16]},
        "__metadata__": {"format": "pt"},
        "a": ENTRY,
        "empty": {"dtype": "I64", "shape": [0, 7], "data_offsets": [16, 16]},
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(packed(json.dumps(header).encode() + b"   ", bytes(16)))
    found = read_header(path)
    assert list(found.tensors) == ["a", "b", "empty"]
    assert found.metadata == {"format": "pt"}
    assert found.tensors["a"].shape == (2, 3)
    assert found.tensors["a"].begin == found.data_start == path.stat().st_size - 16
    assert found.data_size == 16


def test_a_header_can_be_read_from_a_prefix_as_over_http():
    content = packed({"a": ENTRY}, bytes(12))
    length = header_length(content[:8], len(content), where="http")
    assert parse_header(content[: 8 + length], len(content), where="http").data_size == 12
    with pytest.raises(ValueError, match="the header needs"):
        parse_header(content[:20], len(content), where="http")


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype_of_the_format_has_its_size(dtype, tmp_path):
    size = 8 * DTYPE_BITS[dtype] // 8
    header = {"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, size]}}
    path = tmp_path / "x.safetensors"
    path.write_bytes(packed(header, bytes(size)))
    assert read_header(path).tensors["a"].size == size


def test_a_truncated_file_says_how_much_is_missing(tmp_path):
    assert "5 B of " in refused(packed({"a": ENTRY}, bytes(7)), tmp_path)
    assert "cut off inside its header" in refused(packed({"a": ENTRY}, b"")[:20], tmp_path)
    assert "0 bytes, too few" in refused(b"", tmp_path)


def test_bytes_behind_the_last_tensor_are_refused(tmp_path):
    assert "3 bytes follow the last tensor" in refused(packed({"a": ENTRY}, bytes(15)), tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": ENTRY, "b": {"dtype": "U8", "shape": [4], "data_offsets": [10, 14]}}, "overlaps"),
        ({"a": ENTRY, "b": {"dtype": "U8", "shape": [4], "data_offsets": [13, 17]}}, "leaves a hole"),
        ({"a": {**ENTRY, "data_offsets": [1, 13]}}, "leaves a hole"),
        ({"a": {**ENTRY, "shape": [2, 2]}}, "span 12 bytes"),
        ({"a": {**ENTRY, "shape": [-2, -3]}}, "not a list of sizes"),
        ({"a": {**ENTRY, "shape": [2.0, 3]}}, "not a list of sizes"),
        ({"a": {**ENTRY, "shape": [True, 6]}}, "not a list of sizes"),
        ({"a": {**ENTRY, "data_offsets": [12, 0]}}, "not a begin and an end"),
        ({"a": {**ENTRY, "data_offsets": [0, 12, 13]}}, "not a begin and an end"),
        ({"a": {**ENTRY, "dtype": "BF17"}}, "unknown dtype 'BF17'"),
        ({"a": {**ENTRY, "dtype": ["F32"]}}, "unknown dtype"),
        ({"a": {**ENTRY, "more": 1}}, "exactly dtype, shape and data_offsets"),
        ({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, "span 1 bytes"),
        ({"a": 3}, "exactly dtype, shape and data_offsets"),
        ({"__metadata__": {"format": 1}, "a": ENTRY}, "not a map of strings"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
        (b'{"a": NaN}', "not valid JSON"),
        (b"[]", "does not begin with '{'"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b'{"a":' + b"[" * 100_000, "not valid JSON"),
        (b'{"a\x1b[31m":', "not valid JSON"),
    ],
)
def test_a_header_that_breaks_the_format_is_refused_with_what_is_wrong(header, message, tmp_path):
    text = refused(packed(header, bytes(12)), tmp_path)
    assert message in text
    assert "\x1b" not in text


def test_a_header_over_the_limit_is_refused_before_it_is_read(tmp_path):
    assert "over the format's limit" in refused((1 << 40).to_bytes(8, "little") + b"{}", tmp_path)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_and_never_crash(data):
    with pytest.raises(DuopackError):
        parse_header(len(data).to_bytes(8, "little") + data, 8 + len(data) + 1, where="x")
