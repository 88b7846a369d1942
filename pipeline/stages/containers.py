"""The containers of an engine that have chips or serve a model of ours: who holds what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.ascend.container import chips_of
from pipeline.serving.container import engine_errors

if TYPE_CHECKING:
    from docker import DockerClient

LABELS = "io.duopack."


@dataclass(frozen=True)
class Held:
    """A container: its name, image and state, the chips it has (None: all of them) and the host ports it takes.

    `served`, `profile` and `script` are what an image of ours says of itself, empty for others; `health` is docker's
    word, empty without a health check.
    """

    name: str
    image: str
    state: str
    chips: tuple[int, ...] | None
    ports: tuple[int, ...]
    model: str
    served: str
    profile: str
    health: str
    restarts: int
    exit_code: int
    pids: tuple[int, ...] = ()

    @property
    def running(self) -> bool:
        return self.state in {"running", "restarting", "paused", "created"}

    def has(self, chip: int) -> bool:
        return self.chips is None or chip in self.chips


def list_containers(client: DockerClient, *, pids: bool = False) -> tuple[Held, ...]:
    """Every container that has a chip or comes from an image of ours, stopped ones too, sorted by name.

    With `pids` also its processes. Raises DuopackError when the engine does not answer.
    """
    with engine_errors("listing containers"):
        found = client.containers.list(all=True, ignore_removed=True)
        rows = [_held(one.attrs, tuple(_pids(one)) if pids else ()) for one in found]
    kept = (row for row in rows if row.chips is None or row.chips or row.profile)
    return tuple(sorted(kept, key=lambda row: row.name))


def _held(inspected: dict[str, Any], pids: tuple[int, ...]) -> Held:
    config, state = inspected.get("Config") or {}, inspected.get("State") or {}
    labels = config.get("Labels") or {}
    profile = _profile(config.get("Cmd") or (), labels.get(f"{LABELS}default-profile", ""))
    model, served = _served(labels, profile)
    return Held(
        name=str(inspected.get("Name", "")).lstrip("/"),
        image=str(config.get("Image", "")),
        state=str(state.get("Status", "")),
        chips=chips_of(inspected),
        ports=tuple(sorted(set(_ports(inspected)))),
        model=model,
        served=served,
        profile=profile,
        health=str((state.get("Health") or {}).get("Status", "")),
        restarts=int(inspected.get("RestartCount") or 0),
        exit_code=int(state.get("ExitCode") or 0),
        pids=pids,
    )


def _profile(command: Any, default: str) -> str:
    """The profile whose script is the command: of an image with several models it need not be the default."""
    if not default:
        return ""
    words = [str(word) for word in command]
    scripts = [word.rpartition("/")[2].removesuffix(".sh") for word in words if word.endswith(".sh")]
    return scripts[0] if scripts else default


def _served(labels: dict[str, str], profile: str) -> tuple[str, str]:
    """The model's title and its served name, from the launch.json that the label carries."""
    try:
        launch = json.loads(labels.get(f"{LABELS}launch", ""))
        for model in launch["models"]:
            for one in model["profiles"]:
                if one["name"] == profile:
                    return str(model["title"]), str(one["served_name"])
    except (ValueError, RecursionError, TypeError, KeyError):
        pass
    return str(labels.get("org.opencontainers.image.title", "")), str(labels.get(f"{LABELS}served-name", ""))


def _ports(inspected: dict[str, Any]) -> Iterator[int]:
    for bindings in ((inspected.get("HostConfig") or {}).get("PortBindings") or {}).values():
        yield from (int(one["HostPort"]) for one in bindings or () if str(one.get("HostPort", "")).isdigit())


def _pids(container: Any) -> Iterator[int]:
    if container.status != "running":
        return
    listed = container.top(ps_args="-eo pid")
    yield from (int(row[0]) for row in listed.get("Processes") or () if row and row[0].isdigit())
