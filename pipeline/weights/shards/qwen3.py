"""Qwen3ForCausalLM and Qwen3MoeForCausalLM: names as in the checkpoint, q/k/v and gate/up fused."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.weights.shards.config import Config
from pipeline.weights.shards.layers import (
    Member,
    Model,
    column,
    embedding,
    experts,
    kv_scales,
    mlp,
    rms_norm,
    row,
    whole,
)
from pipeline.weights.shards.plan import Target

IGNORED = (r".*\.rotary_emb\.inv_freq", r".*norm\.module\.(weight|bias)")
"""Computed by vLLM; and what an older msmodelslim wrote beside the norms."""
IGNORED_WHEN_TIED = (r"lm_head\.weight",)


def targets(model: Model) -> Iterator[Target]:
    """Every tensor of a rank, in the order of vLLM's modules."""
    config = model.config
    hidden, vocabulary = config.natural("hidden_size"), config.natural("vocab_size")
    tied = config.flag("tie_word_embeddings", default=False)
    yield embedding(
        model, "lm_head" if tied else "model.embed_tokens", "model.embed_tokens", vocabulary, hidden
    )
    for number in range(config.natural("num_hidden_layers")):
        layer = f"model.layers.{number}"
        yield from attention(model, f"{layer}.self_attn", config.flag("attention_bias", default=False))
        if _sparse(config, number):
            yield from _moe(model, f"{layer}.mlp", hidden)
        else:
            config.divided(model.ranks, "intermediate_size")
            yield from mlp(model, f"{layer}.mlp", f"{layer}.mlp", config.natural("intermediate_size"), hidden)
        yield from rms_norm(model, f"{layer}.input_layernorm", f"{layer}.input_layernorm", hidden)
        yield from rms_norm(
            model, f"{layer}.post_attention_layernorm", f"{layer}.post_attention_layernorm", hidden
        )
    yield from rms_norm(model, "model.norm", "model.norm", hidden)
    if not tied:
        yield embedding(model, "lm_head", "lm_head", vocabulary, hidden)


def ignored(model: Model) -> tuple[str, ...]:
    """Source names that vLLM passes over, as regular expressions."""
    tied = model.config.flag("tie_word_embeddings", default=False)
    return (*IGNORED, *IGNORED_WHEN_TIED) if tied else IGNORED


def attention(model: Model, name: str, bias: bool) -> Iterator[Target]:
    """Full attention with normalized q and k."""
    config = model.config
    hidden = config.natural("hidden_size")
    config.divided(model.ranks, "num_attention_heads")
    heads, size = config.natural("num_attention_heads"), head_size(config)
    members = [
        Member(f"{name}.q_proj", heads * size),
        *kv_members(model, name, size),
    ]
    yield from column(model, f"{name}.qkv_proj", members, hidden, bias=bias)
    yield from row(model, f"{name}.o_proj", f"{name}.o_proj", hidden, heads * size)
    yield from kv_scales(f"{name}.attn")
    yield from rms_norm(model, f"{name}.q_norm", f"{name}.q_norm", size)
    yield from rms_norm(model, f"{name}.k_norm", f"{name}.k_norm", size)


def head_size(config: Config) -> int:
    """`head_dim`, or what the hidden size gives each head."""
    return config.natural(
        "head_dim", default=config.natural("hidden_size") // config.natural("num_attention_heads")
    )


def kv_members(model: Model, name: str, size: int) -> tuple[Member, Member]:
    """k and v: fewer heads than ranks are held by several ranks each."""
    config = model.config
    heads = config.natural("num_key_value_heads", default=config.natural("num_attention_heads"))
    shards = min(heads, model.ranks)
    if model.ranks % shards or heads % shards:
        config.divided(model.ranks, "num_key_value_heads")
    return (
        Member(f"{name}.k_proj", heads * size, shards=shards),
        Member(f"{name}.v_proj", heads * size, shards=shards),
    )


def _sparse(config: Config, number: int) -> bool:
    """Whether a layer has experts; a dense model has none in any."""
    if config.architecture != "Qwen3MoeForCausalLM":
        return False
    step = config.natural("decoder_sparse_step", default=1)
    return number not in (config.numbers("mlp_only_layers") or ()) and (number + 1) % step == 0


def _moe(model: Model, name: str, hidden: int) -> Iterator[Target]:
    config = model.config
    config.refuse_if("shared_expert_intermediate_size", "no Qwen3-MoE model has a shared expert")
    count, inner = expert_sizes(model)
    yield whole(f"{name}.gate.weight", f"{name}.gate.weight", count, hidden)
    yield from experts(model, f"{name}.experts", f"{name}.experts", count, inner, hidden)


def expert_sizes(model: Model) -> tuple[int, int]:
    """The number of experts and the width of each."""
    model.config.divided(model.ranks, "moe_intermediate_size")
    # transformers 5 writes the first name's value under the second.
    return (
        model.config.natural("num_experts", "num_local_experts"),
        model.config.natural("moe_intermediate_size"),
    )
