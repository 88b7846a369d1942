"""Whatever the dimensions and the TP: the ranks together are the checkpoint, put together again by other means."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_checkpoints import Checkpoint, qwen3, qwen3_5, qwen3_moe

import pipeline.weights.safetensors_writer
import pipeline.weights.shards.writer
from pipeline.weights.safetensors import read_header
from pipeline.weights.shards.binding import bind
from pipeline.weights.shards.config import read_config
from pipeline.weights.shards.plans import plan_model
from pipeline.weights.shards.quantization import read_quantization
from pipeline.weights.shards.source import open_source
from pipeline.weights.shards.writer import write_ranks

NUMPY = {"F16": "<f2", "F32": "<f4", "I8": "|i1", "I32": "<i4", "I64": "<i8"}
Rank = dict[str, np.ndarray]

TPS = st.sampled_from([1, 2, 4, 8])
BLOCKS = st.sampled_from([64, 1 << 12, 4 << 20])
PARTS = st.sampled_from([1, 3000, 1 << 30])


def ranks_of(checkpoint: Checkpoint, tp: int, block: int = 4 << 20, part_size: int = 1 << 30) -> list[Rank]:
    """Splits, and reads every rank's parts with numpy alone."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.weights.safetensors_writer, "BLOCK", block)
        patch.setattr(pipeline.weights.shards.writer, "BLOCK", block)
        directory = checkpoint.write(Path(name) / "source")
        source = open_source(directory)
        plan = plan_model(read_config(directory), read_quantization(directory), tp, "310p")
        bound = bind(plan, source)
        write_ranks(bound, source, Path(name), ranks=tp, part_size=part_size, on_bytes=lambda _: None)
        return [loaded(sorted(Path(name).glob(f"model-rank-{rank}-part-*"))) for rank in range(tp)]


def loaded(paths: list[Path]) -> Rank:
    tensors: Rank = {}
    for path in paths:
        data = path.read_bytes()
        for key, one in read_header(path).tensors.items():
            assert key not in tensors
            tensors[key] = np.frombuffer(data[one.begin : one.end], NUMPY[one.dtype]).reshape(one.shape)
    return tensors


