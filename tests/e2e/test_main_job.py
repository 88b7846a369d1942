"""The main job against real servers: hub, build, registry, engine, container; whatever is killed on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.engine import running_engine
from support.fake_registry import FakeRegistry
from support.hub import FaultyHub, client_environment, isolate_clients
from support.project import PROFILE, Project, catalog, duopack, refused
from support.registry import RegistryServer
from support.runnable_base import PLATFORM, make_runnable_base, write_weights
from support.slow import SlowLine

from pipeline.demo.model import make_qwen3
from pipeline.files import sha256_file
from pipeline.oci.layout import LayoutSource

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("dockerd"), reason="needs root and dockerd"),
]

MIB = 1 << 20
WEIGHTS = 65 * MIB
LOGIN = ("user", "secret", "$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a")
SIZE = 2 * WEIGHTS


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub's directory: one model with two files that each get a layer of their own."""
    root = tmp_path_factory.mktemp("weights")
    make_qwen3(root / "tiny" / "one")
    write_weights(root / "tiny" / "one", 2, WEIGHTS)
    return root


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_engine(tmp_path_factory.mktemp("engine"), network=True) as address:
        yield address


@pytest.fixture
def engine(address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DOCKER_HOST", address)
    return address


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RegistryServer]:
    with RegistryServer(tmp_path / "registry") as server:
        yield server


