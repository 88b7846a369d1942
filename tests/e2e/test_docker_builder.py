"""Both builders make the same image: every path, mode and byte, and every setting that docker lets us choose."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine import running_engine
from support.hub import FaultyHub
from support.project import Project, make_models, open_project, refused
from support.registry import RegistryServer

from pipeline.oci.image import Image, Layer
from pipeline.oci.layout import LayoutSink
from pipeline.oci.places import open_sink
from pipeline.oci.reference import parse_reference
from pipeline.oci.tar import TarEntry, TarLayer
from pipeline.oci.transfer import write_image

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("dockerd"), reason="needs root and dockerd"),
]

ARCH = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
PLATFORM = f"linux/{ARCH}"
BUILDERS = ("docker", "docker-classic")
# Docker writes these itself: ids of the steps before, and fields that OCI's config does not have.
DOCKERS_OWN = {"Image", "ArgsEscaped", "Hostname", "Domainname", "User", "AttachStdin", "AttachStdout", "AttachStderr",
               "Tty", "OpenStdin", "StdinOnce", "Volumes", "OnBuild"}  # fmt: skip
EMPTY = (None, "", False, [], {})


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_engine(tmp_path_factory.mktemp("engine")) as address:
        yield address


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RegistryServer]:
    with RegistryServer(tmp_path / "registry") as server:
        yield server


def base_image() -> Image:
    """Static busybox with an entrypoint, variables and labels, and a /models of its own mode."""
    busybox = Path(shutil.which("busybox") or pytest.skip("busybox-static is not installed")).read_bytes()
    image = Image.scratch(PLATFORM)
    settings = {
        "Entrypoint": ["/entry.sh"],
        "Cmd": ["/bin/sh"],
        "Env": ["PATH=/bin", "SOC_VERSION=ascend310p1"],
        "Labels": {"of.the": "base"},
        "WorkingDir": "/workspace",
        "ExposedPorts": {"22/tcp": {}},
    }
    layer = TarLayer(
        [TarEntry("bin/sh", 0o755, busybox), TarEntry("entry.sh", 0o755, b'#!/bin/sh\nexec "$@"\n'),
         TarEntry("workspace/.keep", 0o644, b"")]
    )  # fmt: skip
    return Image({**image.config, "config": settings}).with_layers([Layer(layer)])


@pytest.fixture
def project(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    make_models(tmp_path / "hub")
    # Names that a shell or a Dockerfile could take for something else.
    (tmp_path / "hub" / "tiny" / "one" / 'a name with $HOME, "quotes" and 中文.json').write_text("{}")
    with FaultyHub(tmp_path / "hub") as hub:
        project = open_project(tmp_path, hub, monkeypatch)
        project.content["models"]["one"]["title"] = 'Tiny "One" $PATH \\ 一'
        project.write()
        write_image(base_image(), LayoutSink(tmp_path / "busybox", "1"))
        monkeypatch.setenv("DOCKER_HOST", engine)
        yield project
    monkeypatch.setenv("DOCKER_HOST", engine)
    forget_images()


def forget_images() -> None:
    docker("image", "prune", "-af")


def docker(*arguments: str) -> str:
    result = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def tree(name: str) -> dict[str, tuple[str, str, str]]:
    """Type, mode and sha256 of everything in an image, as the engine unpacks it."""
    container = docker("create", "--entrypoint", "/bin/sh", name).split()[0]
    try:
        data = subprocess.run(["docker", "export", container], capture_output=True, check=True).stdout
    finally:
        docker("rm", container)
    found = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for one in archive:
            content = archive.extractfile(one).read() if one.isfile() else b""  # type: ignore[union-attr]
            owner = f"{one.uid}:{one.gid}"
            found[one.name] = (f"{one.type!r} {owner}", oct(one.mode), hashlib.sha256(content).hexdigest())
    return found


def settings(name: str) -> dict[str, Any]:
    config = json.loads(docker("inspect", name))[0]["Config"]
    config["Env"] = sorted(config["Env"])
    return {key: value for key, value in config.items() if key not in DOCKERS_OWN and value not in EMPTY}


def build(project: Project, key: str, to: str, base: str, *arguments: str) -> dict[str, Any]:
    return project.built(key, "--to", to, "--base", base, "--platform", PLATFORM, *arguments)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("key", ["one", "both"])
def test_both_builders_make_the_same_tree_and_the_same_settings(
    project: Project, tmp_path: Path, builder: str, key: str
) -> None:
    base = f"oci:{tmp_path}/busybox:1"
    ours = build(project, key, "docker-daemon:ours:1", base)
    theirs = build(project, key, "docker-daemon:theirs:1", base, "--builder", builder)
    assert tree("ours:1") == tree("theirs:1")
    assert settings("ours:1") == settings("theirs:1")
    assert settings("ours:1")["Healthcheck"]["StartPeriod"] == 1_800_000_000_000
    [found] = json.loads(docker("inspect", "theirs:1"))
    assert theirs["digest"] == found["Id"]
    # One layer for each of ours, and none that touches a file again.
    assert len(found["RootFS"]["Layers"]) == ours["layers"] == theirs["layers"]
    assert json.loads(docker("inspect", "theirs:1"))[0]["Architecture"] == ARCH


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_base_in_a_registry_is_pulled_by_digest_and_the_image_is_pushed(
    project: Project, registry: RegistryServer, builder: str
) -> None:
    base = f"{registry.host}/base/vllm:1"
    pushed = write_image(base_image(), open_sink(parse_reference(base)))
    to = f"{registry.host}/llm/one:{builder}"
    dry = project.run("build", "one", "--to", f"docker://{to}", "--base", base, "--platform", PLATFORM,
                      "--builder", builder, "--dry-run")  # fmt: skip
    assert f"FROM {registry.host}/base/vllm@{pushed.digest}\n" in dry.out
    built = build(project, "one", f"docker://{to}", base, "--builder", builder)
    forget_images()
    docker("pull", f"{registry.host}/llm/one@{built['digest']}")
    ours = build(project, "one", "docker-daemon:ours:1", base)
    assert tree("ours:1") == tree(f"{registry.host}/llm/one@{built['digest']}")
    assert ours["layers"] == built["layers"]
    # What docker has made stands up to a look inside: its layers are compressed.
    ran = project.run("verify", f"docker://{to}", "--deep", "--json")
    [report] = ran.json["images"]
    assert report["sound"], report["findings"]


def test_hadolint_has_nothing_to_say(project: Project, tmp_path: Path) -> None:
    ran = project.run(
        "build", "both", "--to", "docker-daemon:x:1", "--base", f"oci:{tmp_path}/busybox:1", "--platform", PLATFORM,
        "--builder", "docker", "--dry-run",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    (tmp_path / "Dockerfile").write_text(ran.out)
    lint = Path(sys.executable).with_name("hadolint")
    if not lint.exists():
        pytest.skip("hadolint is not installed")
    done = subprocess.run([lint, tmp_path / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("builder", BUILDERS)
def test_weights_that_change_meanwhile_end_the_build_and_leave_no_image(
    project: Project, tmp_path: Path, builder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.stages import docker_builder

    make = docker_builder.make_dockerfile

    def changed(*arguments: Any) -> Any:
        weights = next((project.work / "_work" / "models" / "one").glob("*.safetensors"))
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
        return make(*arguments)

    monkeypatch.setattr(docker_builder, "make_dockerfile", changed)
    ran = project.run(
        "build", "one", "--to", "docker-daemon:broken:1", "--base", f"oci:{tmp_path}/busybox:1",
        "--platform", PLATFORM, "--builder", builder,
    )  # fmt: skip
    refused(ran, 1, "sha256")
    assert docker("images", "-q", "broken") == ""


def test_wrong_use_and_a_missing_engine_are_told(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ("--base", f"oci:{tmp_path}/busybox:1", "--platform", PLATFORM, "--builder", "docker")
    refused(project.run("build", "one", "--to", f"oci:{tmp_path}/x", *base), 2, "duopack export")
    several = ("--platform", "all", "--builder", "docker", "--to", "docker-daemon:x:1")
    refused(project.run("build", "one", *several), 2, "one platform at a time")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    refused(
        project.run("build", "one", "--to", "docker-daemon:x:1", *base), 1, "no engine answers", "DOCKER_HOST"
    )


@pytest.mark.parametrize("buildkit", ["0", "1"])
def test_the_dockerfile_for_people_makes_a_running_image(
    project: Project, tmp_path: Path, buildkit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(project, "one", "docker-daemon:ours:1", f"oci:{tmp_path}/busybox:1")
    write_image(base_image(), open_sink(parse_reference("docker-daemon:base:1")))
    context = tmp_path / "context"
    shutil.copytree(project.weights(), context / "weights")
    assert project.run("scripts", "one", "--to", context / "scripts").code == 0
    given = {"BASE": "base:1", "DIRECTORY": "Tiny-One", "SCRIPT": "n1", "PORT": "12320"}
    arguments = [word for name, value in given.items() for word in ("--build-arg", f"{name}={value}")]
    text = Path(__file__).parents[2] / "dockerfiles" / "Dockerfile"
    monkeypatch.setenv("DOCKER_BUILDKIT", buildkit)
    # Newer clients have BuildKit only with buildx beside them; Debian's needs none.
    client = shutil.which("docker", path="/usr/bin") or "docker"
    command = [client, "build", "-q", "-f", text, "-t", "mine:1", *arguments, context]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "buildx" in done.stderr:
        pytest.skip("this docker client has no BuildKit")
    assert done.returncode == 0, done.stderr
    ours, mine = tree("ours:1"), tree("mine:1")
    # launch.json names the base by digest in ours, and here nothing is locked.
    assert {path for path in ours if ours[path] != mine.get(path)} == {"models/launch.json"}
    assert set(mine) - set(ours) == {"models/scripts/default.sh"}
    assert mine["models/scripts/default.sh"] == mine["models/scripts/n1.sh"]
    own = {"Labels", "Cmd"}
    assert {key: value for key, value in settings("mine:1").items() if key not in own} == {
        key: value for key, value in settings("ours:1").items() if key not in own
    }
    lint = Path(sys.executable).with_name("hadolint")
    if lint.exists():
        subprocess.run([lint, text], check=True)
