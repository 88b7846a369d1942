"""Captures of this very host, for `diagnose`: files, programs, docker, device nodes, disk, and who can be reached."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from pipeline.ascend.host import NOTHING, Capture, device_facts, docker_facts, read_files, run_commands
from pipeline.errors import DuopackError

SECONDS = 5.0


def examine(devices: Path, reach: Mapping[str, str]) -> dict[str, Capture]:
    """Everything that `diagnose` looks at. `reach` maps what may be needed to its URL. Takes a few seconds."""
    captures = {**read_files(), **run_commands(), "devices": device_facts(devices)}
    captures |= _engine()
    root = captures["docker"].json.get("DockerRootDir")
    captures["storage"] = _storage(Path(str(root))) if root else NOTHING
    captures["reach"] = Capture(json.dumps({name: _answer(url) for name, url in reach.items()}))
    captures["user"] = Capture(json.dumps({"uid": os.getuid(), "groups": os.getgroups()}))
    return captures


def _engine() -> dict[str, Capture]:
    """What the engine says of itself, and its containers that have chips."""
    from pipeline.serving.container import engine
    from pipeline.stages.containers import list_containers

    try:
        with engine() as client:
            info = docker_facts(client.info())
            rows = list_containers(client, pids=True)
    except DuopackError as error:
        return {"docker": Capture(error.what, found=False), "containers": NOTHING}
    held = [{**asdict(row), "running": row.running} for row in rows]
    return {"docker": info, "containers": Capture(json.dumps({"containers": held}))}


def _storage(root: Path) -> Capture:
    """Free space where docker keeps its data, or above it where a user may not look inside."""
    place = root
    while place != place.parent:
        try:
            usage = shutil.disk_usage(place)
        except OSError:
            place = place.parent
            continue
        return Capture(json.dumps({"root": str(root), "free": usage.free, "total": usage.total}))
    return NOTHING


def _answer(url: str) -> str:
    """Whether anything answers HTTP at an address: any status is an answer."""
    import requests

    try:
        with requests.get(url, timeout=SECONDS, stream=True) as answer:
            return f"answers with {answer.status_code}"
    except requests.RequestException as error:
        return f"no answer: {type(error).__name__}"
