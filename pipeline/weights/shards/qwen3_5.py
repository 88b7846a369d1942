"""Qwen3_5ForConditionalGeneration and Qwen3_5MoeForConditionalGeneration: the language model's layers.

Three of four layers are linear attention (GDN), whose q, k, v and z are fused though the checkpoint has q, k and
v as one tensor already; the others are full attention, whose q has a gate of the same size within each head.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.weights.shards import qwen3_vision
from pipeline.weights.shards.config import Config
from pipeline.weights.shards.layers import (
    Member,
    Model,
    column,
    embedding,
    experts,
    gate_up,
    kv_scales,
    mlp,
    row,
    whole,
)
from pipeline.weights.shards.plan import Cut, Piece, Target
from pipeline.weights.shards.qwen3 import expert_sizes, head_size, kv_members

IGNORED = (r"mtp\..*", r".*\.rotary_emb\.inv_freq")
"""The heads for speculative decoding are a model of their own in vLLM."""
SOURCE, TARGET = "model.language_model", "language_model.model"


def targets(whole_model: Model) -> Iterator[Target]:
    """Every tensor of a rank, in the order of vLLM's modules: vision first."""
    top = whole_model.config
    yield from qwen3_vision.targets(whole_model)
    model = Model(
        top.section("text_config"), whole_model.quantization, whole_model.ranks, whole_model.platform
    )
    config = model.config
    config.refuse_if("layer_scale", "its tensors are not in the plan")
    hidden, vocabulary = config.natural("hidden_size"), config.natural("vocab_size")
    tied = config.flag("tie_word_embeddings", default=top.flag("tie_word_embeddings", default=False))
    head, table = "language_model.lm_head", f"{TARGET}.embed_tokens"
    yield embedding(model, head if tied else table, f"{SOURCE}.embed_tokens", vocabulary, hidden)
    for number, kind in enumerate(layer_types(config)):
        source, target = f"{SOURCE}.layers.{number}", f"{TARGET}.layers.{number}"
        if kind == "linear_attention":
            yield from linear_attention(model, f"{target}.linear_attn", f"{source}.linear_attn", hidden)
        else:
            yield from full_attention(model, f"{target}.self_attn", f"{source}.self_attn", hidden)
        if top.architecture == "Qwen3_5MoeForConditionalGeneration":
            yield from moe(model, f"{target}.mlp", f"{source}.mlp", hidden)
        else:
            config.divided(model.ranks, "intermediate_size")
            yield from mlp(
                model, f"{target}.mlp", f"{source}.mlp", config.natural("intermediate_size"), hidden
            )
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield whole(f"{target}.{norm}.weight", f"{source}.{norm}.weight", hidden)
    yield whole(f"{TARGET}.norm.weight", f"{SOURCE}.norm.weight", hidden)
    if not tied:
        yield embedding(model, head, "lm_head", vocabulary, hidden)


def layer_types(config: Config) -> tuple[str, ...]:
    """What each layer's attention is; without a list, every fourth is full attention."""
    count = config.natural("num_hidden_layers")
    interval = config.natural("full_attention_interval", default=4)
    types = config.texts("layer_types") or tuple(
        "linear_attention" if (number + 1) % interval else "full_attention" for number in range(count)
    )
    known = {"linear_attention", "full_attention"}
    if len(types) != count or not known.issuperset(types):
        config.refuse("layer_types", f"does not name {' or '.join(sorted(known))} for each of {count} layers")
    return types


def full_attention(model: Model, target: str, source: str, hidden: int) -> Iterator[Target]:
    config = model.config
    config.divided(model.ranks, "num_attention_heads")
    heads, size = config.natural("num_attention_heads"), head_size(config)
    gate = 2 if config.flag("attn_output_gate", default=True) else 1
    members = [Member(f"{source}.q_proj", gate * heads * size), *kv_members(model, source, size)]
    bias = config.flag("qkv_bias", default=False)
    yield from column(model, f"{target}.qkv_proj", members, hidden, bias=bias)
    yield from row(model, f"{target}.o_proj", f"{source}.o_proj", hidden, heads * size)
    yield from kv_scales(f"{target}.attn")
    yield whole(f"{target}.q_norm.weight", f"{source}.q_norm.weight", size)
    yield whole(f"{target}.k_norm.weight", f"{source}.k_norm.weight", size)


def linear_attention(model: Model, target: str, source: str, hidden: int) -> Iterator[Target]:
    config = model.config
    config.divided(model.ranks, "linear_num_key_heads", "linear_num_value_heads")
    heads = config.natural("linear_num_value_heads")
    key = config.natural("linear_num_key_heads") * config.natural("linear_key_head_dim")
    value = heads * config.natural("linear_value_head_dim")
    channels, kernel = 2 * key + value, config.natural("linear_conv_kernel_dim")
    conv = Piece(f"{source}.conv1d.weight", (channels, 1, kernel), Cut(segments=(key, key, value)))
    qkvz = [
        Member(f"{source}.in_proj_qkv", channels, segments=(key, key, value)),
        Member(f"{source}.in_proj_z", value),
    ]
    ba = [Member(f"{source}.in_proj_b", heads), Member(f"{source}.in_proj_a", heads)]
    yield _per_head(model, f"{target}.dt_bias", f"{source}.dt_bias", "F16", heads)
    yield _per_head(model, f"{target}.A_log", f"{source}.A_log", "F32", heads)
    yield Target(f"{target}.conv1d.weight", "F16", (channels // model.ranks, 1, kernel), ((conv,),))
    yield from column(model, f"{target}.in_proj_qkvz", qkvz, hidden)
    yield from column(model, f"{target}.in_proj_ba", ba, hidden)
    yield whole(f"{target}.norm.weight", f"{source}.norm.weight", config.natural("linear_value_head_dim"))
    yield from row(model, f"{target}.out_proj", f"{source}.out_proj", hidden, value)


def _per_head(model: Model, target: str, source: str, dtype: str, heads: int) -> Target:
    return Target(target, dtype, (heads // model.ranks,), ((Piece(source, (heads,)),),))


def moe(model: Model, target: str, source: str, hidden: int) -> Iterator[Target]:
    """Routed experts and a shared one, which vllm-ascend's class for 310P keeps under another name."""
    config = model.config
    config.divided(model.ranks, "shared_expert_intermediate_size")
    shared_inner = config.natural("shared_expert_intermediate_size")
    count, inner = expert_sizes(model)
    shared = f"{target}.experts._shared_experts" if model.platform == "310p" else f"{target}.shared_expert"
    yield whole(f"{target}.gate.weight", f"{source}.gate.weight", count, hidden)
    yield whole(f"{shared}.expert_gate.weight", f"{source}.shared_expert_gate.weight", 1, hidden)
    yield from gate_up(model, shared, f"{source}.shared_expert", shared_inner, hidden)
    down = f"{source}.shared_expert.down_proj"
    yield from row(model, f"{shared}.down_proj", down, hidden, shared_inner)
    yield from experts(model, f"{target}.experts", f"{source}.experts", count, inner, hidden)


def ignored(model: Model) -> tuple[str, ...]:
    """The same for every model; a tied one with an lm_head of its own is refused: vLLM would keep either."""
    del model
    return IGNORED
