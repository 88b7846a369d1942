"""Runs an image of ours on chosen chips: the container for it, what would be in its way, and its start."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.ascend.container import container_options, visible_chips
from pipeline.ascend.host import run as run_program
from pipeline.ascend.npu_smi import NpuSmi, parse_npu_smi
from pipeline.ascend.spec import ContainerSpec, container_name, engine_arguments
from pipeline.errors import DuopackError, UsageError, quoted
from pipeline.files import human_size
from pipeline.serving.container import engine_errors
from pipeline.stages.containers import Held
from pipeline.stages.described import Described

if TYPE_CHECKING:
    from docker import DockerClient

MEMORY_EACH = 8 << 30
"""Estimate: bytes of host memory that a rank needs while it loads; less ends with exit code 137."""


@dataclass(frozen=True)
class Wish:
    """What the user asks for. `chips` empty means: choose; `memory` is in bytes."""

    profile: str | None = None
    chips: tuple[int, ...] = ()
    port: int | None = None
    name: str | None = None
    memory: int | None = None
    restart: str = "unless-stopped"
    env: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Surroundings:
    """The host as far as it matters to a container: chips by their nodes, npu-smi's view, containers, free space.

    None where it cannot be known, as of an engine on another machine.
    """

    nodes: tuple[int, ...] | None
    npu: NpuSmi | None
    containers: Sequence[Held]
    names: Mapping[str, str]
    """Every container's state by its name, also of those without chips."""
    ports: Mapping[int, str]
    """Who publishes a host port."""
    local: bool
    memory: int | None = None
    disk: int | None = None


# --- The host ----------------------------------------------------------------------------------------------


def look_around(client: DockerClient, containers: Sequence[Held], devices: Path) -> Surroundings:
    """The engine's host; of another machine only what its engine tells."""
    with engine_errors("asking the engine"):
        info = client.info()
        everything = client.containers.list(all=True, ignore_removed=True)
    names = {str(one.name): str(one.status) for one in everything}
    ports = {port: held for one in everything for port, held in _published(one)}
    if not is_local(client):
        return Surroundings(None, None, containers, names, ports, local=False)
    capture = run_program(("npu-smi", "info"))
    try:
        npu = parse_npu_smi(capture.text)
    except DuopackError:
        npu = None
    return Surroundings(
        nodes=visible_chips(devices),
        npu=npu if npu and npu.chips else None,
        containers=containers,
        names=names,
        ports=ports,
        local=True,
        memory=_available_memory(),
        disk=_free(Path(str(info.get("DockerRootDir") or "/var/lib/docker"))),
    )


def _published(container: Any) -> Iterator[tuple[int, str]]:
    if container.status not in {"running", "restarting", "paused"}:
        return
    for bindings in ((container.attrs.get("HostConfig") or {}).get("PortBindings") or {}).values():
        for one in bindings or ():
            if str(one.get("HostPort", "")).isdigit():
                yield int(one["HostPort"]), f"container {container.name}"


def is_local(client: DockerClient) -> bool:
    """Whether the engine is this machine's: it is reached by a socket in the file system."""
    return str(client.api.base_url).startswith(("http+docker://", "unix://"))


