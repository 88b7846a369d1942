"""Checkpoints of the real dimensions without their bytes: true headers before a hole of the right length."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

from pipeline.weights.safetensors import DTYPE_BITS
from pipeline.weights.shards.config import Config
from pipeline.weights.shards.plans import plan_model
from pipeline.weights.shards.quantization import FLOAT, Quantization

FULL_PRECISION = ("linear_attn.A_log", "linear_attn.norm.weight")
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def tensors_of(config: Config, quantization: Quantization | None = None, *, mtp: bool = True) -> Tensors:
    """Every tensor of the checkpoint as it is at the hub: its dtype and shape by name."""
    kind = quantization or Quantization(None, FLOAT, "")
    made: Tensors = {}
    for target in plan_model(config, kind, 1, "310p").targets:
        # Float experts lie stacked at the hub: the last way; quantized ones one by one.
        for piece in target.ways[-1] if target.ways else ():
            own = "F32" if piece.source.endswith(FULL_PRECISION) else "BF16"
            made[piece.source] = (target.dtype if target.dtype in {"I8", "I32", "I64"} else own, piece.shape)
    if mtp and config.architecture.startswith("Qwen3_5"):
        made |= dict(_mtp(config.section("text_config")))
    return made


def _mtp(text: Config) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """One layer of full attention with its MLP, three norms and the projection that joins two states."""
    hidden, size = text.natural("hidden_size"), text.natural("head_dim")
    heads, kv = text.natural("num_attention_heads"), text.natural("num_key_value_heads")
    layer, attention, mlp = "mtp.layers.0", "mtp.layers.0.self_attn", "mtp.layers.0.mlp"
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        **{
            f"mtp.{name}.weight": (hidden,)
            for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        },
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{attention}.q_proj.weight": (2 * heads * size, hidden),
        f"{attention}.k_proj.weight": (kv * size, hidden),
        f"{attention}.v_proj.weight": (kv * size, hidden),
        f"{attention}.o_proj.weight": (hidden, heads * size),
        f"{attention}.q_norm.weight": (size,),
        f"{attention}.k_norm.weight": (size,),
    }
    if "num_experts" in text.values:
        count, inner = text.natural("num_experts"), text.natural("moe_intermediate_size")
        shared = text.natural("shared_expert_intermediate_size")
        shapes |= {
            f"{mlp}.gate.weight": (count, hidden),
            f"{mlp}.experts.gate_up_proj": (count, 2 * inner, hidden),
            f"{mlp}.experts.down_proj": (count, hidden, inner),
            f"{mlp}.shared_expert_gate.weight": (1, hidden),
            f"{mlp}.shared_expert.gate_proj.weight": (shared, hidden),
            f"{mlp}.shared_expert.up_proj.weight": (shared, hidden),
            f"{mlp}.shared_expert.down_proj.weight": (hidden, shared),
        }
    else:
        inner = text.natural("intermediate_size")
        shapes |= {f"{mlp}.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{mlp}.down_proj.weight"] = (hidden, inner)
    return ((name, ("BF16", shape)) for name, shape in shapes.items())


def size_of(tensors: Tensors) -> int:
    return sum(prod(shape) * DTYPE_BITS[dtype] // 8 for dtype, shape in tensors.values())


def write_checkpoint(
    directory: Path,
    config: Config,
    tensors: Tensors,
    quantization: Quantization | None = None,
    *,
    files: int = 3,
) -> None:
    """The files as a hub has them; each weight file is a header and a hole."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.values))
    if quantization and quantization.types:
        description = {"model_quant_type": quantization.name, **quantization.types}
        (directory / "quant_model_description.json").write_text(json.dumps(description))
    names = [f"model.safetensors-{number:05}-of-{files:05}.safetensors" for number in range(1, files + 1)]
    where = {tensor: names[number * files // len(tensors)] for number, tensor in enumerate(tensors)}
    index = {"metadata": {"total_size": size_of(tensors)}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in names:
        _write_hole(directory / name, {one: tensors[one] for one, file in where.items() if file == name})


def _write_hole(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    entries, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = at + prod(shape) * DTYPE_BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + at)
