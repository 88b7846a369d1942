"""Running a container: what an image says of itself, which chips, what is in the way, what is written for others."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.launching import OLD_BASE, model, profile
from support.oci_memory import MemorySource

from pipeline.ascend.container import chips_in, chips_of
from pipeline.ascend.docker_line import read_docker_line
from pipeline.ascend.npu_smi import NpuSmi, parse_npu_smi
from pipeline.ascend.rules import judge_container
from pipeline.ascend.rules.container import ContainerCase
from pipeline.ascend.shell import find_commands
from pipeline.ascend.spec import (
    ContainerSpec,
    compose_document,
    container_name,
    docker_line,
    engine_arguments,
    kubernetes_documents,
)
from pipeline.cli import main
from pipeline.errors import DuopackError, UsageError
from pipeline.oci.model import OCI_CONFIG, OCI_MANIFEST
from pipeline.stages.containers import Held
from pipeline.stages.described import Described, Served, describe_registry
from pipeline.stages.launch import launch_files
from pipeline.stages.running import (
    MEMORY_EACH,
    Surroundings,
    Wish,
    choose_chips,
    holders,
    make_spec,
    obstacles,
    refuse,
    with_present_mounts,
)
from pipeline.stages.survey import Answered, strangers, survey

SMI = Path(__file__).parent / "data/npu-smi"


def smi(name: str) -> NpuSmi:
    return parse_npu_smi((SMI / f"{name}.txt").read_text())


def held(
    name: str = "vllm-ascend-qwen3.5-9b", chips: tuple[int, ...] | None = (0, 1), **changes: Any
) -> Held:
    values = {
        "image": "registry.example/qwen3.5-9b:1",
        "state": "running",
        "ports": (12320,),
        "model": "Qwen3.5-9B",
        "served": "qwen3.5-9b",
        "profile": "n9",
        "health": "healthy",
        "restarts": 0,
        "exit_code": 0,
    }
    return Held(name=name, chips=chips, **{**values, **changes})


def around(*containers: Held, npu: NpuSmi | None = None, **changes: Any) -> Surroundings:
    values = {
        "nodes": (0, 1, 2, 3),
        "npu": npu or smi("duo-25.0.rc1.1-idle"),
        "names": {one.name: one.state for one in containers},
        "ports": {port: f"container {one.name}" for one in containers if one.running for port in one.ports},
        "local": True,
        "memory": 200 << 30,
        "disk": 500 << 30,
    }
    return Surroundings(containers=containers, **{**values, **changes})


IMAGE = Described(
    "registry.example/qwen3.5-9b:1",
    "linux/arm64",
    "n9",
    (
        Served("n9", "/models/scripts/n9.sh", "qwen3.5-9b", "Qwen3.5-9B", 2, 12320),
        Served("n08", "/models/scripts/n08.sh", "Qwen3.5 0.8B", "Qwen3.5-0.8B", 1, 12321),
    ),
    size=20 << 30,
)


def spec(wish: Wish | None = None, chips: tuple[int, ...] = (2, 3), *, runtime: bool = True) -> ContainerSpec:
    runtimes = ("runc", "ascend") if runtime else ("runc",)
    return make_spec(IMAGE, wish or Wish(), chips, runtimes=runtimes, devices=Path("/dev"))


# --- What an image says ------------------------------------------------------------------------------------


def image(labels: dict[str, str]) -> MemorySource:
    source = MemorySource()
    config = {
        "os": "linux",
        "architecture": "arm64",
        "config": {"Labels": labels},
        "rootfs": {"diff_ids": []},
    }
    manifest = {
        "schemaVersion": 2,
        "config": source.add_blob(json.dumps(config).encode(), OCI_CONFIG),
        "layers": [],
    }
    source.add_manifest(manifest, "1", media_type=OCI_MANIFEST)
    return source


def test_an_image_of_ours_says_its_profiles_chips_and_ports() -> None:
    one = model(profile(port=12345))
    made = launch_files({"9b": one}, OLD_BASE, "sha256:" + "0" * 64, "n9")
    found = describe_registry(image(dict(made.labels)), "1", "r/x:1", "linux/arm64")
    assert found.profiles == (Served("n9", "/models/scripts/n9.sh", "qwen3.5-9b", "Qwen3.5-9B", 2, 12345),)
    assert (found.default, found.platform, len(found.ids)) == ("n9", "linux/arm64", 2)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"models": 1, "default": "x"}',
        '{"models": [{"title": "t", "profiles": [{"name": "a\\u001b[31m"}]}], "default": "a"}',
        json.dumps(
            {
                "default": "a",
                "models": [
                    {
                        "title": "t",
                        "profiles": [
                            {"name": "a", "script": "s", "served_name": "n", "tensor_parallel": 0, "port": 1}
                        ],
                    }
                ],
            }
        ),
    ],
)
def test_an_image_that_lies_about_itself_is_refused(text: str) -> None:
    with pytest.raises(DuopackError, match="cannot be read"):
        describe_registry(image({"io.duopack.launch": text}), "1", "r/x:1", "linux/arm64")


def test_an_image_of_others_is_refused() -> None:
    with pytest.raises(DuopackError, match="not one of duopack's"):
        describe_registry(image({}), "1", "r/x:1", "linux/arm64")
    with pytest.raises(UsageError, match="no profile 'n27'"):
        IMAGE.profile("n27")


# --- Containers' chips -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "chips"),
    [
        ("0,1", (0, 1)),
        ("0-3", (0, 1, 2, 3)),
        ("3, 0-1,1", (3, 0, 1)),
        ("", ()),
        ("all", ()),
        ("1,,2", ()),
        ("-1", ()),
    ],
)
def test_chips_in_words(text: str, chips: tuple[int, ...]) -> None:
    assert chips_in(text) == chips


def test_a_container_s_chips_are_those_of_its_devices_or_of_the_runtime_s_variable() -> None:
    devices = [
        {"PathOnHost": "/dev/davinci2"},
        {"PathOnHost": "/dev/davinci_manager"},
        {"PathOnHost": "/x/davinci3"},
    ]
    env = ["ASCEND_VISIBLE_DEVICES=0-1", "X=1"]
    assert chips_of({"HostConfig": {"Devices": devices}, "Config": {"Env": env}}) == (2, 3)
    assert chips_of({"HostConfig": {"Runtime": "ascend"}, "Config": {"Env": env}}) == (0, 1)
    assert chips_of({"HostConfig": {"Runtime": "ascend", "Devices": devices}, "Config": {"Env": []}}) == (
        2,
        3,
    )
    assert chips_of({"HostConfig": {"Privileged": True}}) is None
    assert chips_of({}) == ()


# --- Choosing chips ----------------------------------------------------------------------------------------


def test_two_chips_are_of_one_card() -> None:
    assert choose_chips(2, around()) == (0, 1)
    assert choose_chips(2, around(held(chips=(0,)))) == (2, 3)


def test_one_chip_is_taken_where_a_card_is_broken_into_already() -> None:
    assert choose_chips(1, around(held(chips=(2,)))) == (3,)


def test_where_no_card_is_whole_chips_of_two_are_taken() -> None:
    assert choose_chips(2, around(held(chips=(0,)), held("b", chips=(3,)))) == (1, 2)
    assert choose_chips(4, around()) == (0, 1, 2, 3)


def test_without_npu_smi_neighbours_are_a_card() -> None:
    assert choose_chips(2, replace(around(held(chips=(1,))), npu=None)) == (2, 3)


def test_ill_and_used_chips_are_not_taken_and_it_is_said_why() -> None:
    busy = around(npu=smi("duo-25.0.rc1.1-busy"))
    assert choose_chips(2, busy) == (2, 3)
    with pytest.raises(
        DuopackError, match=r"4 free chips are needed, and 2 of 4 are free .*process 2104391"
    ) as caught:
        choose_chips(4, busy)
    assert "duopack ps" in caught.value.mend
    ill = around(npu=smi("duo-24.1.rc2-unhealthy"), nodes=(0, 1))
    with pytest.raises(DuopackError, match="chip 1: its health is Critical"):
        choose_chips(1, ill)
    with pytest.raises(DuopackError, match="0 of 0 are free"):
        choose_chips(1, around(nodes=(), npu=None))


def test_a_stopped_container_holds_nothing_and_a_privileged_one_everything() -> None:
    assert holders(0, around(held(state="exited"))) == []
    assert holders(3, around(held(chips=None))) == ["container vllm-ascend-qwen3.5-9b"]


# --- The container -----------------------------------------------------------------------------------------


def test_the_container_is_named_after_what_it_serves_and_keeps_the_image_s_command() -> None:
    made = spec()
    assert (made.name, made.port, made.host_port, made.command) == (
        "vllm-ascend-qwen3.5-9b",
        12320,
        12320,
        (),
    )
    assert container_name("Qwen3.5 0.8B/x") == "vllm-ascend-Qwen3.5-0.8B-x"


def test_with_the_runtime_chips_are_host_ids_and_nothing_is_mapped() -> None:
    made = spec()
    assert (made.runtime, made.devices, made.mounts) == ("ascend", (), ())
    assert made.env == {"ASCEND_VISIBLE_DEVICES": "2,3"}


def test_without_the_runtime_devices_and_driver_are_mapped_and_ids_inside_are_left_alone() -> None:
    made = spec(runtime=False)
    assert ("/dev/davinci2", "/dev/davinci2") in made.devices
    assert ("/dev/hisi_hdc", "/dev/hisi_hdc") in made.devices
    assert "/usr/local/Ascend/driver/lib64" in made.mounts
    assert made.env == {}
    other = make_spec(IMAGE, Wish(), (0, 1), runtimes=(), devices=Path("/fake"))
    assert other.devices[0] == ("/fake/davinci0", "/dev/davinci0")


def test_another_profile_is_a_command_and_wants_its_own_number_of_chips() -> None:
    made = spec(Wish(profile="n08", port=9000, name="mine", memory=1 << 40, env={"PORT": "1"}), (3,))
    assert made.command == ("/models/scripts/n08.sh",)
    assert (made.port, made.host_port, made.name, made.served) == (12321, 9000, "mine", "Qwen3.5 0.8B")
    with pytest.raises(UsageError, match="n9 runs on 2 chips, and 1 is given"):
        spec(chips=(3,))


def test_mounts_that_the_host_lacks_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    made = replace(spec(), mounts=(str(tmp_path / "there"), str(tmp_path / "not")))
    kept, missing = with_present_mounts(made)
    assert kept.mounts == (str(tmp_path / "there"),)
    assert missing == (str(tmp_path / "not"),)


# --- What is in the way ------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_nothing_is_in_the_way_on_a_free_host() -> None:
    assert obstacles(replace(spec(), host_port=free_port()), around(), to_pull=20 << 30) == ()
    refuse(())


@pytest.mark.parametrize(
    ("made", "where", "said"),
    [
        ({"chips": (0, 1)}, around(held()), "chip 0: held by container vllm-ascend-qwen3.5-9b"),
        ({"chips": (0, 1)}, around(npu=smi("duo-25.0.rc1.1-busy")), "chip 1: held by process 2104392"),
        ({"chips": (4, 5)}, around(), "there is no chip 4 (this host has: 0, 1, 2, 3)"),
        ({"chips": (0, 1)}, around(npu=smi("duo-24.1.rc2-unhealthy")), "chip 1: its health is Critical"),
        ({"chips": (2, 3)}, around(npu=smi("duo-24.1.rc2-unhealthy")), "chip 2: npu-smi does not show it"),
        ({}, around(held(state="exited", chips=())), "taken by a container that is exited (docker rm"),
        ({"host_port": 12320}, around(held("other", chips=())), "port 12320 is published by container other"),
        ({"memory": 1 << 30}, around(), "exit code 137"),
        ({}, around(memory=1 << 30), "of host memory are free"),
        ({}, around(disk=1 << 30), "the image is 20 GiB"),
    ],
)
def test_what_is_in_the_way_is_told_with_who_holds_it(
    made: dict[str, Any], where: Surroundings, said: str
) -> None:
    asked = replace(spec(), **{"host_port": free_port(), **made})
    found = obstacles(asked, where, to_pull=IMAGE.size)
    assert said in " | ".join(found)
    with pytest.raises(DuopackError, match="--chips"):
        refuse(found)


def test_all_of_it_is_told_at_once() -> None:
    asked = replace(spec(chips=(0, 1)), memory=MEMORY_EACH)
    assert len(obstacles(asked, around(held(), memory=1), to_pull=1 << 50)) == 7


def test_a_port_that_a_process_listens_on_is_busy() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        asked = replace(spec(), host_port=listener.getsockname()[1])
        assert "in use by a process" in " ".join(obstacles(asked, around()))
        far = replace(around(), local=False, nodes=None, npu=None, memory=None, disk=None)
        assert obstacles(asked, far) == ()


# --- What is written for others ----------------------------------------------------------------------------

FULL = spec(Wish(profile="n08", memory=250 << 30, env={"VLLM_API_KEY": "it's $HOME"}), (3,), runtime=False)


@pytest.mark.parametrize("made", [spec(), spec(runtime=False), FULL])
def test_the_printed_command_is_what_the_engine_is_told(made: ContainerSpec) -> None:
    (command,) = find_commands(docker_line(made).text(literal=True), where="t")
    again = read_docker_line(command.words)
    told = engine_arguments(made)
    assert again.image == told["image"]
    assert list(again.command) == (told["command"] or [])
    assert again.env == told["environment"]
    assert again.value("--name") == told["name"]
    assert again.value("--shm-size") == told["shm_size"]
    assert again.ports == ((str(made.host_port), str(made.port)),)
    assert again.chips == (made.chips if made.devices else ())
    assert len(again.values("--mount")) == len(told["mounts"]) == len(made.mounts)
    assert judge_container(ContainerCase(again), "0.20.2rc1") == ()


def test_the_compose_file_has_the_same() -> None:
    (service,) = compose_document(FULL)["services"].values()
    assert service["container_name"] == FULL.name
    assert service["environment"] == {"VLLM_API_KEY": "it's $$HOME"}
    assert service["devices"][0] == "/dev/davinci3:/dev/davinci3"
    assert service["command"] == ["/models/scripts/n08.sh"]


@pytest.mark.parametrize("made", [spec(), spec(runtime=False), FULL])
def test_docker_compose_takes_the_file(made: ContainerSpec, tmp_path: Path) -> None:
    if not shutil.which("docker-compose"):
        pytest.skip("docker-compose is not installed")
    file = tmp_path / "compose.yaml"
    file.write_text(yaml.safe_dump(compose_document(made)))
    done = subprocess.run(
        ["docker-compose", "-f", file, "config"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (service,) = yaml.safe_load(done.stdout)["services"].values()
    assert service["image"] == made.image
    assert service.get("runtime") == made.runtime
    if made.env:
        # Read back, its file has the dollar doubled again.
        assert {name: value.replace("$$", "$") for name, value in service["environment"].items()} == made.env


@pytest.mark.parametrize("made", [spec(), FULL])
def test_kubernetes_takes_the_objects(made: ContainerSpec) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    deployment, service = kubernetes_documents(made)
    for document in (deployment, service):
        validate.validate(json.loads(json.dumps(document)), "1.29", strict=True)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["huawei.com/Ascend310P"] == str(made.ranks)
    assert pod["nodeSelector"]["kubernetes.io/arch"] == "arm64"
    assert pod["volumes"][0]["emptyDir"]["sizeLimit"] == "10Gi"
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]


def test_kubernetes_names_are_names_there() -> None:
    deployment, service = kubernetes_documents(replace(FULL, name="Vllm_ascend.Q" + "x" * 80))
    assert deployment["metadata"]["name"] == service["metadata"]["name"] == ("vllm-ascend-q" + "x" * 80)[:63]


# --- What runs where ---------------------------------------------------------------------------------------


def warnings(*containers: Held, answers: dict[str, Answered] | None = None, npu: NpuSmi | None = None) -> str:
    return " | ".join(survey(containers, answers or {}, npu)[0].warnings)


def test_a_container_that_is_as_it_should_be_has_no_warning() -> None:
    answer = {"vllm-ascend-qwen3.5-9b": Answered("qwen3.5-9b", "/models/Qwen3.5-9B")}
    (row,) = survey([held()], answer, smi("duo-25.0.rc1.1-busy"))
    assert (row.warnings, row.model, row.answers) == ((), "Qwen3.5-9B", True)


def test_a_name_and_a_model_that_disagree_are_told() -> None:
    """The guide's chapter 8.3: a container vllm-ascend-qwen3 that ran the 27B."""
    hand_made = held("vllm-ascend-qwen3", served="", model="", profile="", health="")
    answer = {"vllm-ascend-qwen3": Answered("qwen3.5-27b", "/models/qwen3.5-27B-w8a8")}
    (row,) = survey([hand_made], answer, None)
    assert (row.model, row.served) == ("qwen3.5-27B-w8a8", "qwen3.5-27b")
    assert "it is called vllm-ascend-qwen3 and serves qwen3.5-27b" in row.warnings[0]


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (held(state="exited", exit_code=137), "exit code 137: out of host memory?"),
        (held(state="exited", exit_code=1), "ended with exit code 1 ("),
        (held(state="restarting", restarts=7), "started again 7 times"),
        (held(health="starting", restarts=2), "started again 2 times"),
        (held(health="unhealthy"), "does not answer its health check"),
    ],
)
def test_what_is_wrong_with_a_container_is_told(one: Held, said: str) -> None:
    assert said in warnings(one)


