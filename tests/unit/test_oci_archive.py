"""Archives for `docker load`: one pass, deterministic, whole or not there."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.oci_memory import MemorySource, small_base

from pipeline.errors import DuopackError
from pipeline.oci.archive import ArchiveSink
from pipeline.oci.digest import Digest
from pipeline.oci.image import Image, Layer, load_base
from pipeline.oci.tar import TarEntry, TarLayer
from pipeline.oci.transfer import write_image


@pytest.fixture
def image() -> Image:
    source = MemorySource()
    small_base(source, "t")
    layers = [Layer.of(TarLayer([TarEntry(f"models/{n}", 0o644, bytes([n]) * 3000)])) for n in range(3)]
    return load_base(source, "t", "linux/arm64").with_layers(layers)


def test_it_holds_the_config_and_every_layer_under_its_diff_id(image: Image, tmp_path: Path) -> None:
    write_image(image, ArchiveSink(tmp_path / "a.tar", "registry.local/qwen:9b"))
    with tarfile.open(tmp_path / "a.tar") as archive:
        files = {one.name: archive.extractfile(one).read() for one in archive if one.isfile()}  # type: ignore[union-attr]
    [entry] = json.loads(files["manifest.json"])
    assert entry["RepoTags"] == ["registry.local/qwen:9b"]
    config = files[entry["Config"]]
    assert entry["Config"] == hashlib.sha256(config).hexdigest() + ".json"
    layers = [files[name] for name in entry["Layers"]]
    plain = [gzip.decompress(layer) if layer[:2] == b"\x1f\x8b" else layer for layer in layers]
    assert [str(Digest.of(layer)) for layer in plain] == json.loads(config)["rootfs"]["diff_ids"]
    assert list(files)[-1] == "manifest.json"


def test_two_archives_of_one_image_are_equal(image: Image, tmp_path: Path) -> None:
    for name in ("a.tar", "deep/down/b.tar"):
        write_image(image, ArchiveSink(tmp_path / name, "x:y"))
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "deep/down/b.tar").read_bytes()


def test_a_layer_that_comes_twice_is_there_once(image: Image, tmp_path: Path) -> None:
    write_image(image.with_layers(image.layers[:2]), ArchiveSink(tmp_path / "a.tar", "x:y"))
    with tarfile.open(tmp_path / "a.tar") as archive:
        [entry] = json.load(archive.extractfile("manifest.json"))  # type: ignore[arg-type]
        assert len([one for one in archive if one.name.startswith("layers/")]) == 4
    assert len(entry["Layers"]) == 6
    assert entry["Layers"][4:] == entry["Layers"][:2]


def test_a_failure_keeps_the_older_file_and_leaves_nothing_else(image: Image, tmp_path: Path) -> None:
    class Bad(TarLayer):
        def read(self, offset: int = 0) -> Iterator[bytes]:
            yield b"half"
            raise DuopackError("the weights changed")

    target = tmp_path / "a[1].tar"
    target.write_text("older")
    (tmp_path / ".a[1].tar.partial-killed").write_text("left by kill -9")
    bad = Layer(Bad([TarEntry("x", 0o644, b"")]))
    with pytest.raises(DuopackError, match="weights changed"):
        write_image(image.with_layers([bad]), ArchiveSink(target, "x:y"))
    assert [path.name for path in tmp_path.iterdir()] == ["a[1].tar"]
    assert target.read_text() == "older"
    write_image(image, ArchiveSink(target, "x:y"))
    assert tarfile.is_tarfile(target)


def test_a_directory_is_no_place_for_it(image: Image, tmp_path: Path) -> None:
    with pytest.raises(DuopackError, match="this is a directory"):
        write_image(image, ArchiveSink(tmp_path, "x:y"))


def test_a_parent_that_is_a_file_is_told(image: Image, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DuopackError, match="file"):
        write_image(image, ArchiveSink(tmp_path / "file" / "a.tar", "x:y"))


@pytest.mark.skipif(not shutil.which("skopeo"), reason="skopeo is not installed")
def test_skopeo_reads_it(image: Image, tmp_path: Path) -> None:
    write_image(image, ArchiveSink(tmp_path / "a.tar", "local/qwen:9b"))
    inspect = ["skopeo", "inspect", "--override-arch", "arm64", f"docker-archive:{tmp_path / 'a.tar'}"]
    shown = json.loads(subprocess.run(inspect, capture_output=True, check=True).stdout)
    assert (shown["Architecture"], len(shown["Layers"])) == ("arm64", 4)
    copy = [
        "skopeo",
        "--override-arch",
        "arm64",
        "copy",
        f"docker-archive:{tmp_path / 'a.tar'}:local/qwen:9b",
    ]
    subprocess.run([*copy, f"oci:{tmp_path / 'copy'}:t"], capture_output=True, check=True)
