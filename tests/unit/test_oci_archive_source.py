"""Docker archives as a place to read from: ours, docker's old and new forms, and broken ones."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest
from support.oci_memory import MemorySink, MemorySource, base_config, small_base

from pipeline.errors import DuopackError
from pipeline.oci.archive import ArchiveSink
from pipeline.oci.archive_source import ArchiveSource
from pipeline.oci.digest import Digest
from pipeline.oci.documents import resolve
from pipeline.oci.image import Layer, load_base
from pipeline.oci.layout import LayoutSink
from pipeline.oci.places import open_source
from pipeline.oci.ranges import read_range
from pipeline.oci.reference import parse_reference
from pipeline.oci.tar import TarEntry, TarLayer
from pipeline.oci.transfer import copy_image, write_image


def tar_of(files: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return out.getvalue()


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


LAYER = tar_of({"etc/os-release": b"openEuler\n"})
PACKED = gzip.compress(LAYER, mtime=0)
CONFIG = json.dumps(base_config([f"sha256:{sha(LAYER)}"])).encode()


def saved(
    path: Path, *, layer: bytes = LAYER, name: str = "abc/layer.tar", tags=("qwen:1",), more=None
) -> Path:
    """As docker save before 25 writes it."""
    manifest = [{"Config": f"{sha(CONFIG)}.json", "RepoTags": list(tags), "Layers": [name]}]
    files = {name: layer, f"{sha(CONFIG)}.json": CONFIG, "manifest.json": json.dumps(manifest).encode()}
    path.write_bytes(tar_of(files | (more or {})))
    return path


@pytest.fixture
def image():
    source = MemorySource()
    small_base(source, "t")
    weights = TarLayer([TarEntry("models/m/w", 0o644, b"w" * 70_000)])
    return load_base(source, "t", "linux/arm64").with_layers([Layer.of(weights)])


def test_an_archive_of_ours_goes_on_to_a_layout_with_the_same_layers(image, tmp_path):
    write_image(image, ArchiveSink(tmp_path / "a.tar", "qwen:1"))
    direct = MemorySink()
    write_image(image, direct)
    source = open_source(parse_reference(f"docker-archive:{tmp_path / 'a.tar'}:qwen:1"))
    copied = copy_image(source, "1", None, LayoutSink(tmp_path / "layout", "1"))
    assert copied.digest == Digest.of(direct.manifest or b"")
    assert {path.name for path in (tmp_path / "layout/blobs/sha256").iterdir()} >= {
        digest.hex for digest in direct.blobs
    }


@pytest.mark.parametrize("layer", [LAYER, PACKED])
def test_what_docker_saves_is_read_whole_and_in_parts(tmp_path, layer):
    source = ArchiveSource(saved(tmp_path / "a.tar", layer=layer))
    manifest = resolve(source, "", "linux/arm64").manifest
    assert b"".join(source.blob(manifest.config).read()) == CONFIG
    [found] = manifest.layers
    assert found.digest == f"sha256:{sha(layer)}"
    assert b"".join(source.blob(found).read()) == layer
    assert read_range(source.blob(found), 5, 9) == layer[5:14]


def test_a_layer_that_is_not_what_the_config_says_is_found_when_it_is_read(tmp_path):
    source = ArchiveSource(saved(tmp_path / "a.tar", layer=tar_of({"etc/os-release": b"other\n"})))
    [layer] = resolve(source, "", None).manifest.layers
    with pytest.raises(DuopackError, match="and not"):
        list(source.blob(layer).read())


def test_a_repeated_layer_is_found_through_dockers_link(tmp_path):
    manifest = [{"Config": "c.json", "RepoTags": None, "Layers": ["one/layer.tar", "two/layer.tar"]}]
    config = json.dumps(base_config([f"sha256:{sha(LAYER)}"] * 2)).encode()
    files = {"one/layer.tar": LAYER, "c.json": config, "manifest.json": json.dumps(manifest).encode()}
    (tmp_path / "a.tar").write_bytes(tar_of(files, {"two/layer.tar": "../one/layer.tar"}))
    source = ArchiveSource(tmp_path / "a.tar")
    layers = resolve(source, "", None).manifest.layers
    assert [b"".join(source.blob(layer).read()) for layer in layers] == [LAYER, LAYER]
    assert source.names() == ("",)


@pytest.mark.parametrize("loop", [{"x": "y", "y": "x"}, {"x": "../../etc/passwd"}])
def test_links_that_lead_nowhere_are_refused(tmp_path, loop):
    manifest = [{"Config": "c.json", "Layers": ["x"]}]
    files = {"c.json": CONFIG, "manifest.json": json.dumps(manifest).encode()}
    (tmp_path / "a.tar").write_bytes(tar_of(files, loop))
    with pytest.raises(DuopackError, match="names 'x', which it does not have"):
        ArchiveSource(tmp_path / "a.tar").manifest()


def oci_inside(config: bytes = CONFIG) -> tuple[dict[str, bytes], str]:
    """An OCI layout of one image, as docker save adds it since 25."""
    blobs = {f"blobs/sha256/{sha(data)}": data for data in (config, PACKED)}
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": f"sha256:{sha(config)}",
                "size": len(config),
            },
            "layers": [
                {
                    "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
                    "digest": f"sha256:{sha(PACKED)}",
                    "size": len(PACKED),
                }
            ],
        }
    ).encode()
    blobs[f"blobs/sha256/{sha(manifest)}"] = manifest
    index = {
        "schemaVersion": 2,
        "manifests": [
            {
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "digest": f"sha256:{sha(manifest)}",
                "size": len(manifest),
            }
        ],
    }
    return blobs | {"index.json": json.dumps(index).encode()}, f"sha256:{sha(manifest)}"


def test_the_manifest_of_an_oci_layout_inside_is_the_images_own(tmp_path):
    inside, digest = oci_inside()
    source = ArchiveSource(
        saved(tmp_path / "a.tar", layer=PACKED, name=f"blobs/sha256/{sha(PACKED)}", more=inside)
    )
    assert source.manifest()[0].digest == digest
    assert source.manifest(digest)[0].digest == digest
    [layer] = resolve(source, "qwen:1", None).manifest.layers
    assert b"".join(source.blob(layer).read()) == PACKED


def test_an_archive_that_means_two_images_is_refused(tmp_path):
    inside, _ = oci_inside(json.dumps(base_config([f"sha256:{sha(LAYER)}"], author="other")).encode())
    with pytest.raises(DuopackError, match="different images"):
        ArchiveSource(saved(tmp_path / "a.tar", more=inside)).manifest()


def test_an_image_is_chosen_by_name_by_tag_or_as_the_only_one(tmp_path):
    path = saved(tmp_path / "a.tar", tags=("docker.io/library/qwen:1", "reg.example/x/qwen:2"))
    for name, reference in (
        ("", ""),
        ("qwen:1", "1"),
        ("reg.example/x/qwen:2", ""),
        ("", "2"),
        ("", "qwen:1"),
    ):
        assert ArchiveSource(path, name).manifest(reference)
    with pytest.raises(
        DuopackError, match=r"no image 'qwen:3'; the archive has: docker.io/library/qwen:1, reg"
    ):
        ArchiveSource(path, "qwen:3").manifest("3")


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "no manifest.json"),
        (b"not a tar" * 100, "no tar header"),
        (gzip.compress(LAYER), "compressed as a whole"),
        (tar_of({"x": b""}), "no manifest.json"),
        (tar_of({"manifest.json": b"["}), "not valid JSON"),
        (tar_of({"manifest.json": b"[" * 100_000}), "not valid JSON"),
        (tar_of({"manifest.json": b"{}"}), "not a list"),
        (tar_of({"manifest.json": b"[1]"}), "malformed"),
        (tar_of({"manifest.json": b'[{"Config": "c", "Layers": "x"}]'}), "malformed"),
        (tar_of({"manifest.json": b'[{"Config": "c", "Layers": []}]'}), "does not have"),
        (tar_of({"manifest.json": b'[{"Config": "c", "Layers": ["x"]}]', "c": b"{}"}), "another number"),
        (tar_of({"manifest.json": b'[{"Config": "c", "Layers": []}]', "c": bytes(9 << 20)}), "are accepted"),
        (tar_of({"manifest.json": bytes(5 << 20)}), "are accepted"),
        (tar_of({f"{n}": b"" for n in range(20)})[:5000], "ends inside"),
    ],
)
def test_what_is_no_archive_is_refused_in_a_sentence(tmp_path, data, match):
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(DuopackError, match=match) as caught:
        ArchiveSource(tmp_path / "a.tar").manifest()
    assert caught.value.mend


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    for path in (tmp_path / "none.tar", tmp_path):
        with pytest.raises(DuopackError, match="cannot be read"):
            ArchiveSource(path).manifest()
