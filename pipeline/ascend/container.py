"""Which devices, mounts and variables a container on Atlas 300I Duo needs.

Two ways: with the `ascend` runtime (ascend-docker-runtime), which maps devices and driver by
`ASCEND_VISIBLE_DEVICES`; or without it, by mapping all of that here. Inside the container the chips count
from 0 either way, so `ASCEND_RT_VISIBLE_DEVICES` is left unset: host ids there fail.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUNTIME = "ascend"
HOST_IDS = "ASCEND_VISIBLE_DEVICES"
"""Chips by host id, for the runtime."""
SHM_SIZE = "10g"
MANAGERS = ("davinci_manager", "hisi_hdc", "devmm_svm")
DRIVER_MOUNTS = (
    "/usr/local/dcmi",
    "/usr/local/bin/npu-smi",
    "/usr/local/Ascend/driver/lib64",
    "/usr/local/Ascend/driver/version.info",
    "/etc/ascend_install.info",
)


@dataclass(frozen=True)
class ContainerOptions:
    """What to add to `docker run`; `devices` and `mounts` are host paths that keep their path inside."""

    runtime: str | None
    devices: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    shm_size: str = SHM_SIZE


def container_options(
    chips: Sequence[int], *, runtimes: Sequence[str], devices: Path = Path("/dev")
) -> ContainerOptions:
    """Options for chips given by host id, by the runtime that the engine has."""
    if RUNTIME in runtimes:
        return ContainerOptions(RUNTIME, env={HOST_IDS: ",".join(map(str, chips))})
    names = [*(f"davinci{chip}" for chip in chips), *MANAGERS]
    return ContainerOptions(None, devices=tuple(str(devices / name) for name in names), mounts=DRIVER_MOUNTS)


def chips_in(text: str) -> tuple[int, ...]:
    """The chips of ASCEND_VISIBLE_DEVICES: `0,1`, `0-3`, or a mix; empty for anything else."""
    chips: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,3})(?:-(\d{1,3}))?\s*", part)
        if not found:
            return ()
        chips += range(int(found[1]), int(found[2] or found[1]) + 1)
    return tuple(dict.fromkeys(chips))


def chips_of(inspected: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The host ids of the chips that a container has, by what the engine says of it; None: all (privileged)."""
    host = inspected.get("HostConfig") or {}
    if host.get("Privileged"):
        return None
    environment = dict(
        text.partition("=")[::2] for text in (inspected.get("Config") or {}).get("Env") or () if "=" in text
    )
    if host.get("Runtime") == RUNTIME and (chosen := chips_in(environment.get(HOST_IDS, ""))):
        return chosen
    nodes = (str(one.get("PathOnHost", "")).rpartition("/")[2] for one in host.get("Devices") or ())
    return tuple(int(found[1]) for node in nodes if (found := re.fullmatch(r"davinci(\d{1,3})", node)))


def visible_chips(devices: Path = Path("/dev")) -> tuple[int, ...]:
    """Host ids of the chips whose device nodes exist."""
    names = (path.name.removeprefix("davinci") for path in devices.glob("davinci[0-9]*"))
    return tuple(sorted(int(name) for name in names if name.isdecimal()))
