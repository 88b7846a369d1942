"""What cannot be split rightly is refused by name, before a byte is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_checkpoints import Checkpoint, qwen3, qwen3_5, qwen3_moe

import pipeline.weights.shards.writer as writer
from pipeline.errors import DuopackError, UsageError
from pipeline.reports.progress import open_progress
from pipeline.stages.shard import shard


def refused(
    checkpoint: Checkpoint,
    tmp_path: Path,
    *,
    ranks: int = 2,
    platform: str = "310p",
    kind=DuopackError,
    **more: Any,
) -> str:
    """The refusal's words; nothing may be left at the destination."""
    source = checkpoint.write(tmp_path / "source")
    return refused_directory(source, tmp_path, ranks=ranks, platform=platform, kind=kind, **more)


def refused_directory(
    source: Path, tmp_path: Path, *, ranks: int = 2, platform="310p", kind=DuopackError, **more
):
    out = tmp_path / "out" / "tp"
    with pytest.raises(kind) as caught:
        shard(source, out, open_progress(quiet=True), ranks=ranks, platform=platform, **more)
    assert caught.value.mend
    assert not out.exists()
    assert not (tmp_path / "out").exists() or {path.name for path in out.parent.iterdir()} <= {".tp.lock"}
    return str(caught.value)


def changed(checkpoint: Checkpoint, **config: Any) -> Checkpoint:
    return Checkpoint(checkpoint.config | config, checkpoint.tensors, checkpoint.description)


def quantized(type_: str, checkpoint: Checkpoint | None = None, **others: str) -> Checkpoint:
    """A checkpoint whose description calls every linear of its layers so; the weights stay what they are."""
    checkpoint = checkpoint or qwen3()
    linear = ("_proj.weight",)
    types = {name: type_ if name.endswith(linear) else "FLOAT" for name in checkpoint.tensors}
    return Checkpoint(checkpoint.config, checkpoint.tensors, {"model_quant_type": type_} | types | others)


@pytest.mark.parametrize("ranks", [0, 3, -1, 16])
def test_a_tp_that_is_none(tmp_path, ranks):
    assert f"{ranks} is no tensor-parallel size" in refused(qwen3(), tmp_path, ranks=ranks, kind=UsageError)


def test_a_vllm_whose_tensors_are_not_known(tmp_path):
    assert "what vLLM 0.9.1 registers is not known" in refused(
        qwen3(), tmp_path, kind=UsageError, vllm="0.9.1"
    )


def test_an_architecture_without_a_plan_is_named(tmp_path):
    text = refused(changed(qwen3(), architectures=["LlamaForCausalLM"]), tmp_path)
    assert "no plan for the architecture 'LlamaForCausalLM'" in text
    assert "Qwen3ForCausalLM" in text


@pytest.mark.parametrize("value", [None, [], [3], "Qwen3ForCausalLM"])
def test_a_config_without_an_architecture(tmp_path, value):
    assert "names no architecture" in refused(changed(qwen3(), architectures=value), tmp_path)


@pytest.mark.parametrize(
    ("checkpoint", "ranks", "key"),
    [
        (qwen3(num_attention_heads=6), 4, "num_attention_heads is 6"),
        (qwen3(num_attention_heads=12, num_key_value_heads=3), 4, "num_key_value_heads is 3"),
        (qwen3(intermediate_size=90), 4, "intermediate_size is 90"),
        (qwen3_moe(moe_intermediate_size=34), 4, "moe_intermediate_size is 34"),
        (qwen3_5(linear_num_key_heads=2), 4, "text_config.linear_num_key_heads is 2"),
        (
            qwen3_5(moe=True, shared_expert_intermediate_size=34),
            4,
            "text_config.shared_expert_intermediate_size is 34",
        ),
        (qwen3_5(num_attention_heads=8, num_key_value_heads=8), 8, "vision_config.num_heads is 4"),
    ],
)
def test_dimensions_that_the_ranks_cannot_share_are_named(tmp_path, checkpoint, ranks, key):
    text = refused(checkpoint, tmp_path, ranks=ranks)
    assert f"{key}, not divisible by the {ranks} ranks" in text


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "64", 1 << 40, [64]])
def test_a_size_that_is_none_is_named_with_its_key(tmp_path, key, value):
    assert f"{key} is" in refused(changed(qwen3(), **{key: value}), tmp_path)


def test_a_missing_size_is_named(tmp_path):
    checkpoint = qwen3()
    del checkpoint.config["intermediate_size"]
    assert "intermediate_size is missing" in refused(checkpoint, tmp_path)


def test_layer_types_that_do_not_cover_the_layers(tmp_path):
    checkpoint = qwen3_5()
    checkpoint.config["text_config"]["layer_types"] = ["full_attention"]
    assert "does not name full_attention or linear_attention for each of 4 layers" in refused(
        checkpoint, tmp_path
    )


