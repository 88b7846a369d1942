"""Models, profiles and a machine with fake chips, on which the real start scripts run with a fake vllm."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.ascend.scripts import healthcheck_script, serve_script
from pipeline.catalog.schema import Architecture, Base, Model, Profile, Quantization, Source

OLD_BASE = Base(
    images=("registry.example/vllm-ascend:v0.20.2rc1-310p-openeuler",),
    vllm="0.20.2",
    vllm_ascend="0.20.2rc1",
    cann="9.1.0-beta.1",
)
NEW_BASE = OLD_BASE.model_copy(update={"vllm": "0.23.0", "vllm_ascend": "0.23.0rc1"})

FAKE_VLLM = """#!/bin/bash
printf '%s\\0' "$@" >"$OUT/argv"
env -0 >"$OUT/env"
echo $$ >"$OUT/pid.part" && mv "$OUT/pid.part" "$OUT/pid"
if [[ -n ${FAKE_WAIT:-} ]]; then exec sleep 30; fi
exit "${FAKE_EXIT:-0}"
"""


def profile(**changes: Any) -> Profile:
    values = {
        "tensor_parallel": 2,
        "served_name": "qwen3.5-9b",
        "max_model_len": 16384,
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.6,
        "reasoning_parser": "qwen3",
        "tool_call_parser": "qwen3_coder",
    }
    return Profile(**{**values, **changes})


def model(one: Profile | None = None, **changes: Any) -> Model:
    values = {
        "title": "Qwen3.5-9B",
        "directory": "Qwen3.5-9B",
        "architecture": Architecture.QWEN3_5,
        "max_positions": 262144,
        "sources": (Source(modelscope="Qwen/Qwen3.5-9B"),),
        "license": "Apache-2.0",
        "profiles": {"n9": one or profile()},
    }
    return Model(**{**values, **changes})


def sharded_model(**changes: Any) -> Model:
    one = profile(load_format="sharded_state", weights="TP2/shards", served_name="qwen3-8b", **changes)
    return model(
        one,
        title="Qwen3-8B",
        directory="Qwen3-8B",
        architecture=Architecture.QWEN3,
        quantization=Quantization.W8A8SC,
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Ran:
    """What a script did: how it ended, and what the fake vllm saw (empty when it was never started)."""

    code: int
    out: str
    err: str
    argv: list[str]
    env: dict[str, str]


@dataclass
class Machine:
    """A directory with chips, weights and a PATH, on which a start script runs."""

    root: Path
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        for name in ("bin", "dev", "ascend", "tmp", "out", "weights"):
            (self.root / name).mkdir(exist_ok=True)
        self.write("bin/vllm", FAKE_VLLM, 0o755)
        self.chips(2)
        self.whole_weights()

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    def write(self, path: str, text: str, mode: int = 0o644) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)
        return file

    def chips(self, count: int) -> None:
        for file in (self.root / "dev").iterdir():
            file.unlink()
        for name in (
            "davinci_manager",
            "hisi_hdc",
            "devmm_svm",
            *(f"davinci{number}" for number in range(count)),
        ):
            self.write(f"dev/{name}", "")

    def whole_weights(self) -> None:
        names = [f"model.safetensors-0000{number}-of-00002.safetensors" for number in (1, 2)]
        for name in names:
            self.write(f"weights/{name}", "weights")
        index = {"weight_map": {f"layer.{number}": name for number, name in enumerate(names)}}
        self.write("weights/model.safetensors.index.json", json.dumps(index))
        self.write("weights/config.json", "{}")

    def shards(self, ranks: Sequence[int]) -> None:
        for file in self.weights.iterdir():
            file.unlink()
        self.write("weights/config.json", "{}")
        self.write("weights/quant_model_description.json", "{}")
        for rank in ranks:
            self.write(f"weights/model-rank-{rank}-part-0.safetensors", "weights")

    def environ(self, changes: Mapping[str, str | None]) -> dict[str, str]:
        values: dict[str, str | None] = {
            "PATH": f"{self.root}/bin:{os.environ['PATH']}",
            "OUT": f"{self.root}/out",
            "TMPDIR": f"{self.root}/tmp",
            "DUOPACK_DEVICE_DIR": f"{self.root}/dev",
            "DUOPACK_ASCEND_DIR": f"{self.root}/ascend",
            "MODEL_PATH": str(self.weights),
            "PORT": str(self.port),
            **changes,
        }
        return {name: value for name, value in values.items() if value is not None}

    def script(self, subject: Model, base: Base = OLD_BASE) -> Path:
        (name, one), *_ = subject.profiles.items()
        return self.write(f"{name}.sh", serve_script(name, subject, one, base), 0o755)

    def healthcheck(self, port: int) -> Path:
        return self.write("healthcheck.sh", healthcheck_script(port), 0o755)

    def run(self, script: Path, *args: str, **changes: str | None) -> Ran:
        out = self.root / "out"
        for file in out.iterdir():
            file.unlink()
        done = subprocess.run(
            [script, *args],
            env=self.environ(changes),
            capture_output=True,
            text=True,
            timeout=20,
            cwd=self.root,
        )
        return Ran(done.returncode, done.stdout, done.stderr, *self.seen())

    def seen(self) -> tuple[list[str], dict[str, str]]:
        out = self.root / "out"
        if not (out / "env").exists():
            return [], {}
        pairs = (text.partition("=") for text in (out / "env").read_text().split("\0") if text)
        return (out / "argv").read_text().split("\0")[:-1], {name: value for name, _, value in pairs}
