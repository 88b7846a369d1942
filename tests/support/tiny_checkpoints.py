"""Tiny random checkpoints, laid out as on the hub: written from the hub's own tensor lists, not from our plans."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.weights.safetensors_writer import Declared, SafetensorsWriter, lay_out

Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, tuple[str, np.ndarray]]
"""Name to dtype and values; bf16 as its 16 bits."""


@dataclass(frozen=True)
class Checkpoint:
    config: dict[str, Any]
    tensors: Tensors
    description: dict[str, Any] | None = None

    def write(self, directory: Path, name: str = "model.safetensors") -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        (directory / "tokenizer_config.json").write_text("{}")
        if self.description is not None:
            (directory / "quant_model_description.json").write_text(json.dumps(self.description))
        write_tensors(directory / name, self.tensors)
        return directory


def write_tensors(path: Path, tensors: Tensors) -> None:
    layout = lay_out(Declared(name, dtype, values.shape) for name, (dtype, values) in tensors.items())
    with SafetensorsWriter(path, layout) as writer:
        for one in layout.tensors:
            writer.write(np.ascontiguousarray(tensors[one.name][1]).tobytes())


def bf16(shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    values = random.normal(0, 0.05, prod(shape)).astype("<f4")
    return values.view("<u2")[1::2].reshape(shape).copy()


def float_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    """bf16 for all, except A_log and GDN's norm, which the hub has in float32."""
    random = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, shape in shapes.items():
        if name.endswith(("A_log", "linear_attn.norm.weight")):
            tensors[name] = ("F32", random.normal(1, 0.1, shape).astype("<f4"))
        else:
            tensors[name] = ("BF16", bf16(shape, random))
    return tensors


def qwen3(seed: int = 0, **changes: Any) -> Checkpoint:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "vocab_size": 130,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
    } | changes
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], config["hidden_size"])}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        shapes |= _attention(config, f"{layer}.self_attn", config["num_attention_heads"])
        if config["attention_bias"]:
            for part in ("q", "k", "v"):
                weight = shapes[f"{layer}.self_attn.{part}_proj.weight"]
                shapes[f"{layer}.self_attn.{part}_proj.bias"] = weight[:1]
        if _sparse(config, number):
            shapes |= _experts(config, f"{layer}.mlp")
        else:
            shapes |= _mlp(f"{layer}.mlp", config["hidden_size"], config["intermediate_size"])
        shapes |= _norms(layer, config["hidden_size"])
    shapes["model.norm.weight"] = (config["hidden_size"],)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    return Checkpoint(config, float_tensors(shapes, seed))


def qwen3_moe(seed: int = 0, **changes: Any) -> Checkpoint:
    moe = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    }
    return qwen3(seed, **moe | changes)


