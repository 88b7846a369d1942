"""Which devices, mounts and variables a container on Atlas 300I Duo needs.

Two ways: with the `ascend` runtime (ascend-docker-runtime), which maps devices and driver by
`ASCEND_VISIBLE_DEVICES`; or without it, by mapping all of that here. Inside the container the chips count
from 0 either way, so `ASCEND_RT_VISIBLE_DEVICES` is left unset: host ids there fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

RUNTIME = "ascend"
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
        return ContainerOptions(RUNTIME, env={"ASCEND_VISIBLE_DEVICES": ",".join(map(str, chips))})
    names = [*(f"davinci{chip}" for chip in chips), *MANAGERS]
    return ContainerOptions(None, devices=tuple(str(devices / name) for name in names), mounts=DRIVER_MOUNTS)


def visible_chips(devices: Path = Path("/dev")) -> tuple[int, ...]:
    """Host ids of the chips whose device nodes exist."""
    names = (path.name.removeprefix("davinci") for path in devices.glob("davinci[0-9]*"))
    return tuple(sorted(int(name) for name in names if name.isdecimal()))
