"""When a directory of weights is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.demo.model import make_model
from pipeline.errors import DuopackError
from pipeline.weights.check import check_weights

FIRST = "model.safetensors-00001-of-00002.safetensors"
SECOND = "model.safetensors-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    return tmp_path / "model"


def write(path: Path, names, dtype="U8") -> None:
    header, end = {}, 0
    for name in names:
        header[name] = {"dtype": dtype, "shape": [4], "data_offsets": [end, end + 4]}
        end += 4
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    directory = tmp_path / "shards"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    for rank in range(2):
        write(directory / f"model-rank-{rank}-part-0.safetensors", ["a", "b"])
        write(directory / f"model-rank-{rank}-part-1.safetensors", ["c"])
    return directory


def check(directory: Path, load_format="auto", ranks=1, **more):
    return check_weights(directory, load_format=load_format, tensor_parallel=ranks, **more)


def refused(directory: Path, *args, **more) -> str:
    with pytest.raises(DuopackError) as caught:
        check(directory, *args, **more)
    assert caught.value.mend
    return str(caught.value)


def change_index(model: Path, change) -> None:
    index = json.loads((model / INDEX).read_text())
    change(index)
    (model / INDEX).write_text(json.dumps(index))


def test_a_model_as_the_hub_has_it_passes_and_is_summed_up(model):
    summary = check(model)
    assert summary.files == (FIRST, SECOND)
    assert summary.dtypes == {"BF16", "F32"}
    assert summary.size == json.loads((model / INDEX).read_text())["metadata"]["total_size"]
    assert not summary.quantized
    assert summary.ranks is None


def test_a_single_file_needs_no_index(model):
    for name in (SECOND, INDEX):
        (model / name).unlink()
    assert check(model).files == (FIRST,)


def test_several_files_without_an_index_are_refused(model):
    (model / INDEX).unlink()
    assert "2 weight files and no index" in refused(model)


def test_a_missing_shard_is_named(model):
    (model / SECOND).unlink()
    assert SECOND in refused(model)


def test_a_shard_that_the_index_does_not_name_is_refused(model):
    write(model / "model-extra.safetensors", ["x"])
    assert "does not name model-extra.safetensors" in refused(model)


def test_only_the_given_files_count(model):
    write(model / "model-extra.safetensors", ["x"])
    names = {path.name for path in model.iterdir()} - {"model-extra.safetensors"}
    assert check(model, files=names).files == (FIRST, SECOND)


def test_a_tensor_in_another_file_than_the_index_says_is_named(model):
    def move(index):
        name = next(tensor for tensor, file in index["weight_map"].items() if file == FIRST)
        index["weight_map"][name] = SECOND

    change_index(model, move)
    assert "does not look for" in refused(model) or "looks for" in refused(model)


def test_an_index_that_reaches_outside_is_refused(model):
    change_index(model, lambda index: index["weight_map"].update(x="../outside.safetensors"))
    assert "../outside.safetensors" in refused(model)


def test_a_wrong_total_is_a_finding_that_a_model_can_allow(model):
    change_index(model, lambda index: index["metadata"].update(total_size=1))
    assert "total_size is 1" in refused(model)
    assert check(model, allow=("index-total",)).tensors > 0


def test_a_truncated_shard_says_how_much_is_missing(model):
    path = model / SECOND
    path.write_bytes(path.read_bytes()[:-1000])
    assert "1000 B" in refused(model)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(model, content):
    (model / "config.json").write_text(content)
    assert "config.json" in refused(model)


def test_a_missing_config_is_refused(model):
    (model / "config.json").unlink()
    assert "config.json is missing" in refused(model)


def test_quantized_weights_need_their_description(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path / "quant_model_weights.safetensors", ["model.layers.0.mlp.down_proj.weight"], "I8")
    assert "quant_model_description.json is missing" in refused(tmp_path)
    (tmp_path / "quant_model_description.json").write_text("{}")
    assert check(tmp_path).quantized


def test_shards_of_the_right_size_pass(shards):
    summary = check(shards, "sharded_state", 2)
    assert summary.ranks == 2
    assert summary.tensors == 6


def test_shards_for_another_number_of_ranks_are_refused(shards):
    assert "split for 2 ranks, the profile has 1" in refused(shards, "sharded_state", 1)
    assert "rank 2, 3 of 4 has no weights" in refused(shards, "sharded_state", 4)


def test_a_missing_part_of_a_rank_is_refused(shards):
    (shards / "model-rank-1-part-1.safetensors").unlink()
    assert "do not have the same tensors: c" in refused(shards, "sharded_state", 2)
    (shards / "model-rank-0-part-0.safetensors").unlink()
    assert "rank 0 has the parts [1]" in refused(shards, "sharded_state", 2)


def test_a_tensor_twice_in_a_rank_is_refused(shards):
    write(shards / "model-rank-1-part-1.safetensors", ["a"])
    assert "two parts of rank 1 have a" in refused(shards, "sharded_state", 2)


def test_split_and_unsplit_are_not_confused(model, shards):
    assert "split per rank" in refused(shards)
    assert "not named as a part of a rank" in refused(model, "sharded_state", 2)
