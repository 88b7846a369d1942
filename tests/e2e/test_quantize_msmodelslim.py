"""The real msmodelslim beside the streaming engine: every byte the same; and what only msmodelslim can do.

DUOPACK_MSMODELSLIM may name an environment that has it; else one is made, which takes minutes once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from support.quantizing import CASES, GOLDEN, SMALL_UNIT, digests, golden, make_source

from pipeline.demo.model import Variant, make_model, make_qwen3
from pipeline.errors import DuopackError
from pipeline.reports.progress import open_progress
from pipeline.stages.quantize.environment import Environment, make_environment
from pipeline.stages.quantize.msmodelslim import MODEL_TYPES, MsmodelslimEngine
from pipeline.stages.quantize.runner import Call, CpuRunner, launcher, quant_arguments
from pipeline.stages.quantize.stage import Quantized, quantize
from pipeline.weights.quant.checks import check_quantized
from pipeline.weights.safetensors import read_header

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

PROGRESS = open_progress(quiet=True)
SMALL_FILES = """
import runpy, sys
unit, launcher, *arguments = sys.argv[1:]
runpy.run_path(launcher)["bring_torchvision"]()
import msmodelslim.core.quant_service.modelslim_v1.save.utils.safetensors as writer
writer.ONE_GB_FILE_BYTES = int(unit)
sys.argv = [launcher, *arguments]
runpy.run_path(launcher, run_name="__main__")
"""


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the environment is made; kept between runs, for it has gigabytes."""
    return Path(os.environ.get("DUOPACK_WORK", "build")) / "_work"


@pytest.fixture(scope="session")
def environment(cache: Path) -> Environment:
    return make_environment(cache, os.environ, PROGRESS)


@pytest.fixture(scope="session")
def theirs(cache: Path, environment: Environment) -> MsmodelslimEngine:
    assert environment.python.exists()
    return MsmodelslimEngine(CpuRunner(cache, os.environ))


@pytest.mark.parametrize("name", CASES)
def test_writes_what_msmodelslim_writes(
    name: str, theirs: MsmodelslimEngine, environment: Environment, tmp_path: Path
) -> None:
    source = make_source(name, tmp_path / "source")
    if CASES[name].split:
        made = _with_small_files(source, tmp_path / "theirs", environment)
    else:
        made = digests(_by(theirs, source, tmp_path / "theirs", "w8a8-dynamic").directory)
        ours = quantize(source, tmp_path / "ours", PROGRESS, recipe="w8a8-dynamic", engine="streaming")
        assert digests(ours.directory) == made
    assert golden()[name] == made, f"{GOLDEN.name} is not what msmodelslim writes"


def _with_small_files(source: Path, target: Path, environment: Environment) -> dict[str, str]:
    """msmodelslim with another idea of a GiB; `test_quant_parity` holds the streaming writer against the digests."""
    recipe = Path("pipeline/recipes/qwen3.5-w8a8-dynamic.yaml")
    call = Call(source, target, recipe, MODEL_TYPES["Qwen3_5ForConditionalGeneration"], source, False)
    command = [environment.python, "-IB", "-c", SMALL_FILES, str(SMALL_UNIT), launcher()]
    subprocess.run([*command, *quant_arguments(call, device="cpu")], check=True, capture_output=True)
    return digests(target)


def _by(engine: MsmodelslimEngine, source: Path, target: Path, recipe: str) -> Quantized:
    return quantize(
        source, target, PROGRESS, recipe=recipe, engine="msmodelslim", engines={engine.name: engine}
    )


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_static_scales_are_int64_and_exact(dtype: str, theirs: MsmodelslimEngine, tmp_path: Path) -> None:
    make_qwen3(tmp_path / "source", seed=3, variant=Variant(dtype))
    made = _by(theirs, tmp_path / "source", tmp_path / "made", "w8a8-static")
    assert check_quantized(made.directory) == ()
    _assert_exact(tmp_path / "source", made.directory, "model.layers.1.mlp.gate_proj")


def test_static_of_hybrid_layers_is_exact_too(theirs: MsmodelslimEngine, tmp_path: Path) -> None:
    """The adapter makes layers after the first in bfloat16; the float32 way keeps them as they are."""
    make_model(tmp_path / "source", seed=3, variant=Variant("F16", mtp=False))
    made = _by(theirs, tmp_path / "source", tmp_path / "made", "w8a8-static")
    assert check_quantized(made.directory) == ()
    _assert_exact(tmp_path / "source", made.directory, "model.language_model.layers.3.self_attn.o_proj")
    assert (made.directory / "chat_template.jinja").exists()


def _assert_exact(source: Path, made: Path, module: str) -> None:
    """deq_scale = input_scale × largest magnitude / 127, in float32, its bits as int64."""
    weight = _tensor(source, f"{module}.weight")
    scale, deq = _tensor(made, f"{module}.input_scale"), _tensor(made, f"{module}.deq_scale")
    wanted = scale * (np.abs(weight).max(axis=1) / np.float32(127))
    assert deq.dtype == np.int64
    assert (deq == wanted.astype("<f4").view("<i4").astype("<i8")).all()
    norm = next(
        name
        for path in made.glob("*.safetensors")
        for name in read_header(path).tensors
        if "layernorm" in name
    )
    assert _dtype(made, norm) == "F16"


def _tensor(directory: Path, name: str) -> np.ndarray:
    for path in directory.glob("*.safetensors"):
        tensor = read_header(path).tensors.get(name)
        if tensor:
            data = path.read_bytes()[tensor.begin : tensor.end]
            kinds = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "I8": "|i1", "I64": "<i8"}
            values = np.frombuffer(data, kinds[tensor.dtype]).reshape(tensor.shape)
            if tensor.dtype == "BF16":
                return (values.astype("<u4") << 16).view("<f4")
            return values.astype("<f4") if tensor.dtype == "F16" else values
    raise KeyError(name)


def _dtype(directory: Path, name: str) -> str:
    return next(
        header.tensors[name].dtype
        for path in directory.glob("*.safetensors")
        if name in (header := read_header(path)).tensors
    )


def test_a_failed_run_says_why_and_leaves_nothing(theirs: MsmodelslimEngine, tmp_path: Path) -> None:
    make_qwen3(tmp_path / "source", variant=Variant())
    config = json.loads((tmp_path / "source/config.json").read_text())
    config["hidden_act"] = "no-such-function"
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    with pytest.raises(DuopackError, match="no-such-function"):
        _by(theirs, tmp_path / "source", tmp_path / "made", "w8a8-dynamic")
    assert {path.name for path in tmp_path.iterdir()} == {"source", ".made.lock"}


def main(environ: Mapping[str, str]) -> None:
    """Writes the golden digests anew: PYTHONPATH=tests:. python tests/e2e/test_quantize_msmodelslim.py."""
    import tempfile

    cache = Path(environ.get("DUOPACK_WORK", "build")) / "_work"
    environment = make_environment(cache, environ, open_progress())
    engine = MsmodelslimEngine(CpuRunner(cache, environ))
    cases = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as place:
            source = make_source(name, Path(place) / "source")
            if case.split:
                cases[name] = _with_small_files(source, Path(place) / "theirs", environment)
            else:
                cases[name] = digests(_by(engine, source, Path(place) / "theirs", "w8a8-dynamic").directory)
        print(name, file=sys.stderr, flush=True)
    made_by = "msmodelslim 26.1.0 with the packages of pipeline/stages/quantize/constraints.txt, on a CPU"
    GOLDEN.write_text(json.dumps({"made_by": made_by, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main(os.environ)
