"""OCI layouts: whole after any end of the writer, shared by several, and read with distrust."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.oci_memory import Bytes, MemorySource, small_base

from pipeline.errors import DuopackError
from pipeline.oci.digest import Digest
from pipeline.oci.image import Image, Layer, load_base
from pipeline.oci.layout import LayoutSink, LayoutSource
from pipeline.oci.model import OCI_LAYER_TAR, Descriptor
from pipeline.oci.partial import PartialFile, sweep
from pipeline.oci.tar import TarEntry, TarLayer
from pipeline.oci.transfer import write_image

ROOT = Path(__file__).parents[2]


def image(content: bytes = b"x", name: str = "models/f") -> Image:
    return Image.scratch("linux/arm64").with_layers([Layer.of(TarLayer([TarEntry(name, 0o644, content)]))])


def index(directory: Path) -> Any:
    return json.loads((directory / "index.json").read_bytes())


def leftovers(directory: Path) -> list[Path]:
    return list(directory.rglob(".*"))


def test_an_image_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    memory = MemorySource()
    small_base(memory, "t")
    written = load_base(memory, "t", "linux/arm64").with_layers(image().layers)
    descriptor = write_image(written, LayoutSink(tmp_path, "v1"))
    source = LayoutSource(tmp_path)
    assert source.manifest("v1")[0].digest == source.manifest()[0].digest == descriptor.digest
    assert source.manifest(str(descriptor.digest))[0].platform == "linux/arm64/v8"
    again = load_base(source, "v1", "linux/arm64")
    for one, other in zip(written.layers, again.layers, strict=True):
        assert b"".join(other.blob.read()) == b"".join(one.blob.read())
        assert b"".join(other.blob.read(100)) == b"".join(one.blob.read())[100:]
    assert leftovers(tmp_path) == []
    for path in (tmp_path / "blobs/sha256").iterdir():
        assert Digest.of(path.read_bytes()).hex == path.name
        assert path.stat().st_mode & 0o777 == 0o644


def test_other_tags_and_unknown_keys_stay(tmp_path: Path) -> None:
    first = write_image(image(b"1"), LayoutSink(tmp_path, "a"))
    value = index(tmp_path) | {"annotations": {"kept": "yes"}}
    (tmp_path / "index.json").write_text(json.dumps(value))
    write_image(image(b"2"), LayoutSink(tmp_path, "b"))
    write_image(image(b"3"), LayoutSink(tmp_path, "b"))
    third = write_image(image(b"3"), LayoutSink(tmp_path, "b"))
    source = LayoutSource(tmp_path)
    assert len(source.entries()) == 2
    assert source.manifest("a")[0].digest == first.digest
    assert source.manifest("b")[0].digest == third.digest
    assert index(tmp_path)["annotations"] == {"kept": "yes"}


def test_without_a_tag_the_only_image_is_meant_or_the_one_that_was_written_without(tmp_path: Path) -> None:
    first = write_image(image(b"1"), LayoutSink(tmp_path, "a"))
    assert LayoutSource(tmp_path).manifest("")[0].digest == first.digest
    write_image(image(b"2"), LayoutSink(tmp_path, "b"))
    with pytest.raises(DuopackError, match="there are several images; the layout has: a, b"):
        LayoutSource(tmp_path).manifest("")
    latest = write_image(image(b"3"), LayoutSink(tmp_path, "latest"))
    assert LayoutSource(tmp_path).manifest("")[0].digest == latest.digest
    with pytest.raises(DuopackError, match="there is no such image 'c'; the layout has: a, b, latest"):
        LayoutSource(tmp_path).manifest("c")


def test_writing_the_same_again_rewrites_no_blob(tmp_path: Path) -> None:
    write_image(image(), LayoutSink(tmp_path, "a"))
    layer = json.loads(LayoutSource(tmp_path).manifest("a")[1])["layers"][0]["digest"].removeprefix("sha256:")
    before = (tmp_path / "blobs/sha256" / layer).stat()
    write_image(image(), LayoutSink(tmp_path, "a"))
    assert (tmp_path / "blobs/sha256" / layer).stat().st_ino == before.st_ino


def test_a_blob_of_wrong_size_is_written_again(tmp_path: Path) -> None:
    write_image(image(), LayoutSink(tmp_path, "a"))
    path = next(path for path in (tmp_path / "blobs/sha256").iterdir() if path.stat().st_size > 2000)
    os.truncate(path, 100)
    write_image(image(), LayoutSink(tmp_path, "a"))
    assert Digest.of(path.read_bytes()).hex == path.name


def test_several_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    def write(number: int) -> None:
        write_image(
            image(b"same").with_layers(image(bytes([number])).layers), LayoutSink(tmp_path, f"t{number}")
        )

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    source = LayoutSource(tmp_path)
    assert sorted(entry.annotations["org.opencontainers.image.ref.name"] for entry in source.entries()) == [
        f"t{number}" for number in range(8)
    ]
    for number in range(8):
        assert len(load_base(source, f"t{number}", "linux/arm64").layers) == 2


SLOW_WRITER = """
import pathlib, signal, sys, time
from pipeline.oci.image import Image, Layer
from pipeline.oci.layout import LayoutSink
from pipeline.oci.transfer import write_image