def qwen3_5(seed: int = 0, *, moe: bool = False, fused: bool = True, **changes: Any) -> Checkpoint:
    text = {
        "model_type": "qwen3_5_moe_text" if moe else "qwen3_5_text",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 16,
        "vocab_size": 130,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 0],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    } | (
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        }
        if moe
        else {"intermediate_size": 96}
    )
    text |= changes
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration" if moe else "Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5_moe" if moe else "qwen3_5",
        "dtype": "bfloat16",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": 7,
        "video_token_id": 8,
        "vision_start_token_id": 5,
        "vision_end_token_id": 6,
        "text_config": text,
        "vision_config": {
            "model_type": "qwen3_5_moe" if moe else "qwen3_5",
            "depth": 1,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 32,
            "in_channels": 3,
            "intermediate_size": 64,
            "num_heads": 4,
            "num_position_embeddings": 16,
            "out_hidden_size": 64,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }
    hidden = text["hidden_size"]
    shapes: Shapes = {"model.language_model.embed_tokens.weight": (text["vocab_size"], hidden)}
    for number, kind in enumerate(text["layer_types"]):
        layer = f"model.language_model.layers.{number}"
        if kind == "linear_attention":
            shapes |= _linear_attention(text, f"{layer}.linear_attn")
        else:
            shapes |= _attention(text, f"{layer}.self_attn", 2 * text["num_attention_heads"])
        if moe:
            shapes |= _experts(text, f"{layer}.mlp", fused=fused)
            shapes |= _mlp(f"{layer}.mlp.shared_expert", hidden, text["shared_expert_intermediate_size"])
            shapes[f"{layer}.mlp.shared_expert_gate.weight"] = (1, hidden)
        else:
            shapes |= _mlp(f"{layer}.mlp", hidden, text["intermediate_size"])
        shapes |= _norms(layer, hidden)
    shapes["model.language_model.norm.weight"] = (hidden,)
    if not text["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (text["vocab_size"], hidden)
    shapes |= _vision(config["vision_config"])
    shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
    return Checkpoint(config, float_tensors(shapes, seed))


def _attention(config: Mapping[str, Any], name: str, query_heads: int) -> Shapes:
    hidden, size = config["hidden_size"], config["head_dim"]
    kv = config["num_key_value_heads"] * size
    return {
        f"{name}.q_proj.weight": (query_heads * size, hidden),
        f"{name}.k_proj.weight": (kv, hidden),
        f"{name}.v_proj.weight": (kv, hidden),
        f"{name}.o_proj.weight": (hidden, config["num_attention_heads"] * size),
        f"{name}.q_norm.weight": (size,),
        f"{name}.k_norm.weight": (size,),
    }


def _linear_attention(config: Mapping[str, Any], name: str) -> Shapes:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = heads * config["linear_value_head_dim"]
    return {
        f"{name}.A_log": (heads,),
        f"{name}.dt_bias": (heads,),
        f"{name}.conv1d.weight": (2 * key + value, 1, config["linear_conv_kernel_dim"]),
        f"{name}.in_proj_qkv.weight": (2 * key + value, hidden),
        f"{name}.in_proj_z.weight": (value, hidden),
        f"{name}.in_proj_a.weight": (heads, hidden),
        f"{name}.in_proj_b.weight": (heads, hidden),
        f"{name}.norm.weight": (config["linear_value_head_dim"],),
        f"{name}.out_proj.weight": (hidden, value),
    }


def _mlp(name: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{name}.gate_proj.weight": (inner, hidden),
        f"{name}.up_proj.weight": (inner, hidden),
        f"{name}.down_proj.weight": (hidden, inner),
    }


def _experts(config: Mapping[str, Any], name: str, *, fused: bool = False) -> Shapes:
    count, inner, hidden = config["num_experts"], config["moe_intermediate_size"], config["hidden_size"]
    shapes: Shapes = {f"{name}.gate.weight": (count, hidden)}
    if fused:
        shapes[f"{name}.experts.gate_up_proj"] = (count, 2 * inner, hidden)
        shapes[f"{name}.experts.down_proj"] = (count, hidden, inner)
    else:
        for number in range(count):
            shapes |= _mlp(f"{name}.experts.{number}", hidden, inner)
    return shapes


def _norms(layer: str, hidden: int) -> Shapes:
    return {f"{layer}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}


def _sparse(config: Mapping[str, Any], number: int) -> bool:
    return "num_experts" in config and number not in config["mlp_only_layers"]


def _vision(config: Mapping[str, Any]) -> Shapes:
    hidden, inner, patch = config["hidden_size"], config["intermediate_size"], config["patch_size"]
    merged = hidden * config["spatial_merge_size"] ** 2
    weights: Shapes = {
        "patch_embed.proj": (hidden, config["in_channels"], config["temporal_patch_size"], patch, patch),
        "merger.norm": (hidden,),
        "merger.linear_fc1": (merged, merged),
        "merger.linear_fc2": (config["out_hidden_size"], merged),
    }
    for number in range(config["depth"]):
        block = f"blocks.{number}"
        weights |= {
            f"{block}.norm1": (hidden,),
            f"{block}.norm2": (hidden,),
            f"{block}.attn.qkv": (3 * hidden, hidden),
            f"{block}.attn.proj": (hidden, hidden),
            f"{block}.mlp.linear_fc1": (inner, hidden),
            f"{block}.mlp.linear_fc2": (hidden, inner),
        }
    shapes: Shapes = {"model.visual.pos_embed.weight": (config["num_position_embeddings"], hidden)}
    for name, shape in weights.items():
        shapes[f"model.visual.{name}.weight"] = shape
        shapes[f"model.visual.{name}.bias"] = shape[:1]
    return shapes
