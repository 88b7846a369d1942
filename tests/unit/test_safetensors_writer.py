"""Files as the safetensors library writes them, streamed, and there only when they are whole."""

from __future__ import annotations

import hashlib
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline.weights.safetensors_writer as module
from pipeline.errors import DuopackError
from pipeline.weights.safetensors import DTYPE_BITS, read_header
from pipeline.weights.safetensors_writer import DTYPE_ORDER, Declared, SafetensorsWriter, lay_out

LIBRARY = (
    b'\xd0\x00\x00\x00\x00\x00\x00\x00{"__metadata__":{"a":"b","format":"pt"},"Z":{"dtype":"F32","shape":[0,3],'
    b'"data_offsets":[0,0]},"a\\"b":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"\xc3\xa9":{"dtype":"F32",'
    b'"shape":[1],"data_offsets":[4,8]}}    \x00\x00\x00\x00\x00\x00\x00\x00'
)
"""What safetensors 0.8 made of three float32 tensors of zeros, given in another order."""


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, module.Layout]:
    layout = lay_out([Declared("b", "F16", (3,)), Declared("a", "I64", (2,))])
    return tmp_path / "x.safetensors", layout


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_equals_the_library_s_byte_for_byte(tmp_path):
    tensors = [Declared("é", "F32", (1,)), Declared('a"b', "F32", ()), Declared("Z", "F32", (0, 3))]
    layout = lay_out(tensors, {"format": "pt", "a": "b"})
    with SafetensorsWriter(tmp_path / "x", layout) as writer:
        writer.write(bytes(8))
    assert (tmp_path / "x").read_bytes() == LIBRARY
    assert writer.record.size == layout.size == len(LIBRARY)
    assert writer.record.sha256 == hashlib.sha256(LIBRARY).hexdigest()


def test_tensors_are_ordered_by_falling_width_then_name():
    widths = ("I64", "F32", "I32", "BF16", "F16", "I8")
    declared = [Declared(f"{name} {dtype}", dtype, (8,)) for name in "ba" for dtype in reversed(widths)]
    order = [one.name for one in lay_out(declared).tensors]
    assert order == [f"{name} {dtype}" for dtype in widths for name in "ab"]


def test_every_dtype_of_the_format_has_a_place_in_the_order():
    assert sorted(DTYPE_ORDER) == sorted(DTYPE_BITS)


def test_one_name_cannot_be_written_twice():
    with pytest.raises(DuopackError, match="'a' would be written twice"):
        lay_out([Declared("a", "F16", (1,)), Declared("a", "F32", (1,))])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 700), max_size=6), st.integers(1, 40), st.data())
def test_any_pieces_through_any_block_size_give_the_same_file(tmp_path_factory, sizes, block, data):
    directory = tmp_path_factory.mktemp("w")
    layout = lay_out(Declared(f"t{number}", "I8", (size,)) for number, size in enumerate(sizes))
    content = bytes(number % 251 for number in range(sum(sizes)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 8 * block)
        with SafetensorsWriter(directory / "x", layout) as writer:
            left = memoryview(content)
            while left:
                count = data.draw(st.integers(1, len(left)))
                if data.draw(st.booleans()):
                    writer.write(left[:count])
                else:
                    room = writer.space(count)
                    count = len(room)
                    room[:] = left[:count]
                    writer.advance(count)
                left = left[count:]
    assert (directory / "x").read_bytes() == layout.header + content
    assert writer.record.sha256 == hashlib.sha256(layout.header + content).hexdigest()
    assert names(directory) == ["x"]
    read_header(directory / "x")


def test_an_error_inside_the_block_leaves_nothing(two):
    path, layout = two

    def fail() -> None:
        with SafetensorsWriter(path, layout) as writer:
            writer.write(bytes(16))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert names(path.parent) == []


def test_too_little_data_is_a_fault_and_leaves_nothing(two):
    path, layout = two
    with pytest.raises(ValueError, match="lacks 6 bytes"), SafetensorsWriter(path, layout) as writer:
        writer.write(bytes(16))
    assert names(path.parent) == []


def test_too_much_data_is_a_fault_and_leaves_nothing(two):
    path, layout = two
    with pytest.raises(ValueError, match="23 bytes"), SafetensorsWriter(path, layout) as writer:
        writer.write(bytes(23))
    assert names(path.parent) == []


def test_an_older_file_stays_until_the_new_one_is_whole(two):
    path, layout = two
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="lacks"), SafetensorsWriter(path, layout):
        pass
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("size", [1 << 16, 8 << 20])
def test_a_disk_that_takes_no_more_is_said_in_words(tmp_path, monkeypatch, size):
    monkeypatch.setattr(module, "BLOCK", 1 << 16)
    layout = lay_out([Declared("a", "I8", (size,))])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, hard))
    try:
        with pytest.raises(DuopackError, match="cannot write: File too large"):
            write_zeros(tmp_path / "x", layout, size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []


def write_zeros(path: Path, layout: module.Layout, size: int) -> None:
    with SafetensorsWriter(path, layout) as writer:
        for _ in range(size >> 16):
            writer.write(bytes(1 << 16))