def _available_memory() -> int | None:
    try:
        found = re.search(r"(?m)^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return int(found[1]) << 10 if found else None


def _free(root: Path) -> int | None:
    try:
        status = os.statvfs(root)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


# --- Chips -------------------------------------------------------------------------------------------------


def holders(chip: int, around: Surroundings) -> list[str]:
    """Who has a chip now: containers that run, and processes of none of them."""
    found = [f"container {one.name}" for one in around.containers if one.running and one.has(chip)]
    seen = around.npu.chip(chip) if around.npu else None
    if not found and seen and around.npu:
        found = [f"process {one.pid} ({quoted(one.name)})" for one in around.npu.on(seen)]
    return found


def choose_chips(needed: int, around: Surroundings) -> tuple[int, ...]:
    """Free, healthy chips: of one card where a card has as many, and of the card that fits best.

    Raises DuopackError with who holds what when there are not enough.
    """
    chips = around.nodes if around.nodes is not None else ()
    free = [chip for chip in chips if not holders(chip, around) and _healthy(chip, around)]
    if len(free) < needed:
        held = "; ".join(f"chip {chip}: {why}" for chip in chips if (why := _why_not(chip, around)))
        raise DuopackError(
            f"{needed} free chip{'s are' if needed > 1 else ' is'} needed, and {len(free)} of {len(chips)} "
            f"{'is' if len(free) == 1 else 'are'} free" + (f" ({held})" if held else ""),
            where="--chips auto",
            mend="stop what holds them ('duopack ps' lists it), or use a profile of a smaller TP",
        )
    cards: dict[int, list[int]] = {}
    for chip in free:
        cards.setdefault(_card(chip, around), []).append(chip)
    fitting = [held for held in cards.values() if len(held) >= needed]
    if fitting:
        return tuple(min(fitting, key=len)[:needed])
    # Whole cards first: a rank's neighbour is then on the same card.
    ordered = sorted(cards.values(), key=len, reverse=True)
    return tuple(sorted([chip for held in ordered for chip in held][:needed]))


def _card(chip: int, around: Surroundings) -> int:
    """The card of a chip; without npu-smi two neighbours are taken for one card, as the driver counts a Duo's."""
    seen = around.npu.chip(chip) if around.npu else None
    return seen.card if seen else -1 - chip // 2


def _healthy(chip: int, around: Surroundings) -> bool:
    seen = around.npu.chip(chip) if around.npu else None
    return around.npu is None or (seen is not None and seen.healthy)


def _why_not(chip: int, around: Surroundings) -> str:
    held = holders(chip, around)
    seen = around.npu.chip(chip) if around.npu else None
    if held:
        return f"held by {', '.join(held)}"
    if around.npu and seen is None:
        return "npu-smi does not show it"
    return f"its health is {quoted(seen.health)}" if seen and not seen.healthy else ""


# --- The container -----------------------------------------------------------------------------------------


def make_spec(
    image: Described, wish: Wish, chips: tuple[int, ...], *, runtimes: Sequence[str], devices: Path
) -> ContainerSpec:
    """The container for a wish. Raises UsageError when the chips are not as many as the profile's ranks."""
    served = image.profile(wish.profile)
    if chips and len(chips) != served.ranks:
        raise UsageError(
            f"{served.profile} runs on {served.ranks} chip{'s' if served.ranks > 1 else ''}, and {len(chips)} "
            f"{'are' if len(chips) > 1 else 'is'} given",
            where="--chips",
            mend=f"give {served.ranks}, or choose another profile with --profile",
        )
    options = container_options(chips, runtimes=runtimes, devices=devices)
    return ContainerSpec(
        name=wish.name or container_name(served.served),
        image=image.name,
        served=served.served,
        model=served.model,
        profile=served.profile,
        ranks=served.ranks,
        architecture=image.platform.split("/")[1],
        port=served.port,
        host_port=wish.port or served.port,
        chips=chips,
        runtime=options.runtime,
        devices=tuple((host, f"/dev/{Path(host).name}") for host in options.devices),
        mounts=options.mounts,
        env={**options.env, **(wish.env or {})},
        shm_size=options.shm_size,
        memory=wish.memory,
        restart=wish.restart,
        command=() if served.profile == image.default else (served.script,),
    )


def obstacles(spec: ContainerSpec, around: Surroundings, *, to_pull: int = 0) -> tuple[str, ...]:
    """Everything that keeps the container from working, each with what holds it. `to_pull` is in bytes."""
    return tuple(_obstacles(spec, around, to_pull))


def _obstacles(spec: ContainerSpec, around: Surroundings, to_pull: int) -> Iterator[str]:
    for chip in spec.chips:
        if around.nodes is not None and chip not in around.nodes:
            shown = ", ".join(map(str, around.nodes)) or "none"
            yield f"there is no chip {chip} (this host has: {shown})"
        elif why := _why_not(chip, around):
            yield f"chip {chip}: {why}"
    if state := around.names.get(spec.name):
        yield f"the name {spec.name} is taken by a container that is {state} (docker rm {spec.name} removes it)"
    if holder := around.ports.get(spec.host_port):
        yield f"port {spec.host_port} is published by {holder}"
    elif around.local and not _port_free(spec.host_port):
        yield f"port {spec.host_port} is in use by a process of this host (ss -ltnp 'sport = :{spec.host_port}')"
    least = MEMORY_EACH * spec.ranks
    if spec.memory is not None and spec.memory < least:
        yield (
            f"a memory limit of {human_size(spec.memory)} is too little for {spec.ranks} ranks: with less than "
            f"{human_size(least)} the server ends with exit code 137 while it loads"
        )
    if around.memory is not None and around.memory < least:
        yield f"{human_size(around.memory)} of host memory are free, and loading needs {human_size(least)}"
    if around.disk is not None and to_pull > around.disk:
        yield f"the image is {human_size(to_pull)}, and {human_size(around.disk)} are free where docker keeps its data"


def _port_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except PermissionError:
            return True  # the engine, which runs as root, will take it
        except OSError:
            return False
    return True


def refuse(found: Sequence[str]) -> None:
    """Raises DuopackError when anything is in the way: all of it at once."""
    if found:
        raise DuopackError(
            "; ".join(found),
            where="duopack run",
            mend="free what is held, or choose others with --chips, --port and --name",
        )


def with_present_mounts(spec: ContainerSpec) -> tuple[ContainerSpec, tuple[str, ...]]:
    """The spec without mounts that this host does not have, and these: docker would make directories of them."""
    missing = tuple(path for path in spec.mounts if not Path(path).exists())
    return replace(spec, mounts=tuple(path for path in spec.mounts if path not in missing)), missing


def start(client: DockerClient, spec: ContainerSpec) -> str:
    """Creates and starts the container; gives its id. One that does not start is removed again."""
    with engine_errors(spec.name, "check the image, the chips and the port, then run the same command again"):
        container = client.containers.create(**engine_arguments(spec))
        try:
            container.start()
        except BaseException:
            container.remove(force=True, v=True)
            raise
    return str(container.id)
