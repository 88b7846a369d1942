"""Images as values: what is built upon a base keeps it, is deterministic, and hostile bases are refused."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from support.oci_memory import Bytes, MemorySource, base_config, base_layer, small_base

from pipeline.errors import DuopackError
from pipeline.oci.digest import Digest
from pipeline.oci.documents import same_platform
from pipeline.oci.image import EPOCH, MAX_LAYERS, WARN_LAYERS, Healthcheck, Image, Layer, load_base
from pipeline.oci.model import (
    DOCKER_CONFIG,
    DOCKER_LAYER_GZIP,
    DOCKER_LIST,
    DOCKER_MANIFEST,
    OCI_CONFIG,
    OCI_INDEX,
    OCI_LAYER_GZIP,
    OCI_LAYER_TAR,
    OCI_MANIFEST,
)
from pipeline.oci.tar import TarEntry, TarLayer

PLATFORM = "linux/arm64"


@pytest.fixture
def source() -> MemorySource:
    return MemorySource()


def load(source: MemorySource, reference: str = "t", platform: str = PLATFORM) -> Image:
    return load_base(source, reference, platform)


def finish(image: Image) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    digests = [
        layer.blob.digest or Digest("sha256:" + hashlib.sha256(b"".join(layer.blob.read())).hexdigest())
        for layer in image.layers
    ]
    finished = image.finish(digests)
    return json.loads(finished.config), json.loads(finished.manifest), finished.manifest


def script_layer() -> Layer:
    return Layer.of(
        TarLayer([TarEntry("models/n.sh", 0o755, b"#!/bin/bash\n")]), created_by="duopack: scripts"
    )


def test_what_is_not_changed_keeps_the_bases_value(source: MemorySource) -> None:
    small_base(source, "t")
    changed = load(source).with_config(
        cmd=["/models/n.sh"],
        env={"ZED": "1", "ASCEND": "/new", "ALPHA": "2"},
        labels={"ours": "x"},
        exposed_ports=[12320],
        healthcheck=Healthcheck(
            ("CMD", "/models/health.sh"), interval=30, timeout=2.5, start_period=600, retries=4
        ),
    )
    config, _, _ = finish(changed)
    assert config["config"] == {
        "Entrypoint": ["/entry.sh"],
        "Cmd": ["/models/n.sh"],
        "Env": ["PATH=/usr/bin:/bin", "ASCEND=/new", "EMPTY=", "ALPHA=2", "ZED=1"],
        "Labels": {"base": "label", "ours": "x"},
        "ExposedPorts": {"22/tcp": {}, "12320/tcp": {}},
        "WorkingDir": "/workspace",
        "StopSignal": "SIGINT",
        "Healthcheck": {
            "Test": ["CMD", "/models/health.sh"],
            "Interval": 30_000_000_000,
            "Timeout": 2_500_000_000,
            "StartPeriod": 600_000_000_000,
            "Retries": 4,
        },
    }
    assert (config["author"], config["x-unknown"], config["variant"]) == (
        "somebody",
        {"kept": [1, 2.5, None]},
        "v8",
    )


def test_values_are_never_changed_in_place(source: MemorySource) -> None:
    small_base(source, "t")
    base = load(source)
    before = finish(base)
    base.with_config(env={"A": "1"}, labels={"a": "b"}, exposed_ports=[1], cmd=["x"]).with_layers(
        [script_layer()]
    )
    base.with_annotations({"a": "b"})
    assert finish(base) == before
    assert base.env == {"PATH": "/usr/bin:/bin", "ASCEND": "/usr/local/Ascend", "EMPTY": ""}


def test_history_and_diff_ids_follow_the_layers_and_no_clock_is_read(source: MemorySource) -> None:
    descriptor = small_base(source, "t")
    base = load(source)
    assert base.base_digest == descriptor["digest"]
    config, manifest, _ = finish(base.with_layers([script_layer()]).with_annotations({"k": "v"}))
    assert config["created"] == EPOCH
    assert [entry.get("empty_layer", False) for entry in config["history"]] == [False, True, False]
    assert config["history"][2] == {"created": EPOCH, "created_by": "duopack: scripts"}
    assert config["rootfs"]["diff_ids"] == [base_layer()[1], manifest["layers"][1]["digest"]]
    assert [layer["mediaType"] for layer in manifest["layers"]] == [OCI_LAYER_GZIP, OCI_LAYER_TAR]
    assert manifest["annotations"] == {"k": "v"}


@pytest.mark.parametrize("history", [None, [], [{"created_by": "1"}, {"created_by": "2"}]])
def test_a_history_that_does_not_fit_the_layers_is_made_anew(source: MemorySource, history: Any) -> None:
    small_base(source, "t", history=history)
    config, _, _ = finish(load(source).with_layers([script_layer()]))
    assert [entry["created_by"] for entry in config["history"]] == ["", "duopack: scripts"]


def test_the_same_image_has_the_same_bytes_whatever_the_order_of_calls(source: MemorySource) -> None:
    small_base(source, "t")
    one = load(source).with_config(env={"A": "1", "B": "2"}).with_config(labels={"x": "1", "y": "2"})
    two = load(source).with_config(labels={"y": "2", "x": "1"}).with_config(env={"B": "2", "A": "1"})
    assert finish(one) == finish(two)


def test_docker_media_types_become_oci_ones_throughout(source: MemorySource) -> None:
    layer, diff_id = base_layer()
    config = json.dumps(base_config([diff_id])).encode()
    source.add_manifest(
        {
            "schemaVersion": 2,
            "mediaType": DOCKER_MANIFEST,
            "config": source.add_blob(config, DOCKER_CONFIG),
            "layers": [source.add_blob(layer, DOCKER_LAYER_GZIP)],
        },
        "t",
        media_type=DOCKER_MANIFEST,
    )
    _, manifest, raw = finish(load(source).with_layers([script_layer()]))
    assert b"vnd.docker" not in raw
    assert manifest["mediaType"] == OCI_MANIFEST
    assert manifest["config"]["mediaType"] == OCI_CONFIG


def index_of(source: MemorySource, entries: list[dict[str, Any]], media_type: str = OCI_INDEX) -> None:
    source.add_manifest(
        {"schemaVersion": 2, "mediaType": media_type, "manifests": entries}, "t", media_type=media_type
    )


@pytest.mark.parametrize("media_type", [OCI_INDEX, DOCKER_LIST])
@pytest.mark.parametrize("variant", [{}, {"variant": "v8"}])
def test_an_index_is_resolved_for_the_platform(
    source: MemorySource, media_type: str, variant: dict[str, str]
) -> None:
    arm = small_base(source) | {"platform": {"os": "linux", "architecture": "arm64"} | variant}
    amd = small_base(source, architecture="amd64", variant="") | {
        "platform": {"os": "linux", "architecture": "amd64"}
    }
    attestation = small_base(source, author="attest") | {
        "platform": {"os": "unknown", "architecture": "unknown"},
        "annotations": {"vnd.docker.reference.type": "attestation-manifest"},
    }
    index_of(source, [attestation, amd, arm], media_type)
    assert load(source, platform="linux/arm64").base_digest == arm["digest"]
    assert load(source, platform="linux/arm64/v8").base_digest == arm["digest"]
    assert load(source, platform="linux/amd64").base_digest == amd["digest"]
    with pytest.raises(DuopackError, match="no image for linux/riscv64; there is: linux/amd64, linux/arm64"):
        load(source, platform="linux/riscv64")


def test_platform_names_are_compared_by_meaning() -> None:
    assert same_platform("linux/arm64", "linux/arm64/v8")
    assert same_platform("linux/aarch64", "linux/arm64")
    assert not same_platform("linux/arm64", "linux/arm64/v9")
    assert not same_platform("linux/arm64", "linux/arm/v8")
    assert not same_platform("linux/amd64", "linux/amd64/v3")
    assert not same_platform("windows/amd64", "linux/amd64")


def test_indexes_that_name_themselves_end(source: MemorySource) -> None:
    platform = {"os": "linux", "architecture": "arm64"}
    entry = {"mediaType": OCI_INDEX, "digest": "sha256:" + "1" * 64, "size": 1, "platform": platform}
    index_of(source, [entry])
    source.manifests[entry["digest"]] = source.manifests["t"]  # type: ignore[index]
    with pytest.raises(DuopackError, match="nested too deeply"):
        load(source)


def broken(source: MemorySource, change: Any) -> None:
    layer, diff_id = base_layer()
    config = json.dumps(base_config([diff_id])).encode()
    value = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": source.add_blob(config, OCI_CONFIG),
        "layers": [source.add_blob(layer, OCI_LAYER_GZIP)],
    }
    change(value)
    source.add_manifest(value, "t")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(schemaVersion=1), "schema 1"),
        (
            lambda m: m.update(mediaType="application/vnd.docker.distribution.manifest.v1+prettyjws"),
            "media type",
        ),
        (lambda m: m.update(manifests=[]), "both an index and a manifest"),
        (lambda m: m["config"].update(mediaType="application/vnd.oci.empty.v1+json"), "artifact"),
        (lambda m: m["config"].update(size=1 << 40), "config is said to have"),
        (lambda m: m["layers"][0].update(size=-1), "size -1"),
        (lambda m: m["layers"][0].update(size=True), "size True"),
        (lambda m: m["layers"][0].update(size=1 << 60), "size"),
        (lambda m: m["layers"][0].update(size="7"), "size '7'"),
        (lambda m: m["layers"][0].update(digest="sha256:../../etc"), "not a sha256 digest"),
        (lambda m: m["layers"][0].update(urls=["https://elsewhere"]), "foreign"),
        (
            lambda m: m["layers"][0].update(
                mediaType="application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
            ),
            "foreign",
        ),
        (lambda m: m["layers"][0].update(mediaType="application/x-squashfs"), "unknown media type"),
        (lambda m: m["layers"].append(dict(m["layers"][0])), "2 layers, but its config tells of 1"),
        (lambda m: m.update(layers={}), "list of descriptors"),
        (lambda m: m.update(layers=[7]), "not a JSON object"),
        (lambda m: m.pop("config"), "not a JSON object"),
    ],
)
def test_a_manifest_that_is_not_sound_is_refused(source: MemorySource, change: Any, message: str) -> None:
    broken(source, change)
    with pytest.raises(DuopackError, match=message) as caught:
        load(source)
    assert caught.value.mend


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[]", b"{", b"[" * 100_000, b'{"a":NaN}', b'{"a":1e999}', b"1" * 5000]
)
def test_bytes_that_are_no_json_object_are_refused(source: MemorySource, data: bytes) -> None:
    source.manifests["t"] = (OCI_MANIFEST, data)
    with pytest.raises(DuopackError):
        load(source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "amd64", "variant": ""}, "the image is for linux/amd64 and not for linux/arm64"),
        ({"os": "windows"}, "windows/arm64"),
        ({"rootfs": {"type": "layers", "diff_ids": []}}, "tells of 0"),
        ({"rootfs": None}, "no list of diff_ids"),
        ({"rootfs": {"diff_ids": [1]}}, "no list of diff_ids"),
        ({"config": []}, None),
        ({"config": [1]}, "malformed"),
        ({"config": {"Env": "A=B"}}, "malformed"),
        ({"config": {"Env": [1]}}, "malformed"),
        ({"config": {"Labels": ["a"]}}, "malformed"),
        ({"history": ["x"]}, "malformed"),
    ],
)
def test_a_config_that_is_not_sound_is_refused(
    source: MemorySource, change: dict[str, Any], message: str | None
) -> None:
    small_base(source, "t", **change)
    if message is None:
        assert load(source).with_config(env={"A": "1"}).env == {"A": "1"}
        return
    with pytest.raises(DuopackError, match=message):
        load(source)


def test_a_config_whose_bytes_were_changed_is_refused(source: MemorySource) -> None:
    small_base(source, "t")
    manifest = json.loads(source.manifests["t"][1])
    source.blobs[manifest["config"]["digest"]] = bytes(manifest["config"]["size"])
    with pytest.raises(DuopackError, match="not the promised one"):
        load(source)


def test_many_layers_are_warned_of_and_too_many_refused() -> None:
    image = Image.scratch("linux/arm64/v8")
    assert image.platform == "linux/arm64/v8"
    layer = Layer(Bytes(b""), title="x")
    assert image.with_layers([layer] * (WARN_LAYERS - 1)).warnings == ()
    assert "70 layers" in image.with_layers([layer] * WARN_LAYERS).warnings[0]
    image.with_layers([layer] * MAX_LAYERS)
    with pytest.raises(DuopackError, match="121 layers"):
        image.with_layers([layer] * (MAX_LAYERS + 1))


@pytest.mark.parametrize("env", [{"A=B": "1"}, {"": "1"}, {"A": "x\0y"}])
def test_an_impossible_environment_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(DuopackError, match="environment variable"):
        Image.scratch("linux/arm64").with_config(env=env)


def test_lone_surrogates_and_wide_characters_survive(source: MemorySource) -> None:
    small_base(source, "t", author="\ud800 作者")
    config, _, _ = finish(load(source))
    assert config["author"] == "\ud800 作者"