@pytest.fixture
def project(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    with FaultyHub(weights) as hub:
        isolate_clients(monkeypatch, hub.url, tmp_path / "home")
        make_runnable_base(tmp_path / "base", "demo")
        make_runnable_base(tmp_path / "base", "crashing", VLLM_CRASHES="1")
        yield Project(tmp_path, hub, one_model())


def one_model() -> dict:
    content = catalog()
    del content["models"]["two"], content["sets"]
    content["default_platform"] = PLATFORM
    content["bases"]["stand-in"]["platforms"] = [PLATFORM]
    # One port per process that runs these tests at a time: inside the container it is always this one.
    content["models"]["one"]["profiles"] = {"n1": {**PROFILE, "cudagraph_mode": "NONE"}}
    return content


def shell(*command: str | Path, **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def expected(project: Project) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in project.weights().iterdir()}


def inside(image: str) -> dict[str, str]:
    """The sha256 of every file of the model as a process in the container reads it."""
    lines = shell(
        "docker", "run", "--rm", image, "sh", "-c", "cd /models/Tiny-One && find . -type f | xargs sha256sum"
    )
    return {name.removeprefix("./"): digest for digest, name in (line.split() for line in lines.splitlines())}


@contextmanager
def started(project: Project, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`duopack build one …` as a process of its own."""
    environ = {**os.environ, **client_environment(project.hub.url, project.directory / "home")}
    places = ("--catalog", project.directory / "models.yaml", "--work", project.work)
    process = subprocess.Popen(
        duopack("build", "one", *arguments, *places, "--json"),
        env={**environ, "DUOPACK_PARALLEL": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], number: signal.Signals) -> None:
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 130), err
    assert "Traceback" not in err
    if number == signal.SIGINT:
        assert "interrupted" in json.loads(out)["error"]["what"]


def test_build_push_pull_and_run_give_the_hubs_bytes(project, registry, engine):
    to = f"docker://{registry.host}/team/tiny:1"
    built = project.built("one", "--to", to)
    assert built["layers"] == 5
    assert built["sent"] == built["size"]
    pinned = f"{registry.host}/team/tiny@{built['digest']}"
    shell("docker", "pull", "--quiet", pinned)
    assert inside(pinned) == expected(project)
    (config,) = json.loads(shell("docker", "inspect", pinned))
    assert config["Config"]["Cmd"] == ["/models/scripts/n1.sh"]
    assert config["Config"]["Entrypoint"] == ["/entry.sh"]
    assert config["Config"]["ExposedPorts"] == {"12320/tcp": {}}
    assert config["Config"]["Healthcheck"]["Test"] == ["CMD", "/models/scripts/healthcheck.sh"]
    shown = shell("docker", "run", "--rm", "-e", "DUOPACK_DRY_RUN=1", pinned)
    assert shown.startswith("vllm serve /models/Tiny-One --served-model-name tiny-one")
    assert "n1.sh" in shell("docker", "run", "--rm", pinned, "list.sh")
    again = project.built("one", "--to", to)
    assert (again["sent"], again["digest"]) == (0, built["digest"])
    project.profile()["max_model_len"] = 2048
    project.write()
    changed = project.built("one", "--to", to)
    assert changed["layers_sent"] == 1
    assert changed["sent"] < MIB
    shell("docker", "rmi", "--force", pinned)


def test_an_archive_and_a_direct_load_give_one_image(project, engine, tmp_path):
    archive = project.built("one", "--to", f"docker-archive:{tmp_path}/a.tar:from-archive:1")
    shell("docker", "load", "--quiet", "--input", tmp_path / "a.tar")
    direct = project.built("one", "--to", "docker-daemon:direct:1")
    assert archive["digest"] == direct["digest"]
    # What the engine got from the archive a moment ago is not sent to it again.
    assert direct["sent"] == 0
    ids = [shell("docker", "inspect", "--format", "{{.Id}}", name) for name in ("from-archive:1", "direct:1")]
    assert ids[0] == ids[1]
    assert inside("direct:1") == expected(project)
    shell("docker", "rmi", "--force", "from-archive:1", "direct:1")


def test_skopeo_and_umoci_read_the_layout(project, tmp_path):
    built = project.built("one")
    layout = f"oci:{project.work}/one:latest"
    seen = json.loads(shell("skopeo", "inspect", layout))
    assert seen["Digest"] == built["digest"]
    assert len(seen["Layers"]) == built["layers"]
    assert seen["Labels"]["io.duopack.models"] == "one"
    # Left to itself skopeo compresses what it copies into a layout.
    kept = ("--preserve-digests", "--dest-oci-accept-uncompressed-layers")
    shell("skopeo", "copy", "--quiet", *kept, layout, f"oci:{tmp_path}/copy:x")
    assert LayoutSource(tmp_path / "copy").manifest("x")[0].digest == built["digest"]
    shell("umoci", "unpack", "--rootless", "--image", f"{tmp_path}/copy:x", tmp_path / "bundle")
    model = tmp_path / "bundle" / "rootfs" / "models" / "Tiny-One"
    assert {path.name: sha256_file(path) for path in model.iterdir()} == expected(project)


def test_a_release_is_mounted_from_staging_and_nothing_is_sent(project, registry, monkeypatch):
    monkeypatch.setenv("DUOPACK_REGISTRY", f"{registry.host}/staging")
    built = project.built("one")
    with SlowLine(registry.host) as line:
        monkeypatch.setenv("DUOPACK_REGISTRY", f"{line.host}/release")
        ran = project.run("publish", "one", "--from-registry", f"{line.host}/staging", "--json")
        assert ran.code == 0, ran.err
        assert line.sent < 100_000
    assert (ran.json["digest"], ran.json["layers_sent"], ran.json["sent"]) == (built["digest"], 0, 0)
    seen = shell(
        "skopeo", "inspect", "--tls-verify=false", f"docker://{registry.host}/release/tiny-one:stand-in-n1"
    )
    assert json.loads(seen)["Digest"] == built["digest"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_download_that_was_killed_goes_on_where_it_was(project, number):
    project.hub.faults.slow = 0.004
    with started(project) as process:
        end = time.monotonic() + 60
        while sum(project.hub.bytes_sent.values()) < WEIGHTS // 2 and time.monotonic() < end:
            time.sleep(0.01)
        ended(process, number)
    assert not (project.work / "one" / "index.json").exists()
    project.hub.faults.slow = 0.0
    project.hub.forget()
    built = project.built("one")
    assert sum(project.hub.bytes_sent.values()) < SIZE - WEIGHTS // 4
    assert built["sent"] == built["size"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_push_that_was_killed_sends_only_what_is_missing(project, registry, number):
    to = f"docker://{registry.host}/team/tiny:1"
    with SlowLine(registry.host, rate=60 * MIB) as line:
        slow = f"docker://{line.host}/team/tiny:1"
        with started(project, "--to", slow) as process:
            line.wait(WEIGHTS + WEIGHTS // 3)
            ended(process, number)
        tags = subprocess.run(
            ["skopeo", "list-tags", "--tls-verify=false", to.removesuffix(":1")],
            capture_output=True,
            check=False,
        )
        assert b'"1"' not in tags.stdout
        line.rate, line.sent = 0, 0
        built = project.built("one", "--to", slow)
        assert line.sent < SIZE - WEIGHTS // 2
    assert built["sent"] < SIZE - WEIGHTS // 2
    seen = shell("skopeo", "inspect", "--tls-verify=false", to)
    assert json.loads(seen)["Digest"] == built["digest"]


def test_a_registry_that_is_down_wants_a_login_or_takes_no_large_body(project, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.oci.registry.patience.Patience.wait", give_up)
    with RegistryServer(tmp_path / "r", login=LOGIN) as server:
        ran = project.run("build", "one", "--to", f"docker://{server.host}/team/tiny:1")
        refused(ran, 1, "needs a login", "docker login")
        host = server.host
    refused(project.run("build", "one", "--to", f"docker://{host}/team/tiny:1"), 1, host)
    assert project.hub.bytes_sent == {}
    with FakeRegistry(largest_body=1 * MIB) as proxy:
        ran = project.run("build", "one", "--to", f"docker://{proxy.host}/team/tiny:1")
        refused(ran, 1, "too large", "client_max_body_size")
        assert proxy.manifests == {}


def give_up(_: object, failures: int, error: Exception) -> None:
    if failures > 1:
        raise error


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs that has room for the model and not for its image."""
    disk = tmp_path / "disk"
    disk.mkdir()
    shell("mount", "-t", "tmpfs", "-o", f"size={SIZE + 40 * MIB}", "none", disk)
    try:
        yield disk
    finally:
        shell("umount", disk)


def test_a_disk_that_is_too_small_is_told_before_the_download(project, small_disk):
    ran = project.run("build", "one", work=small_disk)
    refused(ran, 1, "short", str(small_disk))
    assert project.hub.bytes_sent == {}
    assert project.run("build", "one", "--to", f"oci:{project.directory}/out", work=small_disk).code == 0
    ran = project.run("build", "one", "--to", f"docker-archive:{small_disk}/a.tar:x:1", work=small_disk)
    refused(ran, 1, "short")
    assert not (small_disk / "a.tar").exists()


def test_a_disk_that_fills_up_during_the_work_loses_nothing(project, small_disk):
    project.hub.faults.slow = 0.003
    environ = {**os.environ, **client_environment(project.hub.url, project.directory / "home")}
    places = ("--catalog", project.directory / "models.yaml", "--work", small_disk)
    to = ("--to", f"oci:{project.directory}/out")
    command = duopack("build", "one", *to, *places)
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        end = time.monotonic() + 60
        while sum(project.hub.bytes_sent.values()) < WEIGHTS // 2 and time.monotonic() < end:
            time.sleep(0.01)
        fill(small_disk / "somebody-elses")
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 1, err
    assert "Traceback" not in err
    assert "o space left" in err
    assert not (project.directory / "out").exists()
    (small_disk / "somebody-elses").unlink()
    project.hub.faults.slow = 0.0
    project.hub.forget()
    ran = project.run("build", "one", *to, work=small_disk)
    assert ran.code == 0, ran.err
    assert sum(project.hub.bytes_sent.values()) < SIZE


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(MIB)):
                pass
        except OSError:
            pass


def test_smoke_starts_the_image_asks_it_and_removes_it(project, engine):
    project.built("one", "--to", "docker-daemon:smoked:1")
    ran = project.run("smoke", "one", "--image", "smoked:1", "--chips", "0", "--json")
    assert ran.code == 0, ran.err
    assert {check["verdict"] for check in ran.json["checks"]} == {"pass"}
    assert "starting smoked:1 as smoke-tiny-one on chips 0" in ran.err
    assert shell("docker", "ps", "--all", "--quiet") == ""


def test_smoke_pulls_what_the_engine_does_not_have(project, registry, engine, monkeypatch):
    monkeypatch.setenv("DUOPACK_REGISTRY", f"{registry.host}/team")
    project.built("one")
    ran = project.run("smoke", "one", "--chips", "0")
    assert ran.code == 0, ran.err + ran.out
    assert f"does not have {registry.host}/team/tiny-one:stand-in-n1: pulling it" in ran.err
    ran = project.run("smoke", "one", "--chips", "0", "--image", f"{registry.host}/team/none:1")
    refused(ran, 1, "none:1", "publish it first")


def test_a_container_that_dies_at_once_is_told_with_the_end_of_its_log_and_removed(project, engine):
    base = f"oci:{project.directory}/base:crashing"
    project.built("one", "--base", base, "--to", "docker-daemon:crashing:1")
    ran = project.run("smoke", "one", "--image", "crashing:1", "--chips", "0", "--json")
    assert ran.code == 1
    assert "exit code 3" in ran.error
    assert "RuntimeError: NPU out of memory" in ran.error
    assert shell("docker", "ps", "--all", "--quiet") == ""


def test_a_container_that_a_killed_run_left_is_removed_and_a_strangers_is_not(project, engine):
    project.built("one", "--to", "docker-daemon:left:1")
    owner = f"io.duopack.started-by={project.work.absolute()}/_work"
    shell("docker", "run", "--detach", "--name", "smoke-tiny-one", "--label", owner, "left:1", "sleep", "600")
    ran = project.run("smoke", "one", "--image", "left:1", "--chips", "0")
    assert ran.code == 0, ran.err
    assert "which a run that was killed left behind" in ran.err
    shell("docker", "run", "--detach", "--name", "smoke-tiny-one", "left:1", "sleep", "600")
    try:
        ran = project.run("smoke", "one", "--image", "left:1", "--chips", "0")
        refused(ran, 1, "another container has this name", "docker rm -f smoke-tiny-one")
        assert "smoke-tiny-one" in shell("docker", "ps")
    finally:
        shell("docker", "rm", "--force", "smoke-tiny-one")


def test_a_server_that_is_never_ready_is_given_up_and_removed(project, engine):
    project.profile()["env"] = {"VLLM_CRASHES": ""}
    project.built("one", "--to", "docker-daemon:slow:1")
    script = "#!/bin/bash\nsleep 600\n"
    shell("docker", "create", "--name", "edit", "slow:1")
    path = project.directory / "n1.sh"
    path.write_text(script)
    path.chmod(0o755)
    shell("docker", "cp", str(path), "edit:/models/scripts/n1.sh")
    shell("docker", "commit", "edit", "never-ready:1")
    shell("docker", "rm", "edit")
    ran = project.run("smoke", "one", "--image", "never-ready:1", "--chips", "0", "--start-limit", "0.05")
    refused(ran, 1, "not ready after 0.05 minutes", "logged nothing")
    assert shell("docker", "ps", "--all", "--quiet") == ""
