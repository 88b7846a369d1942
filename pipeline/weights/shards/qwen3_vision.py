"""The vision tower of Qwen3.5 (vLLM's Qwen3_VisionTransformer): q, k and v are thirds of one tensor."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.weights.shards.layers import Member, Model, column, layer_norm, row, whole
from pipeline.weights.shards.plan import Target

SOURCE, TARGET = "model.visual", "visual"


def targets(model: Model) -> Iterator[Target]:
    config = model.config.section("vision_config")
    config.refuse_if("deepstack_visual_indexes", "the mergers of intermediate layers are not in the plan")
    config.divided(model.ranks, "num_heads", "intermediate_size")
    hidden, inner = config.natural("hidden_size"), config.natural("intermediate_size")
    patch, frames = config.natural("patch_size"), config.natural("temporal_patch_size")
    kernel = (hidden, config.natural("in_channels", default=3), frames, patch, patch)
    positions = config.natural("num_position_embeddings")
    merged = hidden * config.natural("spatial_merge_size") ** 2
    merger_out = config.natural("out_hidden_size")

    yield whole(f"{TARGET}.patch_embed.proj.weight", f"{SOURCE}.patch_embed.proj.weight", *kernel)
    yield whole(f"{TARGET}.patch_embed.proj.bias", f"{SOURCE}.patch_embed.proj.bias", hidden)
    yield whole(f"{TARGET}.pos_embed.weight", f"{SOURCE}.pos_embed.weight", positions, hidden)
    yield from layer_norm(f"{TARGET}.merger.norm", f"{SOURCE}.merger.norm", hidden)
    yield from _mlp(model, "merger", merged, merged, merger_out)
    for number in range(config.natural("depth")):
        block = f"blocks.{number}"
        yield from layer_norm(f"{TARGET}.{block}.norm1", f"{SOURCE}.{block}.norm1", hidden)
        yield from layer_norm(f"{TARGET}.{block}.norm2", f"{SOURCE}.{block}.norm2", hidden)
        qkv = Member(f"{SOURCE}.{block}.attn.qkv", 3 * hidden, segments=(hidden,) * 3)
        yield from column(model, f"{TARGET}.{block}.attn.qkv", [qkv], hidden, bias=True)
        proj = f"{block}.attn.proj"
        yield from row(model, f"{TARGET}.{proj}", f"{SOURCE}.{proj}", hidden, hidden, bias=True)
        yield from _mlp(model, f"{block}.mlp", hidden, inner, hidden)


def _mlp(model: Model, name: str, inputs: int, inner: int, outputs: int) -> Iterator[Target]:
    first = [Member(f"{SOURCE}.{name}.linear_fc1", inner)]
    yield from column(model, f"{TARGET}.{name}.linear_fc1", first, inputs, bias=True)
    second = f"{name}.linear_fc2"
    yield from row(model, f"{TARGET}.{second}", f"{SOURCE}.{second}", outputs, inner, bias=True)
