"""A small catalog with its hub and its base, and `duopack` run on it as a user would, in this process."""

from __future__ import annotations

import io
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.hub import FaultyHub, isolate_clients

from pipeline.cli import main
from pipeline.demo.base import make_base
from pipeline.demo.model import make_model, make_qwen3
from pipeline.oci.digest import Digest
from pipeline.oci.documents import canonical
from pipeline.oci.layout import LayoutSource
from pipeline.oci.model import OCI_INDEX

PROFILE = {
    "tensor_parallel": 1,
    "served_name": "tiny-one",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "gpu_memory_utilization": 0.6,
    "capture_sizes": [1, 4],
}


@dataclass(frozen=True)
class Ran:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The error of a failed --json run, which says what stderr says."""
        return str(self.json["error"]["what"])


def catalog() -> dict[str, Any]:
    """Two models, three profiles, a set of both, one base for two platforms."""
    return {
        "version": 1,
        "default_base": "stand-in",
        "bases": {
            "stand-in": {
                "images": ["oci:base:demo"],
                "platforms": ["linux/arm64", "linux/amd64"],
                "vllm": "0.23.0",
                "vllm_ascend": "0.23.0rc1",
            }
        },
        "models": {
            "one": {
                "title": "Tiny One",
                "directory": "Tiny-One",
                "architecture": "qwen3",
                "max_positions": 40960,
                "license": "Apache-2.0",
                "sources": [{"modelscope": "tiny/one"}, {"huggingface": "tiny/one"}],
                "profiles": {
                    "n1": PROFILE,
                    "nn1": {**PROFILE, "tensor_parallel": 2, "served_name": "tiny-one"},
                },
            },
            "two": {
                "title": "Tiny Two",
                "directory": "Tiny-Two",
                "architecture": "qwen3.5",
                "max_positions": 262144,
                "sources": [{"modelscope": "tiny/two"}],
                "profiles": {"n2": {**PROFILE, "served_name": "tiny-two", "port": 12321}},
            },
        },
        "sets": {"both": ["one", "two"]},
    }


@dataclass
class Project:
    """A directory with models.yaml, a base, a hub that serves the models, and a work directory."""

    directory: Path
    hub: FaultyHub
    content: dict[str, Any] = field(default_factory=catalog)

    def __post_init__(self) -> None:
        self.write()

    @property
    def lock(self) -> Path:
        return self.directory / "models.lock"

    @property
    def work(self) -> Path:
        return self.directory / "build"

    def write(self) -> None:
        """models.yaml from `content`."""
        (self.directory / "models.yaml").write_text(yaml.safe_dump(self.content, sort_keys=False))

    def profile(self, name: str = "n1", model: str = "one") -> dict[str, Any]:
        """A profile to change in place; `write` makes it count."""
        models = self.content["models"]
        models[model]["profiles"][name] = dict(models[model]["profiles"][name])
        found: dict[str, Any] = models[model]["profiles"][name]
        return found

    def weights(self, model: str = "one") -> Path:
        return self.hub.root / "tiny" / model

    def run(self, command: str, *arguments: str | Path, work: Path | None = None) -> Ran:
        """`duopack COMMAND …` with this catalog."""
        places = ["--catalog", str(self.directory / "models.yaml"), "--work", str(work or self.work)]
        return run(command, *arguments, *places)

    def built(self, *arguments: str | Path, work: Path | None = None) -> dict[str, Any]:
        """The result of a build that must succeed."""
        ran = self.run("build", *arguments, "--json", work=work)
        assert ran.code == 0, ran.err
        result: dict[str, Any] = ran.json[0]
        return result


def run(*arguments: str | Path) -> Ran:
    """`duopack …` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Ran(code, out.getvalue(), err.getvalue())


def refused(ran: Ran, code: int, *parts: str) -> None:
    """One paragraph at the end of stderr, with what it must say and a mend, and no traceback."""
    assert ran.code == code, ran.err
    assert "Traceback" not in ran.err
    found = list(re.finditer(r"^duopack( [a-z]+)?: (error|wrong use): ", ran.err, re.M))
    assert len(found) == 1, ran.err
    said = ran.err[found[0].start() :]
    for part in (*parts, "To mend: "):
        assert part in said, said


def duopack(*arguments: str | Path) -> list[str]:
    """The command line of a process of its own."""
    return [sys.executable, "-m", "pipeline", *map(str, arguments)]


def make_models(root: Path) -> None:
    make_qwen3(root / "tiny" / "one")
    make_model(root / "tiny" / "two")


def make_bases(layout: Path) -> None:
    """The demo's base for two platforms, under one tag by an index as a registry has it."""
    entries = []
    for platform in ("linux/arm64", "linux/amd64"):
        make_base(layout, platform.rpartition("/")[2], platform)
        found = LayoutSource(layout).manifest(platform.rpartition("/")[2])[0]
        entries.append(found.to_json())
    index = canonical({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries})
    digest = Digest.of(index)
    (layout / "blobs" / "sha256" / digest.hex).write_bytes(index)
    top = json.loads((layout / "index.json").read_bytes())
    name = {"org.opencontainers.image.ref.name": "demo"}
    top["manifests"].append(
        {"mediaType": OCI_INDEX, "digest": str(digest), "size": len(index), "annotations": name}
    )
    (layout / "index.json").write_bytes(canonical(top))


def open_project(directory: Path, hub: FaultyHub, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project whose clients know only this hub, and whose home is its own."""
    isolate_clients(monkeypatch, hub.url, directory / "home")
    make_bases(directory / "base")
    return Project(directory, hub)