# A shell's background job starts with SIGINT ignored, and Python leaves it so.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Slow:
    media_type, size, digest = "application/vnd.oci.image.layer.v1.tar", 50_000, None
    def read(self, offset=0):
        for number in range(50):
            yield bytes([number]) * 1000
            if number == 25:
                print("half", flush=True)
                time.sleep(float(sys.argv[2]))

image = Image.scratch("linux/arm64").with_layers([Layer(Slow())])
print(write_image(image, LayoutSink(pathlib.Path(sys.argv[1]), "slow")).digest, flush=True)
"""


def slow_writer(directory: Path, seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITER, str(directory), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout
    assert process.stdout.readline() == "half\n"
    return process


def test_kill_9_in_the_middle_leaves_what_was_there_and_the_next_run_cleans_up(tmp_path: Path) -> None:
    old = write_image(image(), LayoutSink(tmp_path, "old"))
    with slow_writer(tmp_path, 60) as process:
        process.kill()
    assert len(list((tmp_path / "blobs/sha256").glob(".partial-*"))) == 1
    source = LayoutSource(tmp_path)
    assert source.manifest("old")[0].digest == old.digest
    with pytest.raises(DuopackError, match="no such image 'slow'; the layout has: old"):
        source.manifest("slow")
    with slow_writer(tmp_path, 0) as process:
        assert process.stdout
        digest = process.stdout.read().strip()
    assert source.manifest("slow")[0].digest == digest
    assert leftovers(tmp_path) == []


def test_kill_9_of_the_very_first_writer_does_no_harm_either(tmp_path: Path) -> None:
    with slow_writer(tmp_path / "new", 60) as process:
        process.kill()
    write_image(image(), LayoutSink(tmp_path / "new", "t"))
    assert leftovers(tmp_path / "new") == []


def test_the_partial_file_of_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    with slow_writer(tmp_path, 2) as process:
        write_image(image(), LayoutSink(tmp_path, "t"))
        assert len(list((tmp_path / "blobs/sha256").glob(".partial-*"))) == 1
        assert process.stdout
        digest = process.stdout.read().strip()
    assert LayoutSource(tmp_path).manifest("slow")[0].digest == digest


def test_ctrl_c_leaves_no_partial_file(tmp_path: Path) -> None:
    with slow_writer(tmp_path, 1) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) != 0
    assert leftovers(tmp_path) == []


def test_a_half_made_layout_is_completed(tmp_path: Path) -> None:
    (tmp_path / "oci-layout").touch()
    write_image(image(), LayoutSink(tmp_path, "t"))
    assert LayoutSource(tmp_path).manifest("t")


def test_a_blob_that_is_not_as_promised_is_not_kept(tmp_path: Path) -> None:
    sink = LayoutSink(tmp_path, "t")
    with pytest.raises(DuopackError, match="not the promised one"):
        sink.put_blob(Bytes(b"abc", promised=Digest.of(b"abd")), lambda count: None)
    assert list((tmp_path / "blobs/sha256").iterdir()) == []


def test_a_manifest_without_its_layers_is_refused(tmp_path: Path) -> None:
    layer = Descriptor(OCI_LAYER_TAR, Digest.of(b"nothing"), 7)
    with pytest.raises(DuopackError, match="gone from the layout"):
        LayoutSink(tmp_path, "t").put_manifest(b"{}", b"{}", (layer,))
    assert index(tmp_path)["manifests"] == []


@pytest.mark.parametrize("kind", ["file", "other things", "other version", "broken index"])
def test_what_is_no_layout_is_not_written_into(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "place"
    if kind == "file":
        place.write_text("precious")
    else:
        place.mkdir()
        (place / "precious").write_text("precious")
    if kind == "other version":
        (place / "oci-layout").write_text('{"imageLayoutVersion": "2.0.0"}')
    if kind == "broken index":
        (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        (place / "index.json").write_text("{")
    before = sorted(place.iterdir()) if place.is_dir() else [place]
    with pytest.raises(DuopackError, match="place"):
        write_image(image(), LayoutSink(place, "t"))
    if kind != "broken index":
        assert (sorted(place.iterdir()) if place.is_dir() else [place]) == before


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounts a tmpfs: needs root")
def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path) -> None:
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], capture_output=True
    ).returncode:
        pytest.skip("no permission to mount here")
    try:
        write_image(image(), LayoutSink(tmp_path, "old"))
        with pytest.raises(DuopackError, match="5 MiB, but only"):
            write_image(image(bytes(5 << 20)), LayoutSink(tmp_path, "t"))
        # What fits when it begins may not fit any more while it is written.
        with pytest.raises(DuopackError, match="No space left on device"):
            LayoutSink(tmp_path, "t").put_blob(Growing(), lambda count: None)
        assert leftovers(tmp_path) == []
        assert LayoutSource(tmp_path).manifest()[0].size
        write_image(image(bytes(1 << 20)), LayoutSink(tmp_path, "t"))
    finally:
        subprocess.run(["umount", tmp_path], check=True)


class Growing:
    """A blob that understates its size."""

    media_type = OCI_LAYER_TAR
    size = 1000
    digest = None

    def read(self, offset: int = 0) -> Iterator[bytes]:
        for _ in range(8):
            yield bytes(1 << 20)


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    write_image(image(), LayoutSink(tmp_path, "t"))
    return tmp_path


def blob_path(layout: Path, kind: str) -> Path:
    descriptor, data = LayoutSource(layout).manifest("t")
    manifest = json.loads(data)
    digests = {
        "manifest": str(descriptor.digest),
        "config": manifest["config"]["digest"],
        "layer": manifest["layers"][0]["digest"],
    }
    return layout / "blobs/sha256" / digests[kind].removeprefix("sha256:")


def read_all(layout: Path) -> None:
    for layer in load_base(LayoutSource(layout), "t", "linux/arm64").layers:
        for _ in layer.blob.read():
            pass


@pytest.mark.parametrize("kind", ["manifest", "config", "layer"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_blob_is_found_when_it_is_read(layout: Path, kind: str, damage: str) -> None:
    path = blob_path(layout, kind)
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "changed":
        path.write_bytes(data[:-1] + b"?")
    else:
        path.unlink()
    with pytest.raises(DuopackError, match=path.name) as caught:
        read_all(layout)
    assert "build or copy the image again" in caught.value.mend


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"manifests": {}}',
        '{"manifests": [1]}',
        '{"manifests": [{"digest": "x"}]}',
        "[" * 99999,
    ],
)
def test_a_hostile_index_is_refused(layout: Path, text: str) -> None:
    (layout / "index.json").write_text(text)
    with pytest.raises(DuopackError):
        LayoutSource(layout).manifest("t")


def test_an_endless_index_or_manifest_is_not_read_into_memory(layout: Path) -> None:
    value = index(layout)
    value["manifests"][0]["size"] = 1 << 40
    (layout / "index.json").write_text(json.dumps(value))
    with pytest.raises(DuopackError, match="is said to have"):
        LayoutSource(layout).manifest("t")
    os.truncate(layout / "index.json", 1 << 40)
    with pytest.raises(DuopackError, match="more than the"):
        LayoutSource(layout).manifest("t")


def test_a_place_that_is_no_layout_is_named(tmp_path: Path) -> None:
    with pytest.raises(DuopackError, match="not an OCI image layout"):
        LayoutSource(tmp_path / "nothing").manifest("t")


def test_partial_files_are_swept_only_when_unlocked(tmp_path: Path) -> None:
    (tmp_path / ".p-dead").touch()
    (tmp_path / "other").touch()
    with PartialFile(tmp_path, ".p-") as living:
        sweep(tmp_path, ".p-")
        assert len(list(tmp_path.glob(".p-*"))) == 1
        living.write(b"1")
        living.commit(tmp_path / "done")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done", "other"]


def test_a_discarded_partial_file_takes_no_more(tmp_path: Path) -> None:
    partial = PartialFile(tmp_path, ".p-")
    partial.discard()
    with pytest.raises(DuopackError, match="given up"):
        partial.write(b"1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not shutil.which("skopeo"), reason="skopeo is not installed")
def test_skopeo_reads_the_layout(layout: Path) -> None:
    command = ["skopeo", "inspect", "--override-arch", "arm64", f"oci:{layout}:t"]
    shown = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert shown["Digest"] == LayoutSource(layout).manifest("t")[0].digest
    assert shown["Architecture"] == "arm64"
