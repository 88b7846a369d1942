"""The streaming engine against digests of what the real msmodelslim wrote: weights, index and description."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from support.quantizing import CASES, SMALL_UNIT, digests, golden, make_source

from pipeline.reports.progress import open_progress
from pipeline.stages.quantize.recipes import find_recipe
from pipeline.stages.quantize.stage import quantize
from pipeline.weights.check import DESCRIPTION
from pipeline.weights.quant.modules import parameters
from pipeline.weights.quant.parts import INDEX, description_text, index_text, plan_output, split
from pipeline.weights.quant.streaming import bytes_to_read, streaming
from pipeline.weights.shards.config import read_config
from pipeline.weights.shards.source import open_source

QUIET = open_progress(quiet=True)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.split])
def test_writes_the_bytes_of_msmodelslim(name: str, tmp_path: Path) -> None:
    source = make_source(name, tmp_path / "source")
    made = quantize(source, tmp_path / "made", QUIET, recipe="w8a8-dynamic")
    assert digests(made.directory) == golden()[name]
    assert made.record.engine == "streaming"


def test_splits_into_the_files_of_msmodelslim(tmp_path: Path) -> None:
    name = "qwen3.5-split-bf16"
    source = open_source(make_source(name, tmp_path / "source"))
    config = read_config(source.directory)
    recipe = find_recipe("w8a8-dynamic", config.architecture, where="")
    written = plan_output(parameters(config, source), recipe.selections())
    parts = split(written, 4 * SMALL_UNIT)
    (tmp_path / "made").mkdir()
    read: list[int] = []
    with streaming(source, allow_nonfinite=False, on_bytes=read.append) as stream:
        records = {part.name: stream.write(part, tmp_path / "made")[0].sha256 for part in parts}
    for file, text in ((INDEX, index_text(parts)), (DESCRIPTION, description_text(written))):
        records[file] = hashlib.sha256(text.encode()).hexdigest()
    assert records == golden()[name]
    assert len(parts) > 5
    assert sum(read) == bytes_to_read(written)
