"""What is wrong with a directory of shards, and what vLLM would make of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.golden import unpack
from support.tiny_checkpoints import qwen3, qwen3_5, write_tensors

from pipeline.errors import DuopackError
from pipeline.reports.progress import open_progress
from pipeline.stages.shard import shard
from pipeline.weights.safetensors import read_header
from pipeline.weights.shards.check import check_shards, report
from pipeline.weights.shards.record import RECORD

NUMPY = {"F16": "<f2", "F32": "<f4", "I8": "|i1", "I32": "<i4", "I64": "<i8"}
NAME = "model-rank-1-part-0.safetensors"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    source = qwen3().write(tmp_path / "source")
    return shard(source, tmp_path / "tp2", open_progress(quiet=True), ranks=2).directory


@pytest.fixture
def foreign(shards: Path) -> Path:
    """The same without a record, as from another tool."""
    (shards / RECORD).unlink()
    return shards


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("golden"))


def tensors_of(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    data = path.read_bytes()
    return {
        name: (one.dtype, np.frombuffer(data[one.begin : one.end], NUMPY[one.dtype]).reshape(one.shape))
        for name, one in read_header(path).tensors.items()
    }


def edit(directory: Path, **changes) -> None:
    """Rewrites rank 1 with tensors changed, added or (None) taken out; names have __ for dots."""
    tensors = tensors_of(directory / NAME)
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    write_tensors(directory / NAME, tensors)


def only(findings, id_: str):
    """The one finding besides the note that there is no record."""
    found = [one for one in findings if one.id != "record-missing"]
    assert [one.id for one in found] == [id_]
    return found[0]


def test_our_own_shards_have_nothing_wrong(shards):
    assert check_shards(shards, hash_files=True) == ()


@pytest.mark.parametrize("quantization", ["W8A8", "W8A8_DYNAMIC", "W8A8S"])
def test_quantized_shards_have_nothing_wrong(golden, tmp_path, quantization):
    source = golden / f"qwen3-untied-v300-{quantization}"
    made = shard(source, tmp_path / "tp4", open_progress(quiet=True), ranks=4)
    assert check_shards(made.directory) == ()


def test_shards_without_a_record_are_judged_by_their_files_and_it_is_said(foreign):
    (finding,) = check_shards(foreign)
    assert (finding.id, finding.severity) == ("record-missing", "note")


def test_a_missing_key_stops_vllm(foreign):
    edit(foreign, model__norm__weight=None)
    finding = only(check_shards(foreign), "key-missing")
    assert finding.sentence == "rank 1 lacks model.norm.weight"
    assert "Missing keys" in finding.effect


def test_an_extra_key_stops_vllm(foreign):
    edit(foreign, model__extra=("F16", np.zeros(1, "<f2")))
    finding = only(check_shards(foreign), "key-extra")
    assert "model.extra is no parameter of Qwen3ForCausalLM" in finding.sentence
    assert "KeyError" in finding.effect


def test_a_shorter_tensor_is_narrowed_in_silence(foreign):
    edit(foreign, model__norm__weight=("F16", np.ones(32, "<f2")))
    finding = only(check_shards(foreign), "other-shape")
    assert (finding.severity, finding.sentence) == ("error", "model.norm.weight is [32], the parameter [64]")
    assert "narrows" in finding.effect


@pytest.mark.parametrize(
    ("shape", "effect"), [((65,), "sizes do not match"), ((64, 1), "IndexError"), ((), "this one value")]
)
def test_other_shapes_are_told_apart(foreign, shape, effect):
    edit(foreign, model__norm__weight=("F16", np.ones(shape, "<f2")))
    assert effect in only(check_shards(foreign), "other-shape").effect


def test_another_float_dtype_is_cast_in_silence(foreign):
    edit(foreign, model__norm__weight=("F32", np.ones(64, "<f4")))
    finding = only(check_shards(foreign), "other-dtype")
    assert (finding.severity, finding.sentence) == ("warning", "model.norm.weight is F32, the parameter F16")
    assert "casts" in finding.effect


def test_a_float_deq_scale_becomes_zero(golden, tmp_path):
    source = golden / "qwen3-untied-v300-W8A8"
    made = shard(source, tmp_path / "tp2", open_progress(quiet=True), ranks=2)
    (made.directory / RECORD).unlink()
    name = "model.layers.0.mlp.down_proj.deq_scale"
    tensors = tensors_of(made.directory / NAME)
    bits = tensors[name][1]
    write_tensors(made.directory / NAME, tensors | {name: ("F32", bits.astype("<i4").view("<f4"))})
    finding = only(check_shards(made.directory), "other-dtype")
    assert finding.severity == "error"
    assert "every scale becomes 0" in finding.effect


def test_compressed_weights_may_be_shorter_than_registered(golden, tmp_path):
    source = golden / "qwen3-untied-v300-W8A8S"
    directory = shard(source, tmp_path / "tp1", open_progress(quiet=True), ranks=1).directory
    (directory / RECORD).unlink()
    described = directory / "quant_model_description.json"
    described.write_text(described.read_text().replace("W8A8S", "W8A8SC"))
    tensors = {}
    for name, (dtype, values) in tensors_of(directory / "model-rank-0-part-0.safetensors").items():
        tensors[name] = (dtype, values)
        if dtype == "I8" and name.endswith(".weight"):
            outputs, inputs = values.shape
            index = np.zeros(-(-inputs // 256) * -(-outputs // 128) * 8, "|i1")
            tensors[name] = (dtype, values.reshape(-1)[: outputs * inputs // 2])
            tensors[name.replace(".weight", ".index")] = ("I8", index)
            tensors[name.replace(".weight", ".info")] = ("I64", np.zeros(5, "<i8"))
    write_tensors(directory / "model-rank-0-part-0.safetensors", tensors)
    assert [one.id for one in check_shards(directory)] == ["record-missing"]


def test_a_rank_without_files_stops_vllm(foreign):
    (foreign / "model-rank-0-part-0.safetensors").unlink()
    finding = only(check_shards(foreign), "rank-missing")
    assert "Could not find checkpoint files" in finding.effect


@pytest.mark.parametrize(("served", "effect"), [(4, "stops"), (1, "garbage")])
def test_another_tp_than_it_was_split_for(shards, served, effect):
    (finding,) = check_shards(shards, tensor_parallel=served)
    assert finding.id == "other-tp"
    assert effect in finding.effect


def test_a_tp_that_the_record_denies_though_the_files_fit(shards):
    """Half of a TP 4 split looks like a TP 2 split: only shapes tell."""
    (shards / RECORD).write_text(
        (shards / RECORD).read_text().replace('"tensor_parallel": 2', '"tensor_parallel": 4')
    )
    ids = {one.id for one in check_shards(shards)}
    assert {"rank-missing", "other-shape"} <= ids


def test_one_key_in_two_parts(foreign):
    value = tensors_of(foreign / NAME)["model.norm.weight"]
    write_tensors(foreign / "model-rank-1-part-1.safetensors", {"model.norm.weight": value})
    assert "KeyError at the second" in only(check_shards(foreign), "key-twice").effect


def test_a_file_that_is_cut_off(foreign):
    (foreign / NAME).write_bytes((foreign / NAME).read_bytes()[:-1])
    assert "cut off" in only(check_shards(foreign), "file-broken").sentence


def test_a_file_that_is_not_as_recorded(shards):
    data = bytearray((shards / NAME).read_bytes())
    data[-1] ^= 1
    (shards / NAME).write_bytes(data)
    assert check_shards(shards) == ()
    assert only(check_shards(shards, hash_files=True), "file-changed").where.endswith(NAME)
    (shards / "config.json").write_bytes((shards / "config.json").read_bytes() + b" ")
    assert only(check_shards(shards), "file-size").where.endswith("config.json")
    (shards / "tokenizer_config.json").unlink()
    assert {one.id for one in check_shards(shards)} == {"file-size", "file-missing"}


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"format": 2}', '{"format": 1}', '{"format": 1, "files": 3}']
)
def test_a_damaged_record_is_a_finding_not_a_crash(shards, content):
    (shards / RECORD).write_text(content)
    assert only(check_shards(shards), "record-damaged").severity == "error"


def test_a_record_that_leaves_its_directory_is_damaged(shards):
    record = json.loads((shards / RECORD).read_text())
    record["files"][0]["path"] = "../../etc/passwd"
    (shards / RECORD).write_text(json.dumps(record))
    with_hash = check_shards(shards, hash_files=True)
    assert only(with_hash, "record-damaged").severity == "error"


def test_shards_of_the_other_platform_lack_its_names(tmp_path):
    source = qwen3_5(moe=True).write(tmp_path / "source")
    made = shard(source, tmp_path / "tp2", open_progress(quiet=True), ranks=2, platform="cpu")
    assert check_shards(made.directory) == ()
    ids = {one.id for one in check_shards(made.directory, platform="310p")}
    assert ids == {"key-missing", "key-extra"}


def test_quantized_shards_without_their_description(golden, tmp_path):
    source = golden / "qwen3-untied-v300-W8A8"
    made = shard(source, tmp_path / "tp2", open_progress(quiet=True), ranks=2)
    (made.directory / RECORD).unlink()
    (made.directory / "quant_model_description.json").unlink()
    assert "description-missing" in {one.id for one in check_shards(made.directory)}


def test_a_report_does_not_say_the_same_a_thousand_times(foreign):
    edit(foreign, **{name.replace(".", "__"): None for name in list(tensors_of(foreign / NAME))[:9]})
    lines = report(check_shards(foreign), most=2)
    assert [line.split(":")[0] for line in lines] == ["error", "error", "error", "note"]
    assert lines[2] == "error: and 7 more [key-missing]"


def test_a_directory_without_shards_is_no_place_to_check(tmp_path):
    for directory in (tmp_path, tmp_path / "none"):
        with pytest.raises(DuopackError, match="no model-rank"):
            check_shards(directory)
