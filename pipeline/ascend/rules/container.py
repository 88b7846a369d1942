"""A `docker run` that somebody wrote: chips, logs, names, ports and memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pipeline.ascend.container import HOST_IDS, MANAGERS, RUNTIME, SHM_SIZE
from pipeline.ascend.docker_line import DockerLine
from pipeline.ascend.rules.rule import Rule, Severity, when
from pipeline.ascend.serve_line import ServeLine

LOGICAL = "ASCEND_RT_VISIBLE_DEVICES"
UPSTREAM: Final = re.compile(r"(^|/)ascend/vllm-ascend(:|@|$)")
_SHELLS = {"bash", "sh", "/bin/bash", "/bin/sh"}
_SOURCE = "ascend-docker-runtime's and CANN's pages on containers"


@dataclass(frozen=True)
class ContainerCase:
    """A container, what is started in it where that is known, and the other containers of the same text."""

    docker: DockerLine
    serve: ServeLine | None = None
    others: Sequence[DockerLine] = ()

    @property
    def runtime(self) -> bool:
        return self.docker.value("--runtime") == RUNTIME

    @property
    def served(self) -> str:
        return (self.serve and self.serve.value("--served-model-name")) or ""


def names_agree(container: str, served: str) -> bool:
    """Whether a container's name says what it serves: it ends with the served name, or has it between separators."""
    plain, wanted = (
        re.sub(r"[^a-z0-9.]+", "-", container.lower()),
        re.sub(r"[^a-z0-9.]+", "-", served.lower()),
    )
    return bool(re.search(rf"(^|-){re.escape(wanted)}(-|$)", plain))


def _wrong_name(case: ContainerCase) -> str | None:
    name = case.docker.value("--name")
    return when(
        name and case.served and not names_agree(name, case.served), f"{name}, and it serves {case.served}"
    )


def _renamed(case: ContainerCase) -> DockerLine:
    safe = re.sub(r"[^a-zA-Z0-9_.-]+", "-", case.served)
    return case.docker.without("--name").with_option("--name", f"vllm-ascend-{safe}")


def _host_ids(case: ContainerCase) -> str | None:
    value = case.docker.env.get(LOGICAL)
    count = len(case.docker.chips) or len(re.findall(r"\d+", case.docker.env.get(HOST_IDS, "")))
    ids = [int(number) for number in re.findall(r"\d+", value or "")]
    return when(ids and count and max(ids) >= count, f"{value} in a container of {count} chips")


def _meant_chips(case: ContainerCase) -> DockerLine:
    """Who writes 2,3 there means the host's chips 2 and 3: these are mapped instead."""
    meant = tuple(dict.fromkeys(re.findall(r"\d+", case.docker.env.get(LOGICAL, ""))))
    docker = case.docker.without_env(LOGICAL)
    if len(meant) != len(docker.chips):
        return docker
    return docker.with_chips(tuple(int(number) for number in meant))


def _hidden_by_runtime(case: ContainerCase) -> str | None:
    return when(case.runtime and HOST_IDS not in case.docker.env)


def _with_host_ids(case: ContainerCase) -> DockerLine:
    if not case.docker.chips:
        return case.docker
    return case.docker.with_option("--env", f"{HOST_IDS}={','.join(map(str, case.docker.chips))}")


def _no_chips(case: ContainerCase) -> str | None:
    docker = case.docker
    return when(not (case.runtime or docker.chips or docker.has("--privileged")))


def _managers(case: ContainerCase) -> str | None:
    mapped = " ".join(case.docker.values("--device"))
    missing = [name for name in MANAGERS if name not in mapped]
    return when(
        case.docker.chips and missing and not (case.runtime or case.docker.has("--privileged")),
        ", ".join(missing),
    )


def _with_managers(case: ContainerCase) -> DockerLine:
    docker = case.docker
    for name in MANAGERS:
        if name not in " ".join(docker.values("--device")):
            docker = docker.with_option("--device", f"/dev/{name}")
    return docker


def _driver(case: ContainerCase) -> str | None:
    mounted = any(
        "/Ascend/driver" in text for text in (*case.docker.values("--volume"), *case.docker.values("--mount"))
    )
    return when(case.docker.chips and not case.runtime and not mounted)


def _count(case: ContainerCase) -> str | None:
    if not case.serve:
        return None
    ranks = case.serve.number("--tensor-parallel-size") or 1
    count = len(case.docker.chips)
    return when(count and count < ranks, f"{count} chip{'s' if count > 1 else ''} for TP {ranks}")


def _shared_chip(case: ContainerCase) -> str | None:
    theirs = {chip for other in case.others for chip in other.chips}
    both = sorted(theirs & set(case.docker.chips))
    return when(both, ", ".join(map(str, both)))


def _shared_port(case: ContainerCase) -> str | None:
    theirs = {host for other in case.others for host, _ in other.ports if host}
    both = sorted(theirs & {host for host, _ in case.docker.ports})
    return when(both, ", ".join(both))


def _port(case: ContainerCase) -> str | None:
    port = case.serve.number("--port") if case.serve else None
    inside = {inner for _, inner in case.docker.ports}
    return when(
        port is not None and inside and str(port) not in inside and not any("-" in one for one in inside),
        f"{port}, and {', '.join(sorted(inside))} is published",
    )


