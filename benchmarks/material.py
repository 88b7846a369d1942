"""What the push benchmark sends: weights like a real model's, a catalog with one model, a base, a docker context.

    python benchmarks/material.py DIR GIB

A process of its own, so that the one that measures stays small.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from pipeline.demo.base import make_base
from pipeline.weights.safetensors_writer import BLOCK, Declared, SafetensorsWriter, lay_out

FILES = 4
COLUMNS = 4096
PLATFORM = "linux/amd64"
KEY = "bench"

CATALOG = """\
version: 1
default_base: bench-base
default_platform: {platform}
bases:
  bench-base:
    images: ["oci:base:bench"]
    platforms: [{platform}]
    vllm: 0.23.0
    vllm_ascend: 0.23.0rc1
models:
  {key}:
    title: Bench
    directory: Bench
    architecture: qwen3
    max_positions: 32768
    license: Apache-2.0
    sources:
      - dir: model
    profiles:
      nbench:
        tensor_parallel: 1
        served_name: bench
        max_model_len: {max_model_len}
        max_num_seqs: 8
        gpu_memory_utilization: 0.8
"""


@dataclass(frozen=True)
class Material:
    """The files on disk, below `directory`."""

    directory: Path

    @property
    def catalog(self) -> Path:
        return self.directory / "models.yaml"

    @property
    def context(self) -> Path:
        """A directory for `docker build`: a Dockerfile with one layer for each weight file, and the model."""
        return self.directory / "context"

    @property
    def weights(self) -> tuple[Path, ...]:
        return tuple(sorted((self.directory / "model").glob("*.safetensors")))

    @property
    def size(self) -> int:
        """Bytes of all weight files."""
        return sum(path.stat().st_size for path in self.weights)

    def write_catalog(self, max_model_len: int) -> None:
        """Writes models.yaml; another `max_model_len` is another start script and nothing else."""
        text = CATALOG.format(key=KEY, platform=PLATFORM, max_model_len=max_model_len)
        self.catalog.write_text(text)


def make(material: Material, gib: float) -> None:
    """Writes everything; about so many GiB of weights in four files."""
    model = material.directory / "model"
    model.mkdir(parents=True)
    make_weights(model, gib)
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    (model / "tokenizer.json").write_bytes(os.urandom(2 << 20))
    make_base(material.directory / "base", "bench", PLATFORM)
    material.write_catalog(4096)
    material.context.mkdir()
    lines = ["FROM scratch"]
    for path in sorted(model.iterdir()):
        # Hard links: the same bytes in the page cache for everybody.
        (material.context / path.name).hardlink_to(path)
        lines.append(f"COPY {path.name} /models/Bench/{path.name}")
    lines.append('CMD ["/models/nbench.sh"]')
    (material.context / "Dockerfile").write_text("\n".join(lines) + "\n")


def make_weights(directory: Path, gib: float) -> None:
    """Normally distributed bf16 (gzip saves about a fifth, as with real weights), no block twice."""
    import numpy as np

    rng = np.random.default_rng(1)
    rows = max(1, round(gib * (1 << 30) / FILES / (2 * COLUMNS)))
    weight_map = {}
    for number in range(1, FILES + 1):
        tensor = Declared(f"model.layers.{number - 1}.weight", "BF16", (rows, COLUMNS))
        name = f"model-{number:05}-of-{FILES:05}.safetensors"
        with SafetensorsWriter(directory / name, lay_out([tensor], {"format": "pt"})) as writer:
            for done in range(0, tensor.size, BLOCK):
                count = min(BLOCK, tensor.size - done) // 2
                noise = rng.standard_normal(count, dtype=np.float32) * np.float32(0.02)
                # A bf16 is the upper half of a float32.
                writer.write(memoryview(noise.view("<u2")[1::2].tobytes()))
        weight_map[tensor.name] = name
    index = {"metadata": {"total_size": FILES * rows * COLUMNS * 2}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    make(Material(Path(sys.argv[1])), float(sys.argv[2]))