def test_a_model_that_says_it_is_quantized_in_its_config(tmp_path):
    checkpoint = changed(qwen3(), quantization_config={"quant_method": "compressed-tensors"})
    assert "quantization_config is set" in refused(checkpoint, tmp_path)


def test_what_no_plan_has_tensors_for(tmp_path):
    checkpoint = qwen3_5()
    checkpoint.config["vision_config"]["deepstack_visual_indexes"] = [5]
    assert "deepstack_visual_indexes is set" in refused(checkpoint, tmp_path)


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "lm_head.weight", "model.layers.1.self_attn.k_proj.weight"]
)
def test_a_missing_tensor_is_named(tmp_path, name):
    checkpoint = qwen3()
    del checkpoint.tensors[name]
    assert f"{name} is missing" in refused(checkpoint, tmp_path)


def test_many_missing_tensors_are_counted(tmp_path):
    assert "and 30 more tensors are missing" in refused(changed(qwen3(), num_hidden_layers=5), tmp_path)


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "x"]
)
def test_an_extra_tensor_is_named(tmp_path, name):
    checkpoint = qwen3()
    checkpoint.tensors[name] = checkpoint.tensors["model.norm.weight"]
    assert f"{name} has no place in a Qwen3ForCausalLM" in refused(checkpoint, tmp_path)


def test_an_output_head_of_its_own_in_a_tied_qwen3_5(tmp_path):
    checkpoint = qwen3_5(tie_word_embeddings=True)
    checkpoint.tensors["lm_head.weight"] = checkpoint.tensors["model.language_model.embed_tokens.weight"]
    assert "lm_head.weight has no place" in refused(checkpoint, tmp_path)


def test_a_shape_against_config_json(tmp_path):
    text = refused(changed(qwen3(), vocab_size=131), tmp_path)
    assert (
        "model.embed_tokens.weight in model.safetensors is [130, 64], but by config.json it is [131, 64]"
        in text
    )


def test_a_dtype_that_does_not_fit_its_parameter(tmp_path):
    checkpoint = qwen3()
    checkpoint.tensors["model.norm.weight"] = ("I32", np.zeros(64, "<i4"))
    text = refused(checkpoint, tmp_path)
    assert (
        "model.norm.weight in model.safetensors is I32, which cannot become the F16 of model.norm.weight"
        in text
    )


def test_a_file_that_is_cut_off(tmp_path):
    source = qwen3().write(tmp_path / "source")
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "it is cut off" in refused_directory(source, tmp_path)


def test_a_directory_that_is_split_already(tmp_path):
    source = qwen3().write(tmp_path / "source", "model-rank-0-part-0.safetensors")
    assert "is split per rank" in refused_directory(source, tmp_path)


