"""Tar archives of any origin, member by member: what tarfile writes is understood, what is broken is refused."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
import zlib
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.oci_memory import Bytes

from pipeline.errors import DuopackError
from pipeline.oci.limits import Budget, LimitError, Limits
from pipeline.oci.ranges import RangeReader
from pipeline.oci.tar import TarEntry, TarLayer
from pipeline.oci.tarindex import MAX_EXTENDED, TarError, members
from pipeline.oci.unpack import PieceReader, compression, unpacked

NAMES = st.text(
    st.characters(blacklist_categories=("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"), blacklist_characters="/"),
    min_size=1,
    max_size=90,
).filter(lambda text: text not in {".", ".."} and len(text.encode()) < 250)
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)


def index(data: bytes, limits: Limits | None = None):
    budget = Budget(limits or Limits())
    return list(members(RangeReader(Bytes(data), budget), budget))


def streamed(data: bytes, size: int = 1000):
    reader = PieceReader(data[at : at + size] for at in range(0, len(data), size))
    return list(members(reader, Budget()))


def archive(*infos: tarfile.TarInfo | tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for one in infos:
            info, data = one if isinstance(one, tuple) else (one, b"")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, **more) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in more.items():
        setattr(info, key, value)
    return info


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(PATHS, st.binary(max_size=1500), st.sampled_from([0o644, 0o755, 0o4755])), max_size=6),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
)
def test_what_tarfile_writes_is_read_the_same_by_ranges_and_as_a_stream(files, form):
    data = archive(*((entry(name, mode=mode), content) for name, content, mode in files), form=form)
    found = index(data)
    assert [(one.path, one.size, one.mode) for one in found] == [(n, len(c), m) for n, c, m in files]
    assert [data[one.offset : one.offset + one.size] for one in found] == [content for _, content, _ in files]
    assert streamed(data) == found


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damage_anywhere_gives_members_or_a_sentence_never_a_traceback(data):
    whole = bytearray(archive((entry("a/b"), b"x" * 700), entry("c", tarfile.SYMTYPE, linkname="é" * 120)))
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    for read in (index, streamed):
        with suppress(DuopackError):
            read(cut)


@settings(max_examples=150)
@given(st.binary(max_size=3000))
def test_any_bytes_are_refused_or_empty(data):
    with suppress(DuopackError):
        assert index(data) == []


def test_links_directories_and_devices_are_told_apart():
    found = index(
        archive(
            entry("./"),
            entry("./d/", tarfile.DIRTYPE, mode=0o700),
            entry("d/s", tarfile.SYMTYPE, linkname="../x"),
            entry("d/h", tarfile.LNKTYPE, linkname="d/f"),
            entry("null", tarfile.CHRTYPE, devmajor=1, devminor=3),
            entry("pipe", tarfile.FIFOTYPE),
            entry("odd", b"Q"),
        )
    )
    assert [(one.path, one.kind, one.link) for one in found] == [
        ("", "directory", ""),
        ("d", "directory", ""),
        ("d/s", "symlink", "../x"),
        ("d/h", "hardlink", "d/f"),
        ("null", "device", ""),
        ("pipe", "fifo", ""),
        ("odd", "unknown", ""),
    ]


@pytest.mark.parametrize(
    ("name", "trouble"),
    [
        ("../../etc/passwd", "outside"),
        ("a/../../b", "outside"),
        ("/etc/passwd", "absolute"),
        ("a\x1b[2Jb", "unprintable"),
        ("a\u202eb", "unprintable"),
        ("x/" * 200 + "y", "too-long"),
        ("y" * 5000, "too-long"),
        ("中文 name/ä", ""),
    ],
)
def test_names_that_nothing_should_be_written_to_are_marked(name, trouble):
    assert [one.trouble for one in index(archive(entry(name)))] == [trouble]


def test_only_the_headers_of_large_files_are_read():
    layer = TarLayer([TarEntry(f"models/m/{number}", 0o644, bytes(40 << 20)) for number in range(3)])
    budget = Budget()
    reader = RangeReader(Bytes(b"".join(layer.read())), budget)
    assert [one.path for one in members(reader, budget) if one.kind == "file"] == [
        "models/m/0",
        "models/m/1",
        "models/m/2",
    ]
    assert reader.read_bytes < 1 << 20


def test_a_pax_bomb_is_refused_before_it_is_read():
    header = bytearray(archive(entry("x", tarfile.XHDTYPE)))[:512]
    header[124:136] = b"77777777777\0"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    tracemalloc.start()
    with pytest.raises(TarError, match=f"{MAX_EXTENDED} are accepted"):
        index(bytes(header) + bytes(1 << 20))
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_extended_headers_without_end_are_refused():
    one = archive(entry("x", tarfile.XHDTYPE))[:512]
    with pytest.raises(TarError, match="extended headers precede"):
        index(one * 100)


def test_a_global_header_that_names_every_member_is_refused():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"path": "evil"}) as tar:
        tar.addfile(entry("good"))
    with pytest.raises(TarError, match="one name or size"):
        index(out.getvalue())


def test_sizes_beyond_the_archive_and_beyond_reason_are_refused():
    data = bytearray(archive((entry("f"), b"content")))
    for field, match in ((b"00000077777\0", "beyond the end"), (b"\xff" * 12, "claims a number")):
        data[124:136] = field
        data[148:156] = b" " * 8
        data[148:156] = b"%06o\0 " % sum(data[:512])
        with pytest.raises(TarError, match=match):
            index(bytes(data))


def test_a_sparse_file_tells_what_it_would_become():
    info = entry("s")
    info.pax_headers = {
        "GNU.sparse.realsize": str(1 << 40),
        "GNU.sparse.name": "real",
        "GNU.sparse.major": "1",
    }
    [found] = index(archive((info, b"1\n0\n0\n")))
    assert (found.path, found.size, found.expanded) == ("real", 6, 1 << 40)


def test_members_without_number_are_counted_and_refused():
    data = archive(*(entry(str(number)) for number in range(50)))
    with pytest.raises(LimitError, match="more than 20 entries"):
        index(data, Limits(members=20))


def test_time_is_bounded():
    ticks = iter(range(10_000))
    budget = Budget(Limits(seconds=30), clock=lambda: float(next(ticks)))
    with pytest.raises(LimitError, match="more than 30 s"):
        list(members(PieceReader([archive(*(entry(str(n)) for n in range(50)))]), budget))


def test_a_gzip_stream_of_several_members_is_unpacked_whole():
    data = gzip.compress(b"one") + gzip.compress(b"") + gzip.compress(b"two") + bytes(20)
    for size in (1, 7, 1000):
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        assert b"".join(unpacked(pieces, "gzip", Budget())) == b"onetwo"


@pytest.mark.parametrize(
    "data", [gzip.compress(b"x" * 1000)[:-9], gzip.compress(b"x")[:15], b"\x1f\x8bjunk", b"\x1f\x8b\x08\0"]
)
def test_a_broken_gzip_stream_is_refused(data):
    with pytest.raises(TarError, match="gzip"):
        b"".join(unpacked([data], "gzip", Budget()))


def test_a_bomb_is_stopped_by_its_ratio_and_by_its_size():
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(1500)) + packer.flush()
    tracemalloc.start()
    with pytest.raises(LimitError, match="times as much"):
        for _ in unpacked([bomb], "gzip", Budget()):
            pass
    with pytest.raises(LimitError, match="unpack to more than"):
        for _ in unpacked([bomb], "gzip", Budget(Limits(unpacked=5 << 20))):
            pass
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_the_compression_is_told_by_the_first_bytes_not_by_a_media_type():
    assert [compression(magic) for magic in (b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"mode", b"")] == [
        "gzip",
        "zstd",
        "",
        "",
    ]
