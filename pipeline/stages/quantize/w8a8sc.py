"""W8A8SC: sparse and compressed, by upstream's own script in the base image on a 310P host; then everything checked.

Upstream quantizes to W8A8S, saves what each rank holds, and compresses each rank's file in a process of its own. Such
a process that fails only prints, and the script still says that it succeeded: what came out is looked at here.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.errors import DuopackError, quoted
from pipeline.files import FileRecord, sha256_file
from pipeline.stages.quantize.container import READ_ONLY, WRITABLE, Base, ensure_msmodelslim
from pipeline.stages.quantize.contract import Job, Made, summarize
from pipeline.stages.quantize.environment import VERSION
from pipeline.stages.quantize.journal import Journal
from pipeline.weights.check import DESCRIPTION, read_json
from pipeline.weights.safetensors import Tensor, read_header
from pipeline.weights.shards.config import Config

SCRIPT: Final = "/vllm-workspace/vllm-ascend/examples/save_sharded_state_310.py"
READY_MADE: Final = ", ".join(f"Eco-Tech/Qwen3-{size}-w8a8sc-310-vllm" for size in ("8B", "14B", "32B"))
MODELS: Final = {(4096, 36): "Qwen3-8B", (5120, 40): "Qwen3-14B", (5120, 64): "Qwen3-32B"}
"""msmodelslim's name for each model that it has a W8A8S recipe for, by hidden size and layers."""
TYPE: Final = "W8A8SC"
COMPRESSED: Final = {"index": "I8", "info": "I64", "quant_bias": "I32", "deq_scale": "I64"}
"""What lies beside each compressed weight, and its dtype."""
INFO_LENGTH: Final = 5
FUSED_PER_LAYER: Final = 4
"""Linears of a layer as vLLM fuses them: qkv, o, gate_up, down."""


