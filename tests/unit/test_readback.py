"""Reading an image back finds every way in which it can differ from the lock."""

from __future__ import annotations

import gzip
import io
import tarfile
from dataclasses import dataclass, replace

import pytest

from pipeline.catalog.load import load_catalog
from pipeline.catalog.target import find_target
from pipeline.errors import DuopackError
from pipeline.lock.values import Lock, read_lock
from pipeline.oci.digest import Digest
from pipeline.oci.image import Layer, load_base
from pipeline.oci.layout import LayoutSink, LayoutSource
from pipeline.oci.model import OCI_LAYER_GZIP, OCI_LAYER_TAR
from pipeline.oci.tar import TarEntry, TarLayer
from pipeline.oci.transfer import write_image
from pipeline.stages.readback import read_back


@pytest.fixture
def built(project):
    project.built("one")
    return project


def parts(built):
    target = find_target(load_catalog(built.directory / "models.yaml"), "one")
    return LayoutSource(built.work / "one"), target, read_lock(built.lock)


def changed(lock: Lock, **changes) -> Lock:
    first, *rest = lock.models["one"].files
    model = replace(lock.models["one"], files=(replace(first, **changes), *rest))
    return lock.with_model("one", model)


def test_what_was_built_is_what_the_lock_says(built):
    source, target, lock = parts(built)
    found = read_back(source, "latest", target, lock)
    assert found.model_files == len(lock.models["one"].files)
    assert found.layers == 3
    assert "models/scripts/n1.sh" in found.other_files
    assert found.command == ("/models/scripts/n1.sh",)


def test_a_file_that_is_missing_or_other_is_named(built):
    source, target, lock = parts(built)
    with pytest.raises(DuopackError, match=r"nowhere\.json"):
        read_back(source, "latest", target, changed(lock, path="nowhere.json"))
    with pytest.raises(DuopackError, match="0" * 64):
        read_back(source, "latest", target, changed(lock, sha256="0" * 64))


def test_a_file_that_a_later_layer_replaces_is_judged_as_the_container_sees_it(built):
    source, target, lock = parts(built)
    image = load_base(source, "latest", "linux/arm64")
    over = TarLayer([TarEntry("models/Tiny-One/config.json", 0o644, b"{}")])
    write_image(image.with_layers([Layer.of(over)]), LayoutSink(built.work / "one", "over"))
    with pytest.raises(DuopackError, match=r"config\.json: it has 2 bytes"):
        read_back(source, "over", target, lock)


@pytest.mark.parametrize(
    "name", ["models/Tiny-One/.wh.config.json", "models/Tiny-One/.wh..wh..opq", "models/.wh.Tiny-One"]
)
def test_a_file_that_a_later_layer_takes_away_is_missing(built, name):
    source, target, lock = parts(built)
    image = load_base(source, "latest", "linux/arm64")
    gone = TarLayer([TarEntry(name, 0o644, b"")])
    write_image(image.with_layers([Layer.of(gone)]), LayoutSink(built.work / "one", "gone"))
    with pytest.raises(DuopackError, match="Tiny-One"):
        read_back(source, "gone", target, lock)


def test_a_link_in_the_place_of_a_file_is_no_file(built):
    source, target, lock = parts(built)
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        link = tarfile.TarInfo("models/Tiny-One/config.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    layer = PlainLayer(data.getvalue())
    image = load_base(source, "latest", "linux/arm64")
    write_image(image.with_layers([Layer(layer, layer.digest)]), LayoutSink(built.work / "one", "link"))
    with pytest.raises(DuopackError, match=r"config\.json"):
        read_back(source, "link", target, lock)


def test_a_compressed_layer_on_top_is_looked_into_as_well(built):
    source, target, lock = parts(built)
    image = load_base(source, "latest", "linux/arm64")
    tar = b"".join(TarLayer([TarEntry("models/Tiny-One/config.json", 0o644, b"{}")]).read())
    layer = PlainLayer(gzip.compress(tar), OCI_LAYER_GZIP)
    write_image(image.with_layers([Layer(layer, Digest.of(tar))]), LayoutSink(built.work / "one", "zip"))
    with pytest.raises(DuopackError, match=r"config\.json: it has 2 bytes"):
        read_back(source, "zip", target, lock)


def test_a_layer_that_is_no_tar_is_told(built):
    source, target, lock = parts(built)
    image = load_base(source, "latest", "linux/arm64")
    layer = PlainLayer(b"not a tar" * 1000)
    write_image(image.with_layers([Layer(layer, layer.digest)]), LayoutSink(built.work / "one", "odd"))
    with pytest.raises(DuopackError, match="no sound archive"):
        read_back(source, "odd", target, lock)


@dataclass(frozen=True)
class PlainLayer:
    """A layer of any bytes."""

    data: bytes
    media_type: str = OCI_LAYER_TAR

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def digest(self) -> Digest:
        return Digest.of(self.data)

    def read(self, offset: int = 0):
        yield self.data[offset:]


def test_a_damaged_blob_is_told(built):
    source, target, lock = parts(built)
    big = max((built.work / "one" / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(big.read_bytes())
    data[len(data) // 2] ^= 1
    big.write_bytes(data)
    with pytest.raises(DuopackError, match=r"model\.safetensors.*sha256"):
        read_back(source, "latest", target, lock)


def test_a_pax_or_gnu_name_is_read_like_any_other(built):
    """The reader is the standard library's: long and Chinese names come out as they went in."""
    name = "models/Tiny-One/" + "深" * 60 + ".json"
    layer = TarLayer([TarEntry(name, 0o644, b"x")])
    with tarfile.open(fileobj=io.BytesIO(b"".join(layer.read()))) as tar:
        assert [member.name for member in tar.getmembers() if member.isfile()] == [name]
