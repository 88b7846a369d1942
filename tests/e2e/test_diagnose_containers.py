"""`duopack diagnose CONTAINER` on a real engine: containers that print a server's log and end in their own way."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.models.containers import Container
from support.engine import running_engine

from pipeline.cli import main

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("dockerd") or not Path("/bin/busybox").exists(),
        reason="needs root, dockerd and a static busybox",
    ),
]
LOGS = Path(__file__).parents[1] / "unit/data/logs"
IMAGE = "server:t"


def busybox_image(client: docker.DockerClient) -> None:
    """An image of busybox and the logs."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.add(Path("/bin/busybox").resolve(), "bin/busybox")
        for applet in ("sh", "cat", "sleep", "kill", "head", "tail"):
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
        for name in ("tmp", "dev"):
            directory = tarfile.TarInfo(name)
            directory.type, directory.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(directory)
        tar.add(LOGS, "logs")
    client.api.import_image_from_data(data.getvalue(), repository="server", tag="t")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_engine(tmp_path_factory.mktemp("engine")) as address:
        client = docker.DockerClient(base_url=address)
        busybox_image(client)
        client.close()
        yield address


@pytest.fixture
def engine(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[docker.DockerClient]:
    monkeypatch.setenv("DOCKER_HOST", address)
    client = docker.DockerClient(base_url=address)
    yield client
    client.close()


def started(engine: docker.DockerClient, name: str, script: str, **more: Any) -> Container:
    return engine.containers.run(IMAGE, ["/bin/sh", "-c", script], name=name, detach=True, **more)


def told(capsys: pytest.CaptureFixture[str], name: str) -> tuple[int, dict[str, Any]]:
    code = main(["diagnose", name, "--json"])
    return code, json.loads(capsys.readouterr().out)


def ids(value: dict[str, Any]) -> list[str]:
    return [row["id"] for row in value["causes"]]


@pytest.mark.parametrize("tty", [False, True])
def test_a_container_that_died_of_a_known_cause(
    engine: docker.DockerClient, capsys: pytest.CaptureFixture[str], tty: bool
) -> None:
    name = f"mamba-{tty}"
    started(engine, name, "cat /logs/mamba-align.log; exit 1", tty=tty).wait()
    code, value = told(capsys, name)
    assert (code, ids(value), value["state"]) == (1, ["mamba-on-transformer"], "dead")
    assert value["causes"][0]["process"] == "Worker"
    assert value["options"]["mamba_cache_mode"] == "align"


def test_a_container_that_serves(engine: docker.DockerClient, capsys: pytest.CaptureFixture[str]) -> None:
    container = started(engine, "well", "head -n 60 /logs/healthy.log; sleep 600", init=True)
    time.sleep(1)
    code, value = told(capsys, "well")
    assert (code, value["state"], value["causes"]) == (0, "serving", [])
    container.remove(force=True)


def test_a_container_that_was_killed(engine: docker.DockerClient, capsys: pytest.CaptureFixture[str]) -> None:
    container = started(engine, "killed", "head -n 30 /logs/healthy.log; sleep 600")
    time.sleep(1)
    container.kill()
    container.wait()
    code, value = told(capsys, "killed")
    assert (code, ids(value)) == (1, ["container-killed"])


def test_a_container_over_its_memory_limit(
    engine: docker.DockerClient, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        # tail keeps what has no line's end in memory.
        script = "head -n 20 /logs/healthy.log; tail -c 900m /dev/zero"
        container = started(
            engine, "greedy", f"{script} & wait $!; exit $?", mem_limit="24m", memswap_limit="24m"
        )
        container.wait(timeout=60)
    except docker.errors.APIError as error:
        pytest.skip(f"this host cannot limit memory: {error}")
    container.reload()
    if not container.attrs["State"]["OOMKilled"]:
        pytest.skip("this host's engine does not see that the kernel killed for memory")
    code, value = told(capsys, "greedy")
    assert (code, ids(value)) == (1, ["container-memory"])


def test_a_shell_in_place_of_a_server(
    engine: docker.DockerClient, capsys: pytest.CaptureFixture[str]
) -> None:
    container = engine.containers.run(
        IMAGE, ["/bin/sh"], name="shell", detach=True, tty=True, stdin_open=True
    )
    code, value = told(capsys, "shell")
    assert (code, ids(value)) == (1, ["container-shell"])
    container.remove(force=True)


def test_a_container_that_restarts(engine: docker.DockerClient, capsys: pytest.CaptureFixture[str]) -> None:
    policy = {"Name": "on-failure", "MaximumRetryCount": 2}
    container = started(engine, "again", "cat /logs/truncated.log; exit 1", restart_policy=policy)
    end = time.monotonic() + 60
    while container.attrs["RestartCount"] < 2 or container.status != "exited":
        assert time.monotonic() < end
        time.sleep(0.5)
        container.reload()
    code, value = told(capsys, "again")
    assert (code, ids(value), value["runs"]) == (1, ["weights-cut"], 3)
    assert value["earlier"] == ["weights-cut", "weights-cut"]
    assert [row["id"] for row in value["notes"]] == ["container-restarts"]


def test_a_command_that_is_not_there(engine: docker.DockerClient, capsys: pytest.CaptureFixture[str]) -> None:
    engine.containers.create(IMAGE, ["/models/scripts/n9.sh"], name="absent")
    with pytest.raises(docker.errors.APIError):
        engine.containers.get("absent").start()
    code, value = told(capsys, "absent")
    assert (code, ids(value)) == (1, ["container-command"])


def test_no_such_container(engine: docker.DockerClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "nobody"]) == 1
    assert "no such file, and no such container" in capsys.readouterr().err
