"""`duopack publish`: byte for byte, by mount where it can be, and never under a name that lies."""

from __future__ import annotations

import json

import pytest
from support.fake_registry import FakeRegistry
from support.project import Project, refused, run

from pipeline.oci.layout import LayoutSource


@pytest.fixture
def registry():
    with FakeRegistry() as registry:
        yield registry


def test_a_key_goes_where_the_catalog_says_and_keeps_its_digest(project, registry, monkeypatch):
    built = project.built("one")
    monkeypatch.setenv("DUOPACK_REGISTRY", f"{registry.host}/team")
    ran = project.run("publish", "one", "--json")
    assert ran.code == 0, ran.err
    assert ran.json == {
        "source": f"oci:{project.work}/one",
        "destination": f"docker://{registry.host}/team/tiny-one:stand-in-n1",
        "digest": built["digest"],
        "layers_sent": 3,
        "sent": built["size"],
    }
    _, manifest = registry.manifests["stand-in-n1"]
    assert manifest == LayoutSource(project.work / "one").manifest("latest")[1]
    again = project.run("publish", "one", "--json").json
    assert (again["layers_sent"], again["sent"]) == (0, 0)


def test_an_image_needs_a_destination_and_takes_any(project, tmp_path):
    built = project.built("one")
    refused(project.run("publish", f"oci:{project.work}/one"), 2, "--to")
    ran = project.run("publish", f"oci:{project.work}/one", "--to", f"oci:{tmp_path}/copy:v1", "--json")
    assert ran.json["digest"] == built["digest"]
    assert str(LayoutSource(tmp_path / "copy").manifest("v1")[0].digest) == built["digest"]
    ran = project.run("publish", f"oci:{project.work}/one", "--to", f"docker-archive:{tmp_path}/copy.tar:x:1")
    assert ran.code == 0, ran.err


def test_a_candidate_in_another_namespace_is_mounted_and_nothing_is_sent(project, registry, monkeypatch):
    monkeypatch.setenv("DUOPACK_REGISTRY", f"{registry.host}/staging")
    built = project.built("one")
    registry.mountable.update(registry.blobs)
    registry.blobs.clear()
    monkeypatch.setenv("DUOPACK_REGISTRY", f"{registry.host}/release")
    # This stand-in has one space for all repositories: the config must be readable at its source.
    registry.blobs.update({key: value for key, value in registry.mountable.items() if value[:1] == b"{"})
    ran = project.run("publish", "one", "--from-registry", f"{registry.host}/staging/", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["digest"] == built["digest"]
    assert ran.json["source"] == f"docker://{registry.host}/staging/tiny-one:stand-in-n1"
    assert (ran.json["layers_sent"], ran.json["sent"]) == (0, 0)
    assert not [seen for seen in registry.seen if seen.method == "PATCH" and "release" in seen.path]


def lies(project: Project, key: str, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch, *more: str):
    monkeypatch.setenv("DUOPACK_REGISTRY", f"{registry.host}/team")
    ran = project.run("publish", key, *more)
    assert registry.manifests == {}
    return ran


def test_an_image_of_another_platform_is_refused(project, registry, monkeypatch):
    project.built("one", "--to", f"oci:{project.work}/one", "--platform", "linux/amd64")
    refused(lies(project, "one", registry, monkeypatch), 1, "linux/amd64", "linux/arm64")


def test_an_image_of_another_model_or_profile_is_refused(project, registry, monkeypatch):
    project.built("two", "--to", f"oci:{project.work}/one")
    refused(lies(project, "one", registry, monkeypatch), 1, "io.duopack.models", "'two'", "'one'")
    project.built("nn1", "--to", f"oci:{project.work}/one")
    refused(lies(project, "one", registry, monkeypatch), 1, "default-profile", "'nn1'", "'n1'")


def test_an_image_on_another_base_is_refused_where_the_tag_names_the_base(project, registry, monkeypatch):
    project.content["bases"]["other"] = {**project.content["bases"]["stand-in"], "images": ["oci:base:arm64"]}
    project.content["bases"]["other"]["platforms"] = ["linux/arm64"]
    project.write()
    assert project.run("lock").code == 0
    built = project.built("one", "--base", "other")
    assert project.run("publish", "one", "--base", "other", "--to", f"oci:{project.work}/copy").code == 0
    lock = json.loads(project.lock.read_bytes())
    lock["bases"]["stand-in"]["platforms"]["linux/arm64"] = "sha256:" + "0" * 64
    project.lock.write_text(json.dumps(lock))
    refused(lies(project, "one", registry, monkeypatch), 1, "base.digest", "0" * 64)
    ran = project.run("publish", "one", "--to", f"oci:{project.directory}/out", "--json")
    assert ran.json["digest"] == built["digest"]


def test_a_name_that_tells_the_base_needs_the_lock(project, registry, monkeypatch):
    project.built("one")
    project.lock.unlink()
    refused(lies(project, "one", registry, monkeypatch), 1, "models.lock", "duopack build one")


def test_wrong_use(project, registry, monkeypatch):
    refused(project.run("publish", "one"), 2, "no registry to publish to", "DUOPACK_REGISTRY")
    refused(project.run("publish", "one", "--from-registry", "r.example/x"), 2, "--from-registry")
    refused(project.run("publish", "three"), 2, "'three' is not a key")
    monkeypatch.setenv("DUOPACK_REGISTRY", f"{registry.host}/team")
    assert project.run("lock").code == 0
    refused(project.run("publish", "one"), 1, "not an OCI image layout", "build the image")
    project.built("one", "--to", f"oci:{project.work}/one")
    refused(project.run("publish", "one", "--from-registry", f"{registry.host}/team"), 2, "the same")
    refused(
        project.run("publish", f"oci:{project.work}/one", "--to", f"oci:{project.work}/one"), 2, "the same"
    )
    to_base = project.run("publish", f"oci:{project.work}/one", "--to", f"oci:{project.directory}/base:demo")
    refused(to_base, 2, "name of the base image")
    assert run("publish").code == 2


def test_a_damaged_blob_ends_it_without_a_manifest(project, registry, monkeypatch):
    project.built("one", "--to", f"oci:{project.work}/one")
    big = max((project.work / "one" / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(big.read_bytes())
    data[-600] ^= 1
    big.write_bytes(data)
    refused(lies(project, "one", registry, monkeypatch), 1, big.name)