@dataclass(frozen=True)
class W8a8scEngine:
    """For `ranks` ranks on the chips of this host."""

    base: Base
    ranks: int

    name: Final = "w8a8sc"
    version: Final[str] = VERSION
    resumes: Final = False

    def check(self, job: Job) -> int:
        chips = len(self.base.chips())
        if chips < self.ranks:
            raise DuopackError(
                f"W8A8SC weights can only be made on a 310P host with CANN: TP {self.ranks} needs {self.ranks} chips, "
                f"and this host shows {chips or 'none'}",
                where=f"{self.base.devices}/davinci*",
                mend=f"take ready-made weights ({READY_MADE}), or run it on such a host",
            )
        _model_type(job.config)
        size = sum(tensor.size for _, tensor in job.checkpoint.tensors.values())
        # W8A8S weights of the same size at most, and the ranks' files before and after.
        return 3 * size

    def run(self, job: Job, directory: Path, journal: Journal) -> Made:
        del journal
        sparse, out = directory.absolute() / ".w8a8s", directory.absolute() / ".out"
        self.base.prepare(job.progress)
        steps = f"{ensure_msmodelslim()}\n{self._quantize(job, sparse)}\n{self._compress(sparse, out)}"
        mounts = {job.source.resolve(): READ_ONLY, directory.absolute(): WRITABLE}
        chips = self.base.chips()[: self.ranks]
        job.progress.note(f"W8A8SC for TP {self.ranks} in {self.base.image}: this takes hours")
        self.base.run(steps, mounts, chips, _Told(job), writable=directory.absolute())
        check_ranks(out, self.ranks, _layers(job.config))
        files = []
        for path in sorted(out.iterdir()):
            if not path.is_file() or not _kept(path.name):
                continue
            target = directory / path.name
            path.rename(target)
            target.chmod(0o644)
            files.append(FileRecord(target.name, target.stat().st_size, sha256_file(target)))
        for place in (sparse, out):
            shutil.rmtree(place, ignore_errors=True)
        description = read_json(directory / DESCRIPTION)
        types = ((name, str(type_)) for name, type_ in description.items() if name.endswith(".weight"))
        return Made(tuple(files), summarize(types))

    def _quantize(self, job: Job, target: Path) -> str:
        options = {
            "model_path": job.source.resolve(),
            "save_path": target,
            "model_type": _model_type(job.config),
            "device": "npu",
            "quant_type": "w8a8s",
            "trust_remote_code": False,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return f"msmodelslim quant {shlex.join(words)} </dev/null"

    def _compress(self, source: Path, target: Path) -> str:
        words = [
            *("python3", SCRIPT, "--model", str(source), "--output", str(target)),
            *("--tensor-parallel-size", str(self.ranks), "--enable-compress"),
            *("--compress-process-num", str(self.ranks), "--enforce-eager"),
            *("--dtype", "float16", "--quantization", "ascend"),
        ]
        return shlex.join(words)


class _Told:
    """The container's lines that a person should see: a worker that fails only prints."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, line: str) -> None:
        if line.startswith("Error"):
            self._job.progress.warn(quoted(line.strip(), 300))


def check_ranks(directory: Path, ranks: int, layers: int) -> None:
    """Raises DuopackError unless every rank's file is there, complete, compressed, and like the others'."""
    description = directory / DESCRIPTION
    if not description.is_file():
        _refuse(directory, f"there is no {DESCRIPTION}")
    found = read_json(description).get("model_quant_type")
    if found != TYPE:
        _refuse(directory, f"its model_quant_type is {quoted(str(found))}, not {TYPE}")
    first: dict[str, Tensor] = {}
    for rank in range(ranks):
        parts = sorted(path.name for path in directory.glob(f"model-rank-{rank}-part-*.safetensors"))
        if parts != [f"model-rank-{rank}-part-0.safetensors"]:
            # Only part 0 is compressed; a rank in several parts would be half compressed.
            _refuse(directory, f"rank {rank} has {len(parts)} files, not one")
        tensors = read_header(directory / parts[0]).tensors
        faults = list(_faults(tensors, layers))
        if faults:
            _refuse(directory, f"rank {rank}: {faults[0]}")
        first = first or tensors
        other = sorted(set(tensors) ^ set(first))
        if other:
            _refuse(directory, f"rank {rank} and rank 0 do not have the same tensors: {quoted(other[0])}")
    beyond = list(directory.glob(f"model-rank-{ranks}-part-*.safetensors"))
    if beyond:
        _refuse(directory, f"there is {beyond[0].name}, of a rank beyond the last")


def _faults(tensors: dict[str, Tensor], layers: int) -> Iterator[str]:
    weights = {name: one for name, one in tensors.items() if name.endswith(".weight") and one.dtype == "I8"}
    if not weights:
        yield "it has no compressed weight: its compression failed"
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if len(weight.shape) != 1:
            yield f"{quoted(name)} is not compressed: its shape is {list(weight.shape)}"
        for suffix, dtype in COMPRESSED.items():
            beside = tensors.get(f"{module}.{suffix}")
            if beside is None:
                yield f"{quoted(module)} has no {suffix}"
            elif beside.dtype != dtype:
                yield f"{quoted(module)}.{suffix} is {beside.dtype}, not {dtype}"
        info = tensors.get(f"{module}.info")
        if info and info.shape != (INFO_LENGTH,):
            yield f"{quoted(module)}.info has the shape {list(info.shape)}, not [{INFO_LENGTH}]"
    for number in range(layers):
        linears = [
            name
            for name in tensors
            if name.startswith(f"model.layers.{number}.") and name.endswith("_proj.weight")
        ]
        if len(linears) != FUSED_PER_LAYER:
            yield f"layer {number} has {len(linears)} linears, not {FUSED_PER_LAYER}"


def _kept(name: str) -> bool:
    """Side files come from the source; upstream's leavings (a backup, a map, compression records) stay behind."""
    return name == DESCRIPTION or name.endswith(".safetensors")


def _model_type(config: Config) -> str:
    found = None
    if config.architecture == "Qwen3ForCausalLM":
        found = MODELS.get((config.natural("hidden_size"), _layers(config)))
    if found is None:
        raise DuopackError(
            "upstream has a W8A8S recipe only for Qwen3-8B, Qwen3-14B and Qwen3-32B",
            where=config.where,
            mend="use the recipe w8a8-dynamic",
        )
    return found


def _layers(config: Config) -> int:
    return config.natural("num_hidden_layers")


def _refuse(directory: Path, what: str) -> None:
    raise DuopackError(
        f"upstream's script said that it succeeded, but {what}",
        where=directory.name,
        mend=f"free memory on the host and run it again, or take ready-made weights ({READY_MADE})",
    )
