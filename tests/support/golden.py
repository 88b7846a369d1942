"""The golden checkpoints and manifests, unpacked; see tests/unit/data/golden/README.md."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from support.archives import untar

from pipeline.weights.safetensors import read_header

DATA = Path(__file__).parents[1] / "unit" / "data" / "golden"


def unpack(directory: Path) -> Path:
    return untar(DATA / "golden.tar.xz", directory)


def digests() -> dict[str, dict[str, list[str]]]:
    value: dict[str, dict[str, list[str]]] = json.loads((DATA / "digests.json").read_text())
    return value


def manifest(root: Path, case: str) -> list[dict[str, Any]]:
    """Per rank: name to [dtype, shape, source]."""
    ranks: list[dict[str, Any]] = json.loads((root / "manifests" / f"{case}.json").read_text())["ranks"]
    return ranks


def digest_without(path: Path, free: list[str]) -> str:
    """A file's sha256 with the data of the tensors `free` set to zero."""
    data, header = bytearray(path.read_bytes()), read_header(path)
    for name in free:
        tensor = header.tensors[name]
        data[tensor.begin : tensor.end] = bytes(tensor.size)
    return hashlib.sha256(data).hexdigest()
