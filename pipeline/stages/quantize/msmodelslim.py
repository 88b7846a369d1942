"""msmodelslim as an engine: any recipe of its own, on a CPU or in the base image on chips.

It works on a staging directory: links to the weights, copies of the rest, an index where there is none, and a mode
that it accepts. A calibrated recipe gets float32 weights there, since it multiplies the scales in the checkpoint's
dtype: an fp16 source would lose up to 2.2 % of a deq_scale, a bf16 one keep it in a form that 310P cannot load. The
float tensors of that result become fp16 afterwards.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipeline.errors import DuopackError, quoted
from pipeline.files import FileRecord, sha256_file, write_atomically
from pipeline.reports.progress import Bar
from pipeline.stages.made_directory import side_files
from pipeline.stages.quantize.contract import Job, Made, summarize, write_text
from pipeline.stages.quantize.environment import VERSION
from pipeline.stages.quantize.journal import Journal
from pipeline.stages.quantize.runner import Call, Runner
from pipeline.weights.check import DESCRIPTION, read_json
from pipeline.weights.quant.parts import INDEX
from pipeline.weights.quant.rewriting import Change, cast, rewrite
from pipeline.weights.safetensors import read_header
from pipeline.weights.shards.config import Config
from pipeline.weights.shards.source import Source

MODEL_TYPES: Final = {
    "Qwen3ForCausalLM": "Qwen3-8B",
    "Qwen3_5ForConditionalGeneration": "Qwen3.5-27B",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3.5-35B-A3B",
}
"""The name under which msmodelslim knows an adapter; any size of the architecture works with it."""
STEP: Final = re.compile(r'Run processor AscendV1Saver for "([^"]+)"')
FLOAT_ON_CHIP: Final = "F16"


@dataclass(frozen=True)
class MsmodelslimEngine:
    """By msmodelslim itself, wherever the runner runs it."""

    runner: Runner

    name: Final = "msmodelslim"
    version: Final[str] = VERSION
    resumes: Final = False

    def check(self, job: Job) -> int:
        if job.config.architecture not in MODEL_TYPES:
            raise DuopackError(
                f"which of msmodelslim's adapters is for {quoted(job.config.architecture)} is not known",
                where=job.config.where,
                mend=f"known are {', '.join(MODEL_TYPES)}",
            )
        mtp = any(name.startswith("mtp.") for name in job.checkpoint.tensors)
        if job.recipe.calibrated and mtp and not self.runner.chips:
            raise DuopackError(
                "msmodelslim cannot run calibration data through this model's MTP layer on a CPU: its adapter moves "
                "it to an NPU whatever the device is",
                where=job.recipe.where,
                mend="run it on an Ascend host (--device npu), use the recipe w8a8-dynamic, which needs no data, or "
                "take the mtp.* tensors out of a copy of the model",
            )
        self.runner.check()
        size = sum(tensor.size for _, tensor in job.checkpoint.tensors.values())
        # float32 weights in the staging directory, msmodelslim's result, and its form with fp16.
        return (2 * size if job.recipe.calibrated else 0) + 2 * size

    def run(self, job: Job, directory: Path, journal: Journal) -> Made:
        del journal
        stage, out = directory / ".stage", directory / ".out"
        wide = job.recipe.calibrated
        self.runner.prepare(job.progress)
        _stage(job, stage, wide=wide)
        recipe = directory / ".recipe.yaml"
        write_atomically(recipe, job.recipe.text.encode())
        total = sum(tensor.size for _, tensor in job.checkpoint.tensors.values())
        with job.progress.bar(f"msmodelslim on {job.source.name}", total) as bar:
            steps = _Steps(job.checkpoint, bar)
            self.runner.run(
                Call(stage, out, recipe, MODEL_TYPES[job.config.architecture], job.source, wide), steps.line
            )
            steps.end()
        _check_output(job, out)
        files = list(_take(job, out, directory, wide=wide))
        for place in (stage, out):
            shutil.rmtree(place)
        recipe.unlink()
        description = read_json(directory / DESCRIPTION)
        types = ((name, str(type_)) for name, type_ in description.items() if name.endswith(".weight"))
        return Made(files=tuple(sorted(files)), groups=summarize(types))


class _Steps:
    """Progress from msmodelslim's log: a module that is saved counts with all its bytes."""

    def __init__(self, source: Source, bar: Bar) -> None:
        self._left = {name: tensor.size for name, (_, tensor) in source.tensors.items()}
        self._bar = bar

    def line(self, text: str) -> None:
        if found := STEP.search(text):
            done = [name for name in self._left if name.startswith(f"{found[1]}.")]
            self._bar.advance(sum(self._left.pop(name) for name in done))

    def end(self) -> None:
        self._bar.advance(sum(self._left.values()))


