"""A base made from a (small, made-up) checkout in a real engine, locked, and built upon."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine import running_engine
from support.hub import FaultyHub
from support.project import Project, make_models, open_project, refused
from support.registry import RegistryServer

from pipeline.demo.base import make_base
from pipeline.oci.digest import Digest
from pipeline.oci.places import open_sink, open_source
from pipeline.oci.reference import parse_reference
from pipeline.oci.transfer import copy_image

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("dockerd"), reason="needs root and dockerd"),
]

PLATFORM = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}[os.uname().machine]
DOCKERFILE = """\
FROM scratch
ARG VLLM_TAG=v0.23.0
COPY busybox /bin/sh
COPY busybox /bin/bash
COPY plugin /vllm-workspace/vllm-ascend/plugin
RUN echo installing "$VLLM_TAG" && echo "$VLLM_TAG" >/version
ENV SOC_VERSION=ascend310p1 PATH=/bin
ENTRYPOINT ["/bin/sh", "-c", "exec \\"$@\\"", "--"]
CMD ["/bin/bash"]
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_engine(tmp_path_factory.mktemp("engine")) as address:
        yield address


@pytest.fixture
def project(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    make_models(tmp_path / "hub")
    with FaultyHub(tmp_path / "hub") as hub:
        monkeypatch.setenv("DOCKER_HOST", engine)
        yield open_project(tmp_path, hub, monkeypatch)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    directory = tmp_path / "vllm-ascend"
    directory.mkdir()
    shutil.copy(
        shutil.which("busybox") or pytest.skip("busybox-static is not installed"), directory / "busybox"
    )
    (directory / "plugin").write_text("the plugin")
    (directory / "secret").write_text("not for the engine")
    (directory / ".dockerignore").write_text("# what stays here\nsecret\n")
    (directory / "Dockerfile.310p.openEuler").write_text(DOCKERFILE)
    git = ["git", "-C", str(directory), "-c", "user.name=t", "-c", "user.email=t@t.example"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"], ["tag", "v0.23.0rc1"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    return directory


@pytest.mark.parametrize("builder", ["docker", "docker-classic"])
def test_a_base_is_built_locked_and_built_upon(project: Project, checkout: Path, builder: str) -> None:
    layout = project.work / "bases" / "mine"
    make = ("--source", checkout, "--name", "mine", "--platform", PLATFORM, "--builder", builder,
            "--network", "none")  # fmt: skip
    ran = project.run("bases", "build", *make, "--json")
    assert ran.code == 0, ran.err
    made = ran.json
    assert made["known"] == {"vllm": "0.23.0", "vllm_ascend": "0.23.0rc1"}
    assert (made["image"], made["locked"]) == ("oci:build/bases/mine:latest", False)
    assert "installing v0.23.0" in ran.err
    project.content["bases"]["mine"] = {
        "images": [made["image"]], "platforms": [PLATFORM], "vllm": "0.23.0", "vllm_ascend": "0.23.0rc1",
    }  # fmt: skip
    project.write()
    ran = project.run("bases", "build", *make, "--json")
    assert (ran.code, ran.json["locked"]) == (0, True)
    locked = json.loads(project.lock.read_bytes())["bases"]["mine"]
    assert locked["platforms"] == {PLATFORM: ran.json["digest"]}
    assert open_source(parse_reference(f"oci:{layout}")).manifest("latest")[0].digest == ran.json["digest"]
    built = project.built("one", "--base", "mine", "--platform", PLATFORM, "--to", "docker-daemon:one:1")
    assert built["base"].endswith(ran.json["digest"])
    said = subprocess.run(
        ["docker", "run", "--rm", "--network", "none", "one:1", "/bin/sh", "-c",
         "cat /version; ls /models; cat /vllm-workspace/vllm-ascend/plugin; ls /secret"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "v0.23.0\n" in said.stdout
    assert "Tiny-One" in said.stdout
    assert "the plugin" in said.stdout
    # Both builders are given a base that is in no registry by loading it.
    theirs = project.built(
        "one", "--base", "mine", "--platform", PLATFORM, "--to", "docker-daemon:two:1", "--builder", builder
    )
    assert theirs["layers"] == built["layers"]


@pytest.mark.parametrize("builder", ["docker", "docker-classic"])
def test_a_build_that_fails_shows_the_end_of_its_log(project: Project, checkout: Path, builder: str) -> None:
    file = checkout / "Dockerfile.310p.openEuler"
    file.write_text(DOCKERFILE.replace("RUN echo installing", "RUN echo this goes wrong && exit 3 && echo"))
    ran = project.run("bases", "build", "--source", checkout, "--platform", PLATFORM, "--builder", builder,
                      "--network", "none")  # fmt: skip
    refused(ran, 1, "did not build the image", "\n  this goes wrong")
    assert not (project.work / "bases" / "local").exists()


def test_a_build_argument_reaches_the_dockerfile(project: Project, checkout: Path) -> None:
    ran = project.run(
        "bases",
        "build",
        "--source",
        checkout,
        "--platform",
        PLATFORM,
        "--build-arg",
        "VLLM_TAG=v9.9.9",
        "--network",
        "none",
    )
    assert ran.code == 0, ran.err
    assert "installing v9.9.9" in ran.err
    assert "Use it as it is: duopack build KEY --base oci:build/bases/local:latest@sha256:" in ran.out


def test_mirrors_must_agree_and_their_tags_are_listed(project: Project, tmp_path: Path) -> None:
    make_base(tmp_path / "other", "demo", "linux/arm64")
    with RegistryServer(tmp_path / "a") as first, RegistryServer(tmp_path / "b") as second:
        names = [f"{server.host}/ascend/vllm-ascend:v1-310p-openeuler" for server in (first, second)]
        for name in names:
            source = open_source(parse_reference(f"oci:{project.directory}/base:arm64"))
            copy_image(source, "arm64", None, open_sink(parse_reference(name)))
        base = {**project.content["bases"]["stand-in"], "images": names, "platforms": ["linux/arm64"]}
        project.content["bases"] = {"stand-in": base}
        project.write()
        assert project.run("lock").code == 0
        [shown] = project.run("bases", "--tags", "--json").json
        assert shown["tags"] == ["v1-310p-openeuler"]
        assert Digest(shown["digests"]["linux/arm64"])
        first.stop()
        ran = project.run("bases", "--tags")
        assert ran.code == 0
        assert f"{second.host}/ascend/vllm-ascend: 1 tags for 310P, 0 others" in ran.out
        assert "warning" in ran.err
