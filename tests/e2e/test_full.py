"""A set of models beside the images of each: in a real registry nothing is sent twice, and nothing is believed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub import FaultyHub
from support.project import Project, make_models, open_project
from support.registry import RegistryServer

from pipeline.oci.documents import resolve
from pipeline.oci.layout import LayoutSource
from pipeline.oci.places import open_source
from pipeline.oci.reference import parse_reference

pytestmark = pytest.mark.e2e


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RegistryServer]:
    with RegistryServer(tmp_path / "registry") as server:
        yield server


@pytest.fixture
def project(tmp_path: Path, registry: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    make_models(tmp_path / "hub")
    with FaultyHub(tmp_path / "hub") as hub:
        project = open_project(tmp_path, hub, monkeypatch)
        monkeypatch.setenv("DUOPACK_REGISTRY", f"{registry.host}/llm")
        yield project


def uploads(registry: RegistryServer) -> int:
    """Blobs whose bytes were sent: a mount has no PATCH."""
    lines = registry.log.read_text().splitlines()
    return sum("http.request.method=PATCH" in line and "response completed" in line for line in lines)


def layers(place: str) -> list[str]:
    reference = parse_reference(place)
    manifest = resolve(open_source(reference), reference.wanted, "linux/arm64").manifest
    return [str(layer.digest) for layer in manifest.layers]


def build_singles(project: Project) -> list[str]:
    return [project.built(key)["destination"] for key in ("one", "two")]


def test_a_set_takes_every_layer_from_the_images_of_its_models(
    project: Project, registry: RegistryServer
) -> None:
    one, two = build_singles(project)
    before = uploads(registry)
    built = project.built("both")
    # The start scripts and the config; base and weights are mounted.
    assert built["layers_sent"] == 1
    assert uploads(registry) - before == 2
    assert layers(built["destination"])[:-1] == [*layers(one)[:-1], *layers(two)[1:-1]]
    again = project.built("both")
    assert (again["digest"], again["layers_sent"]) == (built["digest"], 0)


def test_a_model_takes_its_layers_from_a_set(project: Project, registry: RegistryServer) -> None:
    project.built("both")
    before = uploads(registry)
    assert project.built("two")["layers_sent"] == 1
    assert uploads(registry) - before == 2


def test_without_a_memo_the_files_are_read_and_none_is_sent(
    project: Project, registry: RegistryServer
) -> None:
    build_singles(project)
    shutil.rmtree(project.work)
    project.hub.forget()
    before = uploads(registry)
    built = project.built("both")
    # A fresh machine: what the registry says of its layers is no proof, so the weights are fetched and hashed.
    assert project.hub.requests
    assert (built["layers_sent"], uploads(registry) - before) == (1, 2)


def test_with_the_memo_alone_nothing_is_downloaded(project: Project) -> None:
    build_singles(project)
    shutil.rmtree(project.work / "_work" / "models")
    project.hub.forget()
    assert project.built("both")["layers_sent"] == 1
    assert not [path for path in project.hub.requests if "safetensors" in str(path)]


def test_a_layer_of_the_same_size_with_other_bytes_is_not_taken_for_ours(
    project: Project, registry: RegistryServer
) -> None:
    [first, _] = build_singles(project)
    old = layers(first)
    shutil.rmtree(project.work)
    weights = next(project.weights().glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.unlink()
    weights.write_bytes(data)
    assert project.run("lock", "one", "--update").code == 0
    built = project.built("both")
    assert built["layers_sent"] == 2
    new = layers(built["destination"])
    assert old[1] not in new
    ran = project.run("verify", built["destination"], "--deep")
    assert ran.code == 0, ran.out + ran.err


def test_a_sister_that_cannot_be_read_costs_the_mount_and_nothing_else(
    project: Project, registry: RegistryServer
) -> None:
    build_singles(project)
    for name in ("tiny-one", "tiny-two"):
        shutil.rmtree(
            registry.root / "data/docker/registry/v2/repositories/llm" / name / "_manifests",
            ignore_errors=True,
        )
    assert project.built("both")["layers_sent"] == 4


def test_several_platforms_in_a_registry(project: Project, registry: RegistryServer, tmp_path: Path) -> None:
    built = project.built("both", "--platform", "all")
    assert built["destination"] == f"docker://{registry.host}/llm/both:stand-in-both"
    # The base, two weights and two layers of scripts: the second platform sends its scripts alone.
    assert built["layers_sent"] == 5
    reference = parse_reference(built["destination"])
    source = open_source(reference)
    assert str(source.manifest(reference.wanted)[0].digest) == built["digest"]
    for image in built["images"]:
        found = resolve(source, reference.wanted, image["platform"])
        assert str(found.descriptor.digest) == image["digest"]
    if shutil.which("skopeo"):
        for arch in ("arm64", "amd64"):
            options = ["--override-arch", arch, "--insecure-policy"]
            places = ["--src-tls-verify=false", built["destination"], f"oci:{tmp_path}/{arch}:x"]
            command = ["skopeo", *options, "copy", "--preserve-digests", *places]
            subprocess.run(command, check=True, capture_output=True)
            found = LayoutSource(tmp_path / arch).manifest("x")[0]
            assert str(found.digest) in {image["digest"] for image in built["images"]}
    again = project.built("both", "--platform", "all")
    assert (again["digest"], again["layers_sent"]) == (built["digest"], 0)
    single = project.built("both", "--to", f"docker://{registry.host}/llm/both:arm")
    assert single["digest"] == built["images"][0]["digest"]


@pytest.mark.skipif(not shutil.which("umoci"), reason="needs umoci")
def test_umoci_and_skopeo_read_the_index_of_a_layout(project: Project, tmp_path: Path) -> None:
    built = project.built("one", "--to", f"oci:{tmp_path}/out:v1", "--platform", "all")
    raw = subprocess.run(
        ["skopeo", "inspect", "--raw", f"oci:{tmp_path}/out:v1"], check=True, capture_output=True
    ).stdout
    assert b"image.index" in raw
    for image in built["images"]:
        arch = image["platform"].partition("/")[2]
        command = ["skopeo", "--insecure-policy", "--override-arch", arch, "copy"]
        subprocess.run(
            [*command, f"oci:{tmp_path}/out:v1", f"oci:{tmp_path}/{arch}:x"], check=True, capture_output=True
        )
        subprocess.run(
            ["umoci", "unpack", *([] if os.geteuid() == 0 else ["--rootless"]), "--image", f"{tmp_path}/{arch}:x",
             tmp_path / f"unpacked-{arch}"],
            check=True, capture_output=True,
        )  # fmt: skip
        for path in project.weights().iterdir():
            there = tmp_path / f"unpacked-{arch}" / "rootfs" / "models" / "Tiny-One" / path.name
            assert there.read_bytes() == path.read_bytes()