def _base_alone(case: ContainerCase) -> str | None:
    mounted = [text.split(":")[1] for text in case.docker.values("--volume") if ":" in text]
    holds = any(target.rstrip("/") not in {"/models/scripts"} and "model" in target for target in mounted)
    return when(UPSTREAM.search(case.docker.image) and not holds, case.docker.image)


def _shm(case: ContainerCase) -> str | None:
    docker = case.docker
    return when(not docker.has("--shm-size") and docker.value("--ipc") != "host")


RULES: tuple[Rule[ContainerCase], ...] = (
    Rule(
        "container-logical-ids",
        Severity.ERROR,
        f"-e {LOGICAL}",
        _host_ids,
        f"{LOGICAL}={{}}: ids inside count from 0, and the server ends with 'input data rang[0-2)'",
        "leave it unset, and choose the chips by --device or ASCEND_VISIBLE_DEVICES",
        _SOURCE,
        fix=_meant_chips,
    ),
    Rule(
        "container-no-chips",
        Severity.ERROR,
        "--device, --runtime",
        _no_chips,
        "no chip is given to the container: npu-smi is empty there, and the server does not start",
        "map /dev/davinciN and the three manager nodes, or use --runtime=ascend",
        _SOURCE,
    ),
    Rule(
        "container-managers",
        Severity.ERROR,
        "--device",
        _managers,
        "{} not mapped: no chip works without these nodes",
        "map them too",
        _SOURCE,
        fix=_with_managers,
    ),
    Rule(
        "container-driver",
        Severity.ERROR,
        "-v, --runtime",
        _driver,
        "chips are mapped by hand and the driver is not: its libraries and npu-smi are missing inside",
        "use --runtime=ascend, or mount the driver's lib64 and version.info, /usr/local/dcmi and npu-smi read-only",
        _SOURCE,
    ),
    Rule(
        "container-runtime-choice",
        Severity.WARNING,
        f"--runtime=ascend, -e {HOST_IDS}",
        _hidden_by_runtime,
        f"--runtime=ascend chooses chips by {HOST_IDS} (host ids), which is not set",
        f"give -e {HOST_IDS}=2,3 with the host's ids",
        _SOURCE,
        fix=_with_host_ids,
    ),
    Rule(
        "container-chip-count",
        Severity.ERROR,
        "--device, --tensor-parallel-size",
        _count,
        "{}: each rank needs a chip of its own",
        "map as many chips as the tensor-parallel size",
        _SOURCE,
    ),
    Rule(
        "container-chip-shared",
        Severity.ERROR,
        "--device of two containers",
        _shared_chip,
        "chip {} is given to another container here too: the second one gets -8005 and no chip",
        "give each container chips of its own",
        "the deployment guide, chapter 3.2; npu-smi's -8005",
    ),
    Rule(
        "container-port-shared",
        Severity.ERROR,
        "-p of two containers",
        _shared_port,
        "host port {} is published by another container here too: the second one does not start",
        "use another host port",
        "the deployment guide, chapter 8.5",
    ),
    Rule(
        "container-port",
        Severity.ERROR,
        "-p, --port",
        _port,
        "the server listens on {}: nobody reaches it",
        "publish the server's own port: -p HOST:PORT",
        "docker's port mapping",
    ),
    Rule(
        "container-shell",
        Severity.WARNING,
        "the command",
        lambda case: when(
            case.docker.command and case.docker.command[0] in _SHELLS and len(case.docker.command) == 1
        ),
        "the container's command is a shell and the server is started by hand: docker logs stays empty, and exit"
        " code, restart policy and health check say nothing of the server",
        "let the start script be the command: leave it out with an image of duopack, or name the script",
        _SOURCE,
        fix=lambda case: case.docker if UPSTREAM.search(case.docker.image) else case.docker.with_command(),
    ),
    Rule(
        "container-base-alone",
        Severity.ERROR,
        "the image",
        _base_alone,
        "{} holds no models and no start scripts: an image of that name which does was made by hand",
        "run an image that duopack built, or mount a directory of models",
        "upstream's Dockerfile for 310P",
    ),
    Rule(
        "container-name",
        Severity.WARNING,
        "--name, --served-model-name",
        _wrong_name,
        "the container is called {}: people will send requests to the wrong model",
        "name it after what it serves, e.g. vllm-ascend-qwen3.5-9b",
        "the deployment guide, chapter 8.3",
        fix=_renamed,
    ),
    Rule(
        "container-shm",
        Severity.WARNING,
        "--shm-size",
        _shm,
        "no --shm-size: docker's 64 MiB is little for the ranks' shared memory",
        f"give --shm-size={SHM_SIZE}",
        "upstream's commands for 310P",
        fix=lambda case: case.docker.with_option("--shm-size", SHM_SIZE),
    ),
    Rule(
        "container-privileged",
        Severity.WARNING,
        "--privileged",
        lambda case: when(case.docker.has("--privileged")),
        "--privileged shows every chip of the host, also those of other containers",
        "map the chips that it shall have",
        _SOURCE,
        fix=lambda case: case.docker.without("--privileged"),
    ),
    Rule(
        "container-restart",
        Severity.NOTE,
        "--restart",
        lambda case: when(
            case.docker.has("--detach") and not case.docker.has("--restart") and not case.docker.has("--rm")
        ),
        "no restart policy: after a crash or a reboot nothing is served",
        "give --restart=unless-stopped",
        "docker's restart policies",
        fix=lambda case: case.docker.with_option("--restart", "unless-stopped"),
    ),
)
