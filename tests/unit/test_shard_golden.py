"""What we write is, bit for bit, what vLLM and vllm-ascend hold: every golden case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.golden import digest_without, digests, manifest, unpack

from pipeline.weights.shards.binding import bind
from pipeline.weights.shards.config import Config, read_config
from pipeline.weights.shards.plans import plan_model
from pipeline.weights.shards.quantization import Quantization, read_quantization
from pipeline.weights.shards.source import open_source
from pipeline.weights.shards.writer import write_ranks

CASES = [(model, int(ranks)) for model, by_ranks in digests().items() for ranks in by_ranks]
FLOATS = [
    (model, ranks, platform) for model, ranks in CASES if "FLOAT" in model for platform in ("p310", "cpu")
]
QUANTIZED = [(model, ranks, "p310") for model, ranks in CASES if "FLOAT" not in model]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("golden"))


def case_of(model: str, ranks: int, platform: str) -> str:
    name, _, quantization = model.rpartition("-")
    return f"{name}__{quantization}__tp{ranks}__{platform}"


def planned(
    config: Config, quantization: Quantization, ranks: int, platform: str
) -> list[tuple[object, ...]]:
    plan = plan_model(config, quantization, ranks, "cpu" if platform == "cpu" else "310p")
    return [(target.name, target.dtype, list(target.shape)) for target in plan.targets]


def registered(rank: dict[str, list[object]]) -> list[tuple[object, ...]]:
    return [(name, dtype, shape) for name, (dtype, shape, _) in rank.items()]


@pytest.mark.parametrize(("model", "ranks", "platform"), [*FLOATS, *QUANTIZED])
def test_a_plan_has_the_names_dtypes_shapes_and_order_of_vllm_on_every_rank(golden, model, ranks, platform):
    plan = planned(read_config(golden / model), read_quantization(golden / model), ranks, platform)
    for rank in manifest(golden, case_of(model, ranks, platform)):
        assert plan == registered(rank)


@pytest.mark.parametrize(("model", "ranks"), CASES)
@pytest.mark.parametrize("block", [4 << 20, 1 << 12])
def test_every_rank_s_file_is_bit_for_bit_what_vllm_wrote(golden, tmp_path, monkeypatch, model, ranks, block):
    for module in ("pipeline.weights.safetensors_writer", "pipeline.weights.shards.writer"):
        monkeypatch.setattr(f"{module}.BLOCK", block)
    source = open_source(golden / model)
    plan = plan_model(read_config(golden / model), read_quantization(golden / model), ranks, "310p")
    records = write_ranks(
        bind(plan, source), source, tmp_path, ranks=ranks, part_size=1 << 30, on_bytes=lambda _: None
    )
    free = manifest(golden, case_of(model, ranks, "p310"))
    found = [
        digest_without(tmp_path / record.path, [name for name, entry in rank.items() if entry[2] == "uninit"])
        for record, rank in zip(records, free, strict=True)
    ]
    assert found == digests()[model][str(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_compressed_weights_are_known_by_their_shapes_though_they_cannot_be_made_here(golden, ranks):
    model = golden / "qwen3-untied-v300-W8A8S"
    described = (model / "quant_model_description.json").read_text().replace("W8A8S", "W8A8SC")
    types = {name: value for name, value in json.loads(described).items() if isinstance(value, str)}
    plan = planned(read_config(model), Quantization(types, "W8A8SC", "here"), ranks, "p310")
    for rank in manifest(golden, f"qwen3-untied-v300__W8A8SC__tp{ranks}__p310"):
        assert plan == registered(rank)


def test_the_shared_expert_of_a_quantized_qwen3_5_moe_has_310p_s_names(golden):
    config = read_config(golden / "qwen35-untied-v300-FLOAT")
    text = config.values["text_config"] | {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 8,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }
    top = config.values | {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}
    types = {f"{name}.weight": type_ for name, type_ in moe_types(text["layer_types"])}
    plan = planned(Config(top, "here"), Quantization(types, "W8A8_DYNAMIC", "here"), 2, "p310")
    for rank in manifest(golden, "qwen35moe-v300__W8A8_DYNAMIC__tp2__p310"):
        assert plan == registered(rank)


def moe_types(layer_types):
    """The modules of a Qwen3.5-MoE as msmodelslim's recipe quantizes them."""
    for number, kind in enumerate(layer_types):
        layer = f"model.language_model.layers.{number}"
        if kind == "full_attention":
            yield from ((f"{layer}.self_attn.{part}_proj", "W8A8_DYNAMIC") for part in "qkv")
            yield f"{layer}.self_attn.o_proj", "FLOAT"
        else:
            parts = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
            yield from ((f"{layer}.linear_attn.{part}", "FLOAT") for part in parts)
        for part in ("gate_proj", "up_proj", "down_proj"):
            yield f"{layer}.mlp.shared_expert.{part}", "FLOAT"
            yield from ((f"{layer}.mlp.experts.{expert}.{part}", "W8A8_DYNAMIC") for expert in range(8))
    for module in ("merger.linear_fc1", "merger.linear_fc2"):
        yield f"model.visual.{module}", "FLOAT"
    for block in range(2):
        for part in ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"):
            yield f"model.visual.blocks.{block}.{part}", "FLOAT"
