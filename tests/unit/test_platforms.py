"""`duopack build` for several platforms, of sets and of all models."""

from __future__ import annotations

import json
import tarfile

from support.project import refused

from pipeline.errors import DuopackError
from pipeline.oci.documents import resolve
from pipeline.oci.layout import LayoutSource
from pipeline.stages import platforms as platforms_stage

BOTH = ("--platform", "all")


def test_an_index_names_an_image_for_each_platform_with_the_same_weights(project, tmp_path):
    built = project.built("one", "--to", f"oci:{tmp_path}/out", *BOTH)
    source = LayoutSource(tmp_path / "out")
    # Only the index is in index.json: who asks for the tag gets it, and no image without a name.
    (entry,) = source.entries()
    assert (str(entry.digest), built["platform"]) == (built["digest"], "linux/arm64,linux/amd64")
    found = {}
    for image in built["images"]:
        resolved = resolve(source, "latest", image["platform"])
        assert resolved.descriptor.digest == image["digest"]
        config = json.loads(b"".join(source.blob(resolved.manifest.config).read()))
        found[config["architecture"]] = [str(layer.digest) for layer in resolved.manifest.layers]
    arm, amd = found["arm64"], found["amd64"]
    # The stand-in bases are equal but for their config, and launch.json names the base's digest.
    assert arm[:-1] == amd[:-1]
    assert arm[-1] != amd[-1]
    single = project.built("one", "--to", f"oci:{tmp_path}/single")
    assert single["digest"] == built["images"][0]["digest"]


def test_an_archive_has_a_name_for_each_platform_and_shares_layers(project, tmp_path):
    built = project.built("one", "--to", f"docker-archive:{tmp_path}/a.tar:local/one:v1", *BOTH)
    assert [image["name"] for image in built["images"]] == ["local/one:v1-arm64", "local/one:v1-amd64"]
    with tarfile.open(tmp_path / "a.tar") as archive:
        entries = json.load(archive.extractfile("manifest.json"))
        names = archive.getnames()
    assert [entry["RepoTags"] for entry in entries] == [["local/one:v1-arm64"], ["local/one:v1-amd64"]]
    assert entries[0]["Layers"][:-1] == entries[1]["Layers"][:-1]
    assert sum(name.startswith("layers/") for name in names) == 4


def test_a_failure_in_the_second_platform_leaves_no_name(project, tmp_path, monkeypatch):
    send, done = platforms_stage.send, []

    def failing(*arguments):
        if done:
            raise DuopackError("the second one failed", mend="try again")
        done.append(send(*arguments))
        return done[0]

    monkeypatch.setattr(platforms_stage, "send", failing)
    for to in (f"oci:{tmp_path}/out", f"docker-archive:{tmp_path}/a.tar:x:1"):
        done.clear()
        refused(project.run("build", "one", "--to", to, *BOTH), 1, "the second one failed")
    assert not LayoutSource(tmp_path / "out").entries()
    assert not list(tmp_path.glob("*a.tar*"))
    monkeypatch.undo()


def test_platforms_that_the_base_does_not_have_are_refused_before_anything(project):
    refused(
        project.run("build", "one", "--platform", "linux/arm64,linux/riscv64"),
        2,
        "no platform 'linux/riscv64'",
    )
    refused(project.run("build", "one", "--platform", "linux/arm64,"), 2, "not a list of platforms")
    assert project.hub.requests == []


def test_all_models_in_one_image_and_their_command_lists_them(project, tmp_path):
    built = project.built("--all", "--to", f"oci:{tmp_path}/out")
    assert (built["key"], built["models"]) == ("all", ["Tiny One", "Tiny Two"])
    assert built["command"] == "/models/scripts/list.sh"
    project.content["sets"]["other"] = ["two"]
    project.write()
    asked = project.built("both", "--profile", "n2", "--to", f"oci:{tmp_path}/asked")
    assert asked["command"] == "/models/scripts/n2.sh"
    refused(project.run("build", "both", "--profile", "n3"), 2, "'both' has no profile 'n3'", "n1, nn1, n2")
    refused(project.run("build", "both", "--all"), 2, "--all and no KEY")


def test_publish_copies_the_whole_index_and_a_platform_when_asked(project, tmp_path):
    built = project.built("one", "--platform", "all")
    ran = project.run("publish", "one", "--to", f"oci:{tmp_path}/whole:v1", "--json")
    assert (ran.code, ran.json["digest"]) == (0, built["digest"]), ran.err
    source = LayoutSource(tmp_path / "whole")
    assert resolve(source, "v1", "linux/amd64").descriptor.digest == built["images"][1]["digest"]
    ran = project.run(
        "publish", "one", "--to", f"oci:{tmp_path}/one:v1", "--platform", "linux/amd64", "--json"
    )
    assert ran.json["digest"] == built["images"][1]["digest"]
    ran = project.run("publish", f"oci:{tmp_path}/whole:v1", "--to", f"docker-archive:{tmp_path}/x.tar:l/x:1")
    assert ran.code == 0, ran.err
    with tarfile.open(tmp_path / "x.tar") as archive:
        entries = json.load(archive.extractfile("manifest.json"))
    assert [entry["RepoTags"] for entry in entries] == [["l/x:1-arm64"], ["l/x:1-amd64"]]


def test_an_index_that_is_not_what_its_name_says_is_not_published(project, tmp_path):
    project.built("both", "--platform", "all", "--to", f"oci:{project.work}/one")
    refused(project.run("publish", "one", "--to", f"oci:{tmp_path}/x:v1"), 1, "io.duopack.models")
    assert not (tmp_path / "x").exists()


def test_an_export_of_several_platforms_asks_for_one(project, tmp_path):
    project.built("one", "--platform", "all")
    refused(project.run("export", "one", tmp_path / "x.tar"), 1, "several platforms", "--platform")
    ran = project.run("export", "one", tmp_path / "x.tar", "--platform", "linux/amd64", "--json")
    assert ran.code == 0, ran.err