def test_shared_and_ill_chips_and_another_served_name_are_told() -> None:
    assert "shares chips with b" in warnings(held(), held("b", chips=(1,)))
    assert "shares chips with b" in warnings(held(), held("b", chips=None))
    assert "shares" not in warnings(held(), held("b", chips=(1,), state="exited"))
    assert "shares" not in warnings(held(), held("b", chips=(2,)))
    assert "chip 1: its health is Critical" in warnings(held(), npu=smi("duo-24.1.rc2-unhealthy"))
    answer = {"vllm-ascend-qwen3.5-9b": Answered("other-9b", "")}
    assert "its image serves qwen3.5-9b, and it answers as other-9b" in warnings(held(), answers=answer)


def test_processes_in_no_container_are_told() -> None:
    lines = strangers([], smi("duo-25.0.rc1.1-busy"))
    assert lines[0].startswith("chip 0 is used by process 2104391 (VLLM::Worker_TP), 2104302 (python3)")
    assert strangers([held()], smi("duo-25.0.rc1.1-busy")) == ()
    assert strangers([], None) == ()


# --- The command -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("oci:build/9b",),
        ("r.example/x:1", "--chips", "two"),
        ("r.example/x:1", "--chips", "2,2"),
        ("r.example/x:1", "--port", "70000"),
        ("r.example/x:1", "--name", "a b"),
        ("r.example/x:1", "--memory", "lots"),
        ("r.example/x:1", "--memory", "0"),
        ("r.example/x:1", "--restart", "sometimes"),
        ("r.example/x:1", "--env", "NOVALUE"),
        ("r.example/x:1", "--env", "A=b\nc"),
        ("BAD//name",),
    ],
)
def test_wrong_use_is_told(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *arguments]) == 2
    assert "To mend" in capsys.readouterr().err


def test_no_engine_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    assert main(["run", "r.example/x:1", "--work", str(tmp_path)]) == 1
    assert "no docker engine answers" in capsys.readouterr().err
    assert main(["ps"]) == 1
