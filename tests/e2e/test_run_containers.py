"""`duopack run` and `ps` on a real engine and registry: chips that are nodes without a card, npu-smi a script."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from support.engine import running_engine
from support.registry import RegistryServer
from support.runnable_base import PLATFORM, make_runnable_base

from pipeline.cli import main
from pipeline.oci.image import Healthcheck, Layer, load_base
from pipeline.oci.layout import LayoutSource
from pipeline.oci.places import open_sink
from pipeline.oci.reference import parse_reference
from pipeline.oci.tar import TarEntry, TarLayer
from pipeline.oci.transfer import write_image

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("dockerd"), reason="needs root and dockerd"),
]
SMI = Path(__file__).parents[1] / "unit/data/npu-smi"
SERVE = "#!/bin/bash\nexec vllm serve /models/{model} --served-model-name {served} --port {port}\n"
HEALTH = "#!/bin/bash\n[[ -e /tmp/ill ]] && exit 1\nexit 0\n"


def launch(ranks: int, port: int) -> dict:
    def profile(name: str, served: str, chips: int) -> dict:
        return {
            "name": name,
            "script": f"/models/scripts/{name}.sh",
            "served_name": served,
            "tensor_parallel": chips,
            "port": port,
        }

    models = [
        {"title": "Qwen3.5-9B", "profiles": [profile("n9", "qwen3.5-9b", ranks)]},
        {"title": "Qwen3.5-0.8B", "profiles": [profile("n08", "qwen3.5-0.8b", 1)]},
    ]
    return {"version": 1, "default": "n9", "models": models}


@dataclass
class Host:
    """An engine, a registry with an image of ours, four fake chips and an npu-smi that prints a capture."""

    directory: Path
    registry: RegistryServer

    @property
    def image(self) -> str:
        return f"{self.registry.host}/llm/qwen3.5-9b:1"

    def push(self, *, ranks: int = 2, port: int = 12320, tag: str = "1") -> None:
        make_runnable_base(self.directory / "base", "t")
        base = load_base(LayoutSource(self.directory / "base"), "t", PLATFORM)
        scripts = {
            "n9": SERVE.format(model="Qwen3.5-9B", served="qwen3.5-9b", port=port),
            "n08": SERVE.format(model="Qwen3.5-0.8B", served="qwen3.5-0.8b", port=port),
            "healthcheck": HEALTH,
        }
        entries = [
            TarEntry(f"models/scripts/{name}.sh", 0o755, text.encode()) for name, text in scripts.items()
        ]
        labels = {
            "io.duopack.default-profile": "n9",
            "io.duopack.served-name": "qwen3.5-9b",
            "io.duopack.launch": json.dumps(launch(ranks, port)),
        }
        image = base.with_layers([Layer.of(TarLayer(entries))]).with_config(
            cmd=["/models/scripts/n9.sh"],
            labels=labels,
            healthcheck=Healthcheck(("CMD", "/models/scripts/healthcheck.sh"), start_period=1),
        )
        write_image(image, open_sink(parse_reference(f"docker://{self.image.removesuffix(':1')}:{tag}")))

    def npu_smi(self, capture: str) -> None:
        program = self.directory / "bin/npu-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\nexec cat {SMI}/{capture}.txt\n")
        program.chmod(0o755)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_engine(tmp_path_factory.mktemp("engine"), network=True) as address:
        yield address


@pytest.fixture
def host(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    devices = tmp_path / "dev"
    devices.mkdir()
    for name in ("davinci0", "davinci1", "davinci2", "davinci3", "davinci_manager", "hisi_hdc", "devmm_svm"):
        # The numbers of /dev/null: a node that an engine takes for a device.
        os.mknod(devices / name, 0o20666, os.makedev(1, 3))
    with RegistryServer(tmp_path / "registry") as registry:
        made = Host(tmp_path, registry)
        made.npu_smi("duo-25.0.rc1.1-idle")
        made.push()
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setenv("DUOPACK_DEVICE_DIR", str(devices))
        monkeypatch.setenv("DUOPACK_WORK", str(tmp_path / "build"))
        monkeypatch.setenv("DOCKER_HOST", address)
        yield made
        for name in docker("ps", "-aq").split():
            docker("rm", "-f", "-v", name)
        for name in docker("images", "-q").split():
            subprocess.run(["docker", "rmi", "-f", name], capture_output=True, check=False)


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def inspect(name: str) -> dict:
    (found,) = json.loads(docker("inspect", name))
    return found


def ps(capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    capsys.readouterr()
    assert main(["ps", "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)["containers"]}


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.3)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


NAME = "vllm-ascend-qwen3.5-9b"


def test_an_image_is_pulled_started_and_answers(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert main(["run", host.image, "--chips", "2,3", "--port", port, "--memory", "16"]) == 0
    assert (
        f"{NAME}: Qwen3.5-9B as qwen3.5-9b on chips 2, 3, http://127.0.0.1:{port}" in capsys.readouterr().out
    )
    found = inspect(NAME)
    assert found["HostConfig"]["Runtime"] == "ascend"
    assert "ASCEND_VISIBLE_DEVICES=2,3" in found["Config"]["Env"]
    assert found["HostConfig"]["ShmSize"] == 10 << 30
    assert found["HostConfig"]["Memory"] == 16 << 30
    assert found["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped"
    assert found["Config"]["Cmd"] == ["/models/scripts/n9.sh"]
    until(lambda: ps(capsys)[NAME]["answers"])
    until(lambda: ps(capsys)[NAME]["health"] == "healthy")
    row = ps(capsys)[NAME]
    assert (row["model"], row["served"], row["chips"]) == ("Qwen3.5-9B", "qwen3.5-9b", [2, 3])
    assert (row["ports"], row["state"], row["warnings"]) == ([int(port)], "running", [])


def test_two_containers_cannot_have_one_chip_one_port_or_one_name(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    assert main(["run", host.image, "--chips", "0,1", "--port", port]) == 0
    capsys.readouterr()
    assert main(["run", host.image, "--chips", "1,2", "--port", port]) == 1
    said = capsys.readouterr().err
    assert f"chip 1: held by container {NAME}" in said
    assert f"port {port} is published by container {NAME}" in said
    assert f"the name {NAME} is taken by a container that is running" in said
    assert len(docker("ps", "-aq").split()) == 1
    assert main(["run", host.image, "--chips", "auto", "--port", free_port(), "--name", "qwen3.5-9b-b"]) == 0
    assert ps(capsys)["qwen3.5-9b-b"]["chips"] == [2, 3]
    assert main(["run", host.image, "--port", free_port(), "--name", "third"]) == 1
    assert "2 free chips are needed, and 0 of 4 are free" in capsys.readouterr().err


def test_two_runs_at_the_same_time_do_not_take_the_same_chips(host: Host) -> None:
    command = [sys.executable, "-m", "pipeline", "run", host.image, "--chips", "auto"]
    processes = [
        subprocess.Popen(
            [*command, "--port", free_port(), "--name", f"qwen3.5-9b-{number}", "--json"],
            stdout=subprocess.PIPE,
        )
        for number in range(2)
    ]
    specs = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert sorted(chip for spec in specs for chip in spec["chips"]) == [0, 1, 2, 3]


def test_a_port_of_another_process_and_ill_chips_are_refused(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    host.npu_smi("duo-24.1.rc2-unhealthy")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert main(["run", host.image, "--chips", "0,1", "--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert "chip 1: its health is Critical" in said
    assert f"port {port} is in use by a process" in said
    assert docker("ps", "-aq") == ""
    assert docker("images", "-q") == "", "nothing is pulled for a container that cannot start"


def test_without_the_runtime_devices_are_mapped(
    host: Host, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.serving.container.runtimes", lambda client: ("runc",))
    assert main(["run", host.image, "--chips", "0,3", "--port", free_port()]) == 0
    assert "not mounted, since this host does not have them" in capsys.readouterr().err
    nodes = docker("exec", NAME, "find", "/dev", "-name", "davinci*").split()
    assert sorted(nodes) == ["/dev/davinci0", "/dev/davinci3", "/dev/davinci_manager"]
    assert ps(capsys)[NAME]["chips"] == [0, 3]
    assert not Path("/usr/local/dcmi").exists(), "docker made a directory of a mount that is not there"


def test_another_profile_of_the_image_is_what_ps_shows(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", host.image, "--profile", "n08", "--port", free_port()]) == 0
    row = ps(capsys)["vllm-ascend-qwen3.5-0.8b"]
    assert (row["model"], row["served"], row["chips"]) == ("Qwen3.5-0.8B", "qwen3.5-0.8b", [0])
    assert inspect("vllm-ascend-qwen3.5-0.8b")["Config"]["Cmd"] == ["/models/scripts/n08.sh"]


def test_a_new_image_under_the_same_tag_is_pulled(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", host.image, "--port", free_port()]) == 0
    docker("rm", "-f", NAME)
    host.push(port=12399)
    assert main(["run", host.image, "--port", free_port()]) == 0
    assert list(inspect(NAME)["HostConfig"]["PortBindings"]) == ["12399/tcp"]
    docker("rm", "-f", NAME)
    host.registry.stop()
    assert main(["run", host.image, "--port", free_port()]) == 0
    assert "the engine's own image is taken" in capsys.readouterr().err


def test_ps_after_a_crash_and_of_a_container_that_somebody_made(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    crash = ["--env", "VLLM_CRASHES=1", "--restart", "no"]
    assert main(["run", host.image, "--chips", "0,1", "--port", port, *crash]) == 0
    until(lambda: ps(capsys)[NAME]["state"] == "exited")
    assert "ended with exit code 3" in ps(capsys)[NAME]["warnings"][0]
    # Its chips are free again; its name is not.
    assert main(["run", host.image, "--chips", "0,1", "--port", free_port()]) == 1
    assert "that is exited (docker rm" in capsys.readouterr().err
    by_hand = [
        "run",
        "-d",
        "--name",
        "vllm-ascend-qwen3",
        "--runtime=ascend",
        "-e",
        "ASCEND_VISIBLE_DEVICES=0-1",
    ]
    serve = [
        "vllm",
        "serve",
        "/models/qwen3.5-27B-w8a8",
        "--served-model-name",
        "qwen3.5-27b",
        "--port",
        "80",
    ]
    docker(*by_hand, "-p", f"127.0.0.1:{free_port()}:80", "--label", "io.duopack.launch=", host.image, *serve)
    until(lambda: ps(capsys)["vllm-ascend-qwen3"]["answers"])
    row = ps(capsys)["vllm-ascend-qwen3"]
    assert (row["served"], row["model"]) == ("qwen3.5-27b", "qwen3.5-27B-w8a8")
    assert any("it is called vllm-ascend-qwen3 and serves qwen3.5-27b" in text for text in row["warnings"])


def test_processes_on_chips_are_seen_by_run_and_ps(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.npu_smi("duo-25.0.rc1.1-busy")
    assert main(["ps"]) == 0
    assert "chip 0 is used by process 2104391 (VLLM::Worker_TP)" in capsys.readouterr().out
    assert main(["run", host.image, "--chips", "0,1", "--port", free_port()]) == 1
    assert "held by process 2104391" in capsys.readouterr().err
    assert main(["run", host.image, "--chips", "auto", "--port", free_port()]) == 0
    assert ps(capsys)[NAME]["chips"] == [2, 3]


def test_what_is_printed_and_written_starts_the_same_container(
    host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, objects = tmp_path / "compose.yaml", tmp_path / "k8s.yaml"
    asked = ["run", host.image, "--chips", "0,1", "--port", free_port(), "--platform", PLATFORM]
    assert main([*asked, "--print", "--compose", str(file), "--k8s", str(objects)]) == 0
    assert docker("images", "-q") == "", "nothing is pulled"
    printed = capsys.readouterr().out
    subprocess.run(["bash", "-c", printed], check=True, capture_output=True)
    by_print = inspect(NAME)
    docker("rm", "-f", NAME)
    assert main([arg for arg in asked if arg not in {"--platform", PLATFORM}]) == 0
    by_run = inspect(NAME)
    for key in ("Runtime", "Devices", "ShmSize", "PortBindings", "RestartPolicy", "Binds"):
        same = [one["HostConfig"][key] or None for one in (by_print, by_run)]
        assert key == "PortBindings" or same[0] == same[1], key
    assert set(by_print["Config"]["Env"]) == set(by_run["Config"]["Env"])
    docker("rm", "-f", NAME)
    deployment, service = yaml.safe_load_all(objects.read_text())
    (pod,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "env" not in pod, "the device plugin chooses the chips"
    assert service["kind"] == "Service"
    if shutil.which("docker-compose"):
        config = subprocess.run(
            ["docker-compose", "-f", file, "config"], capture_output=True, text=True, check=False
        )
        assert config.returncode == 0, config.stderr


def test_a_printed_command_makes_no_directories_of_mounts_that_are_missing(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not Path("/usr/local/dcmi").exists()
    asked = ["run", host.image, "--chips", "0,1", "--port", free_port(), "--platform", PLATFORM]
    assert main([*asked, "--no-runtime", "--print"]) == 0
    done = subprocess.run(
        ["bash", "-c", capsys.readouterr().out], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "bind source path does not exist" in done.stderr
    assert not Path("/usr/local/dcmi").exists()


def test_doctor_sees_the_engine_and_its_containers(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", host.image, "--chips", "0,1", "--port", free_port()]) == 0
    capsys.readouterr()
    main(["doctor", "--offline", "--json", "--catalog", str(Path(__file__).parents[2] / "models.yaml"), "9b"])
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)["checks"]}
    assert (
        rows["docker"]["verdict"] == rows["runtime"]["verdict"] == rows["device-nodes"]["verdict"] == "pass"
    )
    assert rows["chips-free"]["found"] == f"free: 2, 3; chip 0: container {NAME}; chip 1: container {NAME}"
    assert rows["disk"]["verdict"] == "pass"
