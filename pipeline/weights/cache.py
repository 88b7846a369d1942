"""What a model keeps while it serves: bytes per token of full attention, and per sequence of linear attention."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.weights.shards.config import Config
from pipeline.weights.shards.qwen3 import head_size
from pipeline.weights.shards.qwen3_5 import layer_types

HALF = 2
"""Bytes of a float16, in which the KV cache and the convolution's state are."""


@dataclass(frozen=True)
class ServingShape:
    """The sizes of a model that a server's memory depends on, for one rank of `ranks`; bytes where not said."""

    full_layers: int
    linear_layers: int
    kv_per_token: int
    """Key and value of every full-attention layer; KV heads fewer than ranks are held by several."""
    conv_state: int
    """Per sequence, over all linear-attention layers."""
    recurrent_state: int
    """Elements per sequence, over all linear-attention layers: their type is an option."""
    hidden: int
    """Elements."""
    inner: int
    """Widest activation of an MLP on this rank, in elements per token: gate and up."""
    vocabulary: int


def serving_shape(config: Config, ranks: int) -> ServingShape:
    """From config.json. Raises DuopackError for what a plan of this model would refuse too."""
    text = config.section("text_config") if "text_config" in config.values else config
    heads = text.natural("num_key_value_heads", default=text.natural("num_attention_heads"))
    hybrid = config.architecture.startswith("Qwen3_5")
    kinds = layer_types(text) if hybrid else ("full_attention",) * text.natural("num_hidden_layers")
    full = kinds.count("full_attention")
    linear = len(kinds) - full
    per_layer = 2 * max(1, heads // ranks) * head_size(text) * HALF
    conv = recurrent = 0
    if linear:
        key = text.natural("linear_num_key_heads") * text.natural("linear_key_head_dim")
        value_heads, value_size = (
            text.natural("linear_num_value_heads"),
            text.natural("linear_value_head_dim"),
        )
        channels = (2 * key + value_heads * value_size) // ranks
        conv = linear * channels * (text.natural("linear_conv_kernel_dim") - 1) * HALF
        recurrent = linear * (value_heads // ranks) * text.natural("linear_key_head_dim") * value_size
    return ServingShape(
        full_layers=full,
        linear_layers=linear,
        kv_per_token=full * per_layer,
        conv_state=conv,
        recurrent_state=recurrent,
        hidden=text.natural("hidden_size"),
        inner=_inner(text) // ranks,
        vocabulary=text.natural("vocab_size"),
    )


def _inner(text: Config) -> int:
    if "moe_intermediate_size" in text.values:
        routed = text.natural("num_experts_per_tok", default=8) * text.natural("moe_intermediate_size")
        return 2 * (routed + text.natural("shared_expert_intermediate_size", default=1))
    return 2 * text.natural("intermediate_size")