def _stage(job: Job, stage: Path, *, wide: bool) -> None:
    """The model as msmodelslim takes it."""
    stage.mkdir()
    # It refuses a directory that others may write to.
    stage.chmod(0o755)
    for name in side_files(job.names):
        if "/" not in name:
            shutil.copyfile(job.source / name, stage / name)
    config = dict(job.config.values)
    if _tied_inside(job.config):
        # It would look at the outer one only, and make up a random output head.
        config["tie_word_embeddings"] = True
    if wide:
        config["dtype"] = "float32"
        config.pop("torch_dtype", None)
    write_atomically(stage / "config.json", json.dumps(config, indent=2).encode())
    tensors = job.checkpoint.tensors
    weight_map = {name: file for name, (file, _) in tensors.items()}
    total = 0
    with job.progress.bar(
        "as float32", sum(tensor.size for _, tensor in tensors.values()) if wide else 0
    ) as bar:
        for file in job.checkpoint.files:
            if not wide:
                (stage / file).symlink_to((job.source / file).resolve())
                total += read_header(job.source / file).data_size
                continue
            changes = {
                name: cast(name, tensor.dtype, "F32", str(job.source / file))
                for name, (where, tensor) in tensors.items()
                if where == file and tensor.dtype in {"F16", "BF16"}
            }
            rewrite(job.source / file, stage / file, changes, bar.advance)
            total += read_header(stage / file).data_size
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_atomically(stage / "model.safetensors.index.json", json.dumps(index, indent=2).encode())


def _tied_inside(config: Config) -> bool:
    text: Any = config.values.get("text_config")
    return (
        "tie_word_embeddings" not in config.values
        and isinstance(text, dict)
        and text.get("tie_word_embeddings") is True
    )


def _check_output(job: Job, out: Path) -> None:
    """That it wrote what it should: it has been seen to go on after an error."""
    missing = [name for name in (INDEX, DESCRIPTION) if not (out / name).is_file()]
    named = set(read_json(out / INDEX).get("weight_map", {}).values()) if not missing else set()
    missing += [name for name in named if not isinstance(name, str) or not (out / name).is_file()]
    if missing:
        raise DuopackError(
            f"msmodelslim ended without an error, but did not write {quoted(str(missing[0]))}",
            where=job.source.name,
            mend="run the same command again; if it stays so, try the recipe with --engine streaming",
        )


def _take(job: Job, out: Path, directory: Path, *, wide: bool) -> Iterator[FileRecord]:
    """Its files, readable by all; the float tensors of a float32 run as fp16."""
    index = read_json(out / INDEX)
    total = 0
    for name in sorted(set(index["weight_map"].values())):
        if wide:
            changes = _narrowed(job, out / name, read_json(out / DESCRIPTION))
            yield rewrite(out / name, directory / name, changes)
        else:
            path = directory / name
            (out / name).rename(path)
            path.chmod(0o644)
            with path.open("rb") as file:
                os.fsync(file.fileno())
            yield FileRecord(name, path.stat().st_size, sha256_file(path))
        total += read_header(directory / name).data_size
    index["metadata"]["total_size"] = total
    yield write_text(directory / INDEX, json.dumps(index, indent=2))
    yield write_text(directory / DESCRIPTION, (out / DESCRIPTION).read_text(encoding="utf-8"))


def _narrowed(job: Job, path: Path, types: dict[str, Any]) -> dict[str, Change]:
    """What was no float32 in the checkpoint becomes fp16; what belongs to a quantized linear stays."""
    source = job.checkpoint.tensors
    return {
        name: cast(name, "F32", FLOAT_ON_CHIP, str(path))
        for name, tensor in read_header(path).tensors.items()
        if tensor.dtype == "F32"
        and types.get(name) == "FLOAT"
        and not (name in source and source[name][1].dtype == "F32")
        and types.get(f"{name.rpartition('.')[0]}.weight", "FLOAT") == "FLOAT"
    }
