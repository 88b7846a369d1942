"""Layers as tar streams: exact, deterministic, readable by others, and only of files that are as promised."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory import PEAK

from pipeline.errors import DuopackError
from pipeline.oci import hashing
from pipeline.oci.hashing import FileContent, StatIdentity, pour
from pipeline.oci.tar import LARGE_FILE, TarEntry, TarLayer, header, pack

GiB = 1 << 30


def stream(layer: TarLayer, offset: int = 0) -> bytes:
    return b"".join(layer.read(offset))


def on_disk(path: Path, data: bytes) -> FileContent:
    path.write_bytes(data)
    return FileContent(path, len(data), hashlib.sha256(data).hexdigest())


def sparse(path: Path, size: int) -> FileContent:
    with path.open("wb") as file:
        file.truncate(size)
    return FileContent(path, size, "0" * 64, StatIdentity.of(path.stat()))


def test_the_bytes_are_fixed_for_all_time(tmp_path: Path) -> None:
    # Changing these digests invalidates every layer that was ever published: it needs a new FINGERPRINT.
    layer = TarLayer(
        (
            TarEntry("models/n9.sh", 0o755, b"#!/bin/bash\n"),
            TarEntry("models/a/权重.txt", 0o644, b"x" * 513),
            TarEntry("models/a/" + "long/" * 30 + "f.bin", 0o644, on_disk(tmp_path / "f", b"\1" * 3000)),
        )
    )
    assert (
        hashlib.sha256(stream(layer)).hexdigest()
        == "59bf7081a68c8231a036133697a2df891906866c24f123a7aa8e90a7db554a2f"
    )
    assert layer.key == "f2fc149478904ce7bb047f2132c5248eb286e5b37434c0628b5824dd42581cd1"


def test_a_plain_file_needs_no_pax_record() -> None:
    names = [
        tarfile.TarInfo.frombuf(
            stream(TarLayer((TarEntry("a/b", 0o644, b"1"),)))[512 * n :][:512], "utf-8", "strict"
        )
        for n in (0, 1)
    ]
    assert [(name.name, name.type) for name in names] == [("a", tarfile.DIRTYPE), ("a/b", tarfile.REGTYPE)]


part = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters="/\\"),
    min_size=1,
    max_size=70,
).filter(lambda text: text not in {".", ".."} and len(text.encode()) <= 255)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.tuples(st.just("m"), part, part).map("/".join), st.binary(max_size=2000), min_size=1, max_size=6
    ),
    st.data(),
)
def test_any_entries_are_read_back_by_tarfile_and_resume_anywhere(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("f")
    entries = [
        TarEntry(path, 0o644, body if number % 2 else on_disk(folder / str(number), body))
        for number, (path, body) in enumerate(files.items())
    ]
    layer = TarLayer(tuple(entries))
    whole = stream(layer)
    assert len(whole) == layer.size
    assert len(whole) % 512 == 0
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        members = archive.getmembers()
        found = {m.name: archive.extractfile(m).read() for m in members if m.isfile()}  # type: ignore[union-attr]
        assert found == files
        assert {(m.uid, m.gid, m.mtime, m.uname, m.gname) for m in members} == {(0, 0, 0, "", "")}
        assert {m.mode for m in members if m.isdir()} == {0o755}
    offset = data.draw(st.integers(0, len(whole)))
    assert stream(layer, offset) == whole[offset:]
    assert stream(TarLayer(tuple(reversed(entries)))) == whole


def test_gnu_tar_reads_it(tmp_path: Path) -> None:
    long = "models/" + "d" * 90 + "/" + "名" * 60
    layer = TarLayer((TarEntry(long, 0o755, b"hello"), TarEntry("models/empty", 0o644, b"")))
    result = subprocess.run(
        ["tar", "-C", tmp_path, "-xvf", "-"], input=stream(layer), capture_output=True, check=True
    )
    assert result.stderr == b""
    assert (tmp_path / long).read_bytes() == b"hello"
    assert (tmp_path / long).stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "models/empty").stat().st_size == 0


@pytest.mark.parametrize("size", [8 * GiB - 1, 8 * GiB, 9 * GiB + 5])
def test_sizes_around_eight_gib_are_exact(tmp_path: Path, size: int) -> None:
    layer = TarLayer((TarEntry("m/w", 0o644, sparse(tmp_path / "w", size)),))
    head = header("m", mode=0o755, directory=True) + header("m/w", size=size)
    assert layer.size == len(head) + size + -size % 512 + 1024
    assert (b"size=" in head) == (size >= 8 * GiB)
    with tarfile.TarFile(fileobj=io.BytesIO(head)) as archive:
        archive.next()
        found = archive.next()
    assert found is not None
    assert found.size == size
    # The tail is reached at once: a resumed upload does not read what was already sent.
    assert stream(layer, layer.size - 2000) == bytes(2000)


def test_a_file_that_hashes_otherwise_is_refused_before_its_last_piece(tmp_path: Path) -> None:
    data = os.urandom(3 * hashing.CHUNK + 7)
    content = replace(on_disk(tmp_path / "w", data), sha256="0" * 64)
    pieces = []
    with pytest.raises(DuopackError, match=r"w: the file has the sha256"):
        pieces += list(TarLayer((TarEntry("w", 0o644, content),)).read())
    assert sum(map(len, pieces)) < len(data)


def test_an_empty_file_is_checked_too(tmp_path: Path) -> None:
    content = replace(on_disk(tmp_path / "w", b""), sha256="0" * 64)
    with pytest.raises(DuopackError, match="sha256"):
        stream(TarLayer((TarEntry("w", 0o644, content),)))


def test_a_verified_file_is_not_hashed_again_until_it_changes(tmp_path: Path) -> None:
    content = on_disk(tmp_path / "w", b"good" * 1000)
    # A false sha256 shows whether hashing takes place.
    trusted = replace(content, sha256="0" * 64, verified=StatIdentity.of(content.path.stat()))
    layer = TarLayer((TarEntry("w", 0o644, trusted),))
    assert b"goodgood" in stream(layer)
    os.utime(content.path, ns=(1, 1))
    with pytest.raises(DuopackError, match="sha256"):
        stream(layer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.open("ab").write(b"x"), "the file changed"),
        (lambda path: os.truncate(path, hashing.CHUNK + 1), "became shorter"),
        (lambda path: os.utime(path, ns=(5, 5)), "the file changed"),
    ],
    ids=["grown", "cut", "touched"],
)
@pytest.mark.parametrize("verified", [False, True])
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, change, message: str, verified: bool
) -> None:  # type: ignore[no-untyped-def]
    content = on_disk(tmp_path / "w", bytes(4 * hashing.CHUNK))
    if verified:
        content = replace(content, verified=StatIdentity.of(content.path.stat()))
    reading = TarLayer((TarEntry("w", 0o644, content),)).read()
    next(reading)
    next(reading)
    change(content.path)
    with pytest.raises(DuopackError, match=message):
        list(reading)


@pytest.mark.parametrize("kind", ["gone", "directory", "fifo", "other size"])
def test_what_is_not_the_promised_file_is_refused(tmp_path: Path, kind: str) -> None:
    content = on_disk(tmp_path / "w", b"12345")
    if kind != "other size":
        content.path.unlink()
    if kind == "directory":
        content.path.mkdir()
    if kind == "fifo":
        os.mkfifo(content.path)
    if kind == "other size":
        content.path.write_bytes(b"123")
    with pytest.raises(DuopackError, match=str(content.path)):
        stream(TarLayer((TarEntry("w", 0o644, content),)))


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a//b", "a/./b", "a\nb", "a\\b", ""])
def test_a_path_that_leaves_the_layer_is_refused(path: str) -> None:
    with pytest.raises(DuopackError):
        TarEntry(path, 0o644, b"")


@pytest.mark.parametrize("paths", [("a/b", "a/b"), ("a", "a/b"), ("a/b/c", "a/b")])
def test_entries_that_cannot_both_exist_are_refused(paths: tuple[str, str]) -> None:
    with pytest.raises(DuopackError, match="two entries"):
        TarLayer(tuple(TarEntry(path, 0o644, b"") for path in paths))


def test_the_key_names_what_decides_the_bytes_and_nothing_else(tmp_path: Path) -> None:
    body = b"same"
    first = TarLayer((TarEntry("m/a", 0o644, on_disk(tmp_path / "1", body)),))
    assert first.key == TarLayer((TarEntry("m/a", 0o644, body),)).key
    assert first.key == TarLayer((TarEntry("m/a", 0o644, on_disk(tmp_path / "2", body)),)).key
    others = [("m/b", 0o644, body), ("m/a", 0o755, body), ("m/a", 0o644, b"diff")]
    assert len({TarLayer((TarEntry(*other),)).key for other in others} | {first.key}) == 4


def test_one_model_and_many_models_share_their_layers(tmp_path: Path) -> None:
    def model(name: str) -> list[TarEntry]:
        large = sparse(tmp_path / name, LARGE_FILE)
        return [
            TarEntry(f"models/{name}/config.json", 0o644, name.encode()),
            TarEntry(f"models/{name}/model.safetensors", 0o644, large),
            TarEntry(f"models/{name}/sub/tokenizer.json", 0o644, b"{}"),
        ]

    script = TarEntry("models/n.sh", 0o755, b"#!")
    one, many = pack([script, *model("b")]), pack([*model("a"), script, *model("b")])
    assert [layer.title for layer in one] == [
        "models/b/model.safetensors",
        "models/b (2 small files)",
        "models/n.sh",
    ]
    assert {layer.key for layer in one} < {layer.key for layer in many}
    assert [layer.key for layer in pack(reversed([*model("a"), script, *model("b")]))] == [
        layer.key for layer in many
    ]
    assert pack([]) == ()


def test_a_layer_of_one_file_is_its_frame_around_the_content(tmp_path: Path) -> None:
    data = b"weights" * 1000
    layer = TarLayer([TarEntry("models/a/w.safetensors", 0o644, on_disk(tmp_path / "w", data))])
    before, after = layer.frame or (b"", b"")
    assert before + data + after == stream(layer)
    assert TarLayer([TarEntry("models/a/x", 0o644, data)]).frame is None
    assert replace(layer, entries=(*layer.entries, TarEntry("models/a/x", 0o644, b""))).frame is None


def test_pouring_checks_size_and_digest() -> None:
    layer = TarLayer((TarEntry("a", 0o644, b"1"),))
    kept = bytearray()
    digest = pour(layer, kept.extend, lambda count: None)
    assert digest.hex == hashlib.sha256(kept).hexdigest()
    other = TarLayer((TarEntry("a", 0o644, b"2"),), digest=digest)
    with pytest.raises(DuopackError, match="not the promised one"):
        pour(other, lambda piece: None, lambda count: None)


def test_memory_stays_constant_for_many_gib(tmp_path: Path) -> None:
    sparse(tmp_path / "w", 3 * GiB)
    # In a process of its own, so that the peak is of this work alone. Trusted, so that it takes a second.
    script = f"""
{PEAK}
import pathlib
from pipeline.oci.tar import *
path = pathlib.Path({str(tmp_path / "w")!r})
content = FileContent(path, {3 * GiB}, "0" * 64, StatIdentity.of(path.stat()))
layer = TarLayer((TarEntry("m/w", 0o644, content),))
before = peak()
assert sum(map(len, layer.read())) == layer.size
print(peak() - before)
"""
    grown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert int(grown) < 20 << 10  # KiB