def f16(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A tensor of the checkpoint as vLLM would cast it."""
    dtype, values = checkpoint.tensors[name]
    wide = (values.astype("<u4") << 16).view("<f4") if dtype == "BF16" else values
    return wide.astype("<f2")


def joined(ranks: list[Rank], name: str, axis: int) -> np.ndarray:
    return np.concatenate([rank[name] for rank in ranks], axis)


def unfused(
    ranks: list[Rank], name: str, sizes: list[int], copies: list[int] | None = None
) -> list[np.ndarray]:
    """What was fused, taken apart on each rank and joined again; `copies` ranks in a row hold the same share."""
    bounds = np.cumsum([0, *sizes])
    members = []
    for number, repeated in enumerate(copies or [1] * len(sizes)):
        shares = [rank[name][bounds[number] : bounds[number + 1]] for rank in ranks]
        for first in range(0, len(shares), repeated):
            assert all((share == shares[first]).all() for share in shares[first : first + repeated])
        members.append(np.concatenate(shares[::repeated]))
    return members


def assert_attention(ranks, checkpoint, source, target, config, gate=1):
    tp, size = len(ranks), config["head_dim"]
    queries = gate * config["num_attention_heads"] * size // tp
    shards = min(tp, config["num_key_value_heads"])
    kv = config["num_key_value_heads"] * size // shards
    parts = unfused(ranks, f"{target}.qkv_proj.weight", [queries, kv, kv], [1, tp // shards, tp // shards])
    for part, found in zip("qkv", parts, strict=True):
        assert (found == f16(checkpoint, f"{source}.{part}_proj.weight")).all()
    assert (joined(ranks, f"{target}.o_proj.weight", 1) == f16(checkpoint, f"{source}.o_proj.weight")).all()
    for name in ("_k_scale", "_v_scale", "_q_scale", "_prob_scale"):
        assert all(rank[f"{target}.attn.{name}"] == 1.0 for rank in ranks)


def assert_mlp(ranks, checkpoint, source, target):
    inner = checkpoint.tensors[f"{source}.up_proj.weight"][1].shape[0] // len(ranks)
    gate, up = unfused(ranks, f"{target}.gate_up_proj.weight", [inner, inner])
    assert (gate == f16(checkpoint, f"{source}.gate_proj.weight")).all()
    assert (up == f16(checkpoint, f"{source}.up_proj.weight")).all()
    assert (
        joined(ranks, f"{target}.down_proj.weight", 1) == f16(checkpoint, f"{source}.down_proj.weight")
    ).all()


def assert_vocabulary(ranks, checkpoint, source, target):
    rows = f16(checkpoint, source)
    found = joined(ranks, target, 0)
    assert len(found) % 64 == 0
    assert len(found) - len(rows) < 64
    assert (found[: len(rows)] == rows).all()
    assert not found[len(rows) :].any()


@st.composite
def dense(draw: st.DrawFn) -> tuple[Checkpoint, int]:
    tp = draw(TPS)
    kv = draw(st.sampled_from([1, 2, 4, 8]))
    checkpoint = qwen3(
        draw(st.integers(0, 9)),
        hidden_size=draw(st.integers(1, 40)),
        intermediate_size=tp * draw(st.integers(1, 9)),
        head_dim=draw(st.integers(1, 9)),
        num_attention_heads=max(tp, kv) * draw(st.integers(1, 2)),
        num_key_value_heads=kv,
        vocab_size=draw(st.integers(1, 200)),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        num_hidden_layers=1,
    )
    return checkpoint, tp


@settings(max_examples=60, deadline=None)
@given(dense(), BLOCKS, PARTS)
def test_the_ranks_of_a_dense_model_together_are_its_checkpoint(case, block, part_size):
    checkpoint, tp = case
    config = checkpoint.config
    ranks = ranks_of(checkpoint, tp, block, part_size)
    layer = "model.layers.0"
    assert_attention(ranks, checkpoint, f"{layer}.self_attn", f"{layer}.self_attn", config)
    assert_mlp(ranks, checkpoint, f"{layer}.mlp", f"{layer}.mlp")
    tied = config["tie_word_embeddings"]
    table = "lm_head.weight" if tied else "model.embed_tokens.weight"
    assert_vocabulary(ranks, checkpoint, "model.embed_tokens.weight", table)
    if tied:
        assert all("model.embed_tokens.weight" not in rank for rank in ranks)
    else:
        assert_vocabulary(ranks, checkpoint, "lm_head.weight", "lm_head.weight")
    if config["attention_bias"]:
        biases = np.concatenate([rank[f"{layer}.self_attn.qkv_proj.bias"][:1] for rank in ranks])
        step = len(checkpoint.tensors[f"{layer}.self_attn.q_proj.bias"][1]) // tp
        assert (biases == f16(checkpoint, f"{layer}.self_attn.q_proj.bias")[::step]).all()
    for rank in ranks:
        for norm in ("model.norm", f"{layer}.input_layernorm", f"{layer}.self_attn.q_norm"):
            assert (rank[f"{norm}.weight"] == f16(checkpoint, f"{norm}.weight")).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 30), TPS, BLOCKS)
def test_the_ranks_of_experts_together_are_each_expert(count, width, hidden, tp, block):
    inner = width * tp
    checkpoint = qwen3_moe(
        hidden_size=hidden,
        num_experts=count,
        moe_intermediate_size=inner,
        num_attention_heads=8,
        mlp_only_layers=[],
        num_hidden_layers=1,
    )
    ranks = ranks_of(checkpoint, tp, block)
    target = "model.layers.0.mlp.experts"
    for number in range(count):
        stacked = [{"w13": rank[f"{target}.w13_weight"][number]} for rank in ranks]
        gate, up = unfused(stacked, "w13", [width, width])
        down = np.concatenate([rank[f"{target}.w2_weight"][number] for rank in ranks], 1)
        expert = f"{target}.{number}"
        assert (gate == f16(checkpoint, f"{expert}.gate_proj.weight")).all()
        assert (up == f16(checkpoint, f"{expert}.up_proj.weight")).all()
        assert (down == f16(checkpoint, f"{expert}.down_proj.weight")).all()


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 20),
    st.sampled_from([1, 2, 4]),
    BLOCKS,
)
def test_the_ranks_of_linear_attention_together_are_its_checkpoint(groups, key, value, hidden, tp, block):
    checkpoint = qwen3_5(
        hidden_size=hidden,
        linear_num_key_heads=tp * groups,
        linear_num_value_heads=2 * tp * groups,
        linear_key_head_dim=key,
        linear_value_head_dim=value,
    )
    ranks = ranks_of(checkpoint, tp, block)
    source, target = "model.language_model.layers.0.linear_attn", "language_model.model.layers.0.linear_attn"
    keys, values = groups * key, 2 * groups * value
    q, k, v, z = unfused(ranks, f"{target}.in_proj_qkvz.weight", [keys, keys, values, values])
    assert (np.concatenate([q, k, v]) == f16(checkpoint, f"{source}.in_proj_qkv.weight")).all()
    assert (z == f16(checkpoint, f"{source}.in_proj_z.weight")).all()
    conv = unfused(ranks, f"{target}.conv1d.weight", [keys, keys, values])
    assert (np.concatenate(conv) == f16(checkpoint, f"{source}.conv1d.weight")).all()
    heads = 2 * groups
    b, a = unfused(ranks, f"{target}.in_proj_ba.weight", [heads, heads])
    assert (b == f16(checkpoint, f"{source}.in_proj_b.weight")).all()
    assert (a == f16(checkpoint, f"{source}.in_proj_a.weight")).all()
    decay = joined(ranks, f"{target}.A_log", 0)
    assert decay.dtype == np.float32
    assert (decay == checkpoint.tensors[f"{source}.A_log"][1]).all()
    assert_attention(
        ranks,
        checkpoint,
        "model.language_model.layers.3.self_attn",
        "language_model.model.layers.3.self_attn",
        checkpoint.config["text_config"],
        gate=2,
    )


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("block", [64, 4 << 20])
def test_experts_that_the_checkpoint_has_fused_give_the_same_shards_as_single_ones(fused, block):
    checkpoint = qwen3_5(7, moe=True, fused=fused)
    if not fused:
        whole = qwen3_5(7, moe=True)
        for name, (_, values) in whole.tensors.items():
            if name.endswith("experts.gate_up_proj"):
                for number, expert in enumerate(values):
                    single = f"{name.removesuffix('.gate_up_proj')}.{number}"
                    checkpoint.tensors[f"{single}.gate_proj.weight"] = ("BF16", expert[:32])
                    checkpoint.tensors[f"{single}.up_proj.weight"] = ("BF16", expert[32:])
            elif name.endswith("experts.down_proj"):
                for number, expert in enumerate(values):
                    single = f"{name.removesuffix('.down_proj')}.{number}"
                    checkpoint.tensors[f"{single}.down_proj.weight"] = ("BF16", expert)
            else:
                checkpoint.tensors[name] = whole.tensors[name]
    ranks = ranks_of(checkpoint, 2, block)
    expected = ranks_of(qwen3_5(7, moe=True), 2)
    for found, one in zip(ranks, expected, strict=True):
        assert list(found) == list(one)
        assert all((found[name] == one[name]).all() for name in one)