def test_a_directory_without_a_config(tmp_path):
    source = qwen3().write(tmp_path / "source")
    (source / "config.json").unlink()
    assert "config.json is missing" in refused_directory(source, tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"architectures": ["Qwen3ForCausalLM"', "\x00"])
def test_a_config_that_is_no_json_object(tmp_path, content):
    source = qwen3().write(tmp_path / "source")
    (source / "config.json").write_text(content)
    assert "it is not" in refused_directory(source, tmp_path)


@pytest.mark.parametrize("type_", ["W4A16", "W8A8_MIX", "W8A16"])
def test_a_quantization_that_310p_does_not_know(tmp_path, type_):
    text = refused(quantized(type_), tmp_path)
    assert f"is {type_}; for linear layers 310P knows only FLOAT, W8A8, W8A8_DYNAMIC, W8A8S, W8A8SC" in text


def test_experts_quantized_as_310p_does_not_know_them(tmp_path):
    checkpoint = quantized("W8A8", qwen3_moe(mlp_only_layers=[]))
    assert "for MoE layers 310P knows only FLOAT, W8A8_DYNAMIC" in refused(checkpoint, tmp_path)


def test_fused_linears_of_two_types(tmp_path):
    name = "model.layers.1.self_attn.k_proj"
    text = refused(quantized("W8A8", **{f"{name}.weight": "W8A8_DYNAMIC"}), tmp_path)
    assert f"{name} is W8A8_DYNAMIC, but what it is fused with is W8A8" in text


def test_a_linear_that_the_description_does_not_have(tmp_path):
    checkpoint = quantized("W8A8")
    del checkpoint.description["model.layers.0.mlp.up_proj.weight"]
    assert "it has no entry for model.layers.0.mlp.up_proj.weight" in refused(checkpoint, tmp_path)


def test_a_quantized_output_head(tmp_path):
    assert "lm_head is W8A8, but" in refused(quantized("W8A8", **{"lm_head.weight": "W8A8"}), tmp_path)


def test_a_dynamic_linear_with_a_bias(tmp_path):
    text = refused(quantized("W8A8_DYNAMIC", qwen3(attention_bias=True)), tmp_path)
    assert "is W8A8_DYNAMIC and has a bias" in text


def test_weights_that_are_compressed_for_a_rank_already(tmp_path):
    assert "W8A8SC" in refused(quantized("W8A8SC"), tmp_path)


def test_quantized_weights_for_plain_vllm(tmp_path):
    assert "plain vLLM does not load W8A8" in refused(quantized("W8A8"), tmp_path, platform="cpu")


def test_float_weights_that_the_description_calls_quantized(tmp_path):
    assert "53 more tensors are missing" in refused(quantized("W8A8"), tmp_path)


@pytest.mark.parametrize(
    ("value", "largest"), [(2.0**17, "131072"), (-(2.0**100), "-1.26765e+30"), (float("inf"), "98304")]
)
@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_value_that_fp16_cannot_hold_is_named_counted_and_leaves_nothing(tmp_path, name, value, largest):
    checkpoint = qwen3()
    values = checkpoint.tensors[name][1]
    values.reshape(-1)[[3, -1]] = np.array([value, 98304.0], "<f4").view("<u2")[1::2]
    text = refused(checkpoint, tmp_path)
    assert (
        f"2 of {values.size} values of {name} do not fit: the largest, {largest}, is beyond fp16's 65504"
        in text
    )


def test_a_destination_that_lies_in_the_source_or_around_it(tmp_path):
    source = qwen3().write(tmp_path / "a" / "source")
    for destination in (source, source / "tp2", tmp_path / "a"):
        with pytest.raises(UsageError, match="lie in each other"):
            shard(source, destination, open_progress(quiet=True), ranks=2)


def test_a_destination_that_holds_someone_s_files(tmp_path):
    source = qwen3().write(tmp_path / "source")
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="no finished result"):
        shard(source, out, open_progress(quiet=True), ranks=2)
    assert (out / "thesis.tex").read_text() == "years of work"


def test_a_file_where_the_destination_would_be(tmp_path):
    source = qwen3().write(tmp_path / "source")
    (tmp_path / "out").write_text("x")
    with pytest.raises(UsageError, match="no directory"):
        shard(source, tmp_path / "out", open_progress(quiet=True), ranks=2)


def test_a_link_in_the_source(tmp_path):
    source = qwen3().write(tmp_path / "source")
    (source / "vocab.json").symlink_to("/etc/passwd")
    assert "is a symbolic link" in refused_directory(source, tmp_path)


@pytest.mark.parametrize("name", ["self_attn.k_proj.input_scale", "mlp.up_proj.input_offset"])
def test_scales_of_fused_linears_that_differ_before_anything_is_written(tmp_path, monkeypatch, name):
    checkpoint = static(qwen3(num_hidden_layers=1))
    checkpoint.tensors[f"model.layers.0.{name}"] = ("F32", np.array([0.5], "<f4"))
    monkeypatch.setattr(writer, "SafetensorsWriter", lambda *_: pytest.fail("began to write"))
    text = refused(checkpoint, tmp_path)
    assert f"model.layers.0.{name}" in text
    assert "differ" in text


def test_an_offset_that_int8_cannot_hold(tmp_path):
    checkpoint = static(qwen3(num_hidden_layers=1))
    checkpoint.tensors["model.layers.0.mlp.down_proj.input_offset"] = ("F32", np.array([200.0], "<f4"))
    text = refused(checkpoint, tmp_path)
    assert "down_proj.input_offset do not fit: the largest, 200, is no whole number" in text


def static(checkpoint: Checkpoint) -> Checkpoint:
    """W8A8 as msmodelslim writes it."""
    described = quantized("W8A8", checkpoint)
    tensors = dict(described.tensors)
    for name, (_, values) in described.tensors.items():
        if name.endswith("_proj.weight"):
            module, rows = name.removesuffix(".weight"), values.shape[0]
            tensors[name] = ("I8", (values % 251).astype("|i1"))
            tensors[f"{module}.input_scale"] = ("F32", np.array([0.25], "<f4"))
            tensors[f"{module}.input_offset"] = ("F32", np.array([-7.0], "<f4"))
            tensors[f"{module}.quant_bias"] = ("I32", np.arange(rows, dtype="<i4"))
            tensors[f"{module}.deq_scale"] = ("F32", np.linspace(1e-4, 2e-4, rows, dtype="<f4"))
    return Checkpoint(described.config, tensors, described.description)


def test_static_weights_with_a_float32_deq_scale_are_taken_and_converted_by_bits(tmp_path):
    source = static(qwen3(num_hidden_layers=1)).write(tmp_path / "source")
    made = shard(source, tmp_path / "out", open_progress(quiet=True), ranks=2)
    assert made.record.quantization == "W8A8"
    assert json.loads((source / "quant_model_description.json").read_text())["model_quant_type"] == "W8A8"
