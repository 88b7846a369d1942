"""Tiny models with random weights and the real layout: names, shapes, dtypes, files and configs as Qwen's.

The layout is that of Qwen3.5 (vision tower, linear attention with every fourth layer full, one MTP layer; dense,
or with experts stacked into one tensor) and of Qwen3; only the sizes are small. They answer nonsense, but tools
take them for what they are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from pipeline.demo.tokenizer import CHAT_TEMPLATE, token_id, tokenizer, tokenizer_config

VOCABULARY = 320
HIDDEN = 128
INTERMEDIATE = 256
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
LAYERS, FULL_EVERY = 4, 4
LINEAR_KEYS, LINEAR_VALUES, LINEAR_DIM, CONV = 4, 8, 128, 4
VISION_HIDDEN, VISION_INTERMEDIATE, VISION_HEADS, VISION_DEPTH, POSITIONS = 64, 128, 4, 2, 64
PATCH, TEMPORAL, MERGE = 16, 2, 2
EXPERT_INTERMEDIATE, EXPERTS_PER_TOKEN = 64, 2
WIDTH = {"BF16": 2, "F16": 2, "F32": 4}
CONFIG_DTYPE = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True)
class Spec:
    """A tensor to be made: its name, shape, dtype, and what fills it."""

    name: str
    shape: tuple[int, ...]
    fill: str = "random"
    """`random` (about ±0.02), `ones`, or `decay` (logarithms of 1 to 16, as A_log)."""
    dtype: str = "BF16"

    @property
    def size(self) -> int:
        return prod(self.shape) * WIDTH[self.dtype]


@dataclass(frozen=True)
class Variant:
    """How a model differs from the plain one."""

    dtype: str = "BF16"
    """Of the weights; `A_log` and the norm of linear attention stay F32, as at the hub."""
    tied: bool = False
    """Whether the output head is the embedding: then it is not among the tensors."""
    mtp: bool = True
    """Whether Qwen3.5 comes with the layer for multi-token prediction."""
    experts: int = 0
    """Routed experts per layer of Qwen3.5, beside a shared one; 0: a dense model."""


PLAIN = Variant()


def make_model(directory: Path, *, seed: int = 0, variant: Variant = PLAIN) -> None:
    """Writes a tiny Qwen3.5 into `directory`: about 5 MB in two shards, the same bytes for the same seed."""
    _write_weights(directory, _varied(_qwen3_5(variant), variant), random.Random(seed))
    _write_json(directory / "config.json", _qwen3_5_config(variant))
    image = {"image_processor_type": "Qwen2VLImageProcessorFast", **_pixels(65536, 16777216)}
    video = {"video_processor_type": "Qwen3VLVideoProcessor", **_pixels(4096, 25165824)}
    _write_json(directory / "preprocessor_config.json", image)
    _write_json(directory / "video_preprocessor_config.json", video)
    _write_text_files(directory)


def make_qwen3(directory: Path, *, seed: int = 0, variant: Variant = PLAIN) -> None:
    """Writes a tiny Qwen3, a plain Transformer with text only, into `directory`."""
    _write_weights(directory, _varied(_qwen3(), variant), random.Random(seed))
    _write_json(directory / "config.json", _qwen3_config(variant))
    _write_text_files(directory)


def _varied(specs: Iterator[Spec], variant: Variant) -> list[Spec]:
    kept = [spec for spec in specs if not (variant.tied and spec.name == "lm_head.weight")]
    return [replace(spec, dtype=variant.dtype) if spec.dtype == "BF16" else spec for spec in kept]


def _qwen3_5(variant: Variant) -> Iterator[Spec]:
    yield Spec("lm_head.weight", (VOCABULARY, HIDDEN))
    yield Spec("model.language_model.embed_tokens.weight", (VOCABULARY, HIDDEN))
    for index in range(LAYERS):
        prefix = f"model.language_model.layers.{index}"
        full = (index + 1) % FULL_EVERY == 0
        attention = _gated_attention(prefix) if full else _linear_attention(prefix)
        yield from _layer(prefix, attention, "random", variant.experts)
    yield Spec("model.language_model.norm.weight", (HIDDEN,))
    yield from vision_specs(HIDDEN)
    if not variant.mtp:
        return
    yield Spec("mtp.fc.weight", (HIDDEN, 2 * HIDDEN))
    yield from _layer("mtp.layers.0", _gated_attention("mtp.layers.0"), "random", variant.experts)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield Spec(f"mtp.{name}.weight", (HIDDEN,))


def _qwen3() -> Iterator[Spec]:
    yield Spec("lm_head.weight", (VOCABULARY, HIDDEN))
    yield Spec("model.embed_tokens.weight", (VOCABULARY, HIDDEN))
    for index in range(LAYERS):
        prefix = f"model.layers.{index}"
        yield from _layer(prefix, _attention(prefix, HEADS, "ones"), "ones")
    yield Spec("model.norm.weight", (HIDDEN,), "ones")


def _layer(prefix: str, attention: Iterator[Spec], norms: str, experts: int = 0) -> Iterator[Spec]:
    yield Spec(f"{prefix}.input_layernorm.weight", (HIDDEN,), norms)
    yield from attention
    yield from _moe(f"{prefix}.mlp", experts) if experts else _mlp(f"{prefix}.mlp", INTERMEDIATE)
    yield Spec(f"{prefix}.post_attention_layernorm.weight", (HIDDEN,), norms)


def _mlp(prefix: str, intermediate: int) -> Iterator[Spec]:
    yield Spec(f"{prefix}.gate_proj.weight", (intermediate, HIDDEN))
    yield Spec(f"{prefix}.up_proj.weight", (intermediate, HIDDEN))
    yield Spec(f"{prefix}.down_proj.weight", (HIDDEN, intermediate))


def _moe(prefix: str, experts: int) -> Iterator[Spec]:
    """Routed experts stacked, gate above up within each; and a shared one."""
    yield Spec(f"{prefix}.gate.weight", (experts, HIDDEN))
    yield Spec(f"{prefix}.experts.gate_up_proj", (experts, 2 * EXPERT_INTERMEDIATE, HIDDEN))
    yield Spec(f"{prefix}.experts.down_proj", (experts, HIDDEN, EXPERT_INTERMEDIATE))
    yield from _mlp(f"{prefix}.shared_expert", EXPERT_INTERMEDIATE)
    yield Spec(f"{prefix}.shared_expert_gate.weight", (1, HIDDEN))


def _gated_attention(prefix: str) -> Iterator[Spec]:
    """Qwen3.5's full attention: twice the query rows, half of them gates; norms are offsets from 1."""
    return _attention(prefix, 2 * HEADS, "random")


def _attention(prefix: str, query_heads: int, norms: str) -> Iterator[Spec]:
    yield Spec(f"{prefix}.self_attn.q_proj.weight", (query_heads * HEAD_DIM, HIDDEN))
    yield Spec(f"{prefix}.self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN))
    yield Spec(f"{prefix}.self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN))
    yield Spec(f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM))
    yield Spec(f"{prefix}.self_attn.q_norm.weight", (HEAD_DIM,), norms)
    yield Spec(f"{prefix}.self_attn.k_norm.weight", (HEAD_DIM,), norms)


def _linear_attention(prefix: str) -> Iterator[Spec]:
    keys, values = LINEAR_KEYS * LINEAR_DIM, LINEAR_VALUES * LINEAR_DIM
    base = f"{prefix}.linear_attn"
    yield Spec(f"{base}.in_proj_qkv.weight", (2 * keys + values, HIDDEN))
    yield Spec(f"{base}.in_proj_z.weight", (values, HIDDEN))
    yield Spec(f"{base}.in_proj_a.weight", (LINEAR_VALUES, HIDDEN))
    yield Spec(f"{base}.in_proj_b.weight", (LINEAR_VALUES, HIDDEN))
    yield Spec(f"{base}.conv1d.weight", (2 * keys + values, 1, CONV))
    yield Spec(f"{base}.A_log", (LINEAR_VALUES,), "decay", "F32")
    yield Spec(f"{base}.dt_bias", (LINEAR_VALUES,), "ones")
    yield Spec(f"{base}.norm.weight", (LINEAR_DIM,), "ones", "F32")
    yield Spec(f"{base}.out_proj.weight", (HIDDEN, values))


def vision_specs(hidden: int) -> Iterator[Spec]:
    """The tiny vision tower, for a language model of this width."""
    width, merged = VISION_HIDDEN, VISION_HIDDEN * MERGE**2
    yield from _affine("model.visual.patch_embed.proj", (width, 3, TEMPORAL, PATCH, PATCH))
    yield Spec("model.visual.pos_embed.weight", (POSITIONS, width))
    for index in range(VISION_DEPTH):
        block = f"model.visual.blocks.{index}"
        yield from _affine(f"{block}.norm1", (width,), "ones")
        yield from _affine(f"{block}.attn.qkv", (3 * width, width))
        yield from _affine(f"{block}.attn.proj", (width, width))
        yield from _affine(f"{block}.norm2", (width,), "ones")
        yield from _affine(f"{block}.mlp.linear_fc1", (VISION_INTERMEDIATE, width))
        yield from _affine(f"{block}.mlp.linear_fc2", (width, VISION_INTERMEDIATE))
    yield from _affine("model.visual.merger.norm", (width,), "ones")
    yield from _affine("model.visual.merger.linear_fc1", (merged, merged))
    yield from _affine("model.visual.merger.linear_fc2", (hidden, merged))


def _affine(name: str, shape: tuple[int, ...], fill: str = "random") -> Iterator[Spec]:
    yield Spec(f"{name}.weight", shape, fill)
    yield Spec(f"{name}.bias", shape[:1])


def _qwen3_5_config(variant: Variant) -> dict[str, Any]:
    kind = "qwen3_5_moe" if variant.experts else "qwen3_5"
    name = "Qwen3_5MoeForConditionalGeneration" if variant.experts else "Qwen3_5ForConditionalGeneration"
    full = [(index + 1) % FULL_EVERY == 0 for index in range(LAYERS)]
    text = {
        "attn_output_gate": True,
        "full_attention_interval": FULL_EVERY,
        "layer_types": ["full_attention" if each else "linear_attention" for each in full],
        "linear_conv_kernel_dim": CONV,
        "linear_key_head_dim": LINEAR_DIM,
        "linear_num_key_heads": LINEAR_KEYS,
        "linear_num_value_heads": LINEAR_VALUES,
        "linear_value_head_dim": LINEAR_DIM,
        "mamba_ssm_dtype": "float32",
        "model_type": f"{kind}_text",
        "mtp_num_hidden_layers": int(variant.mtp),
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        **_common_config(variant),
    }
    if variant.experts:
        text |= {
            "moe_intermediate_size": EXPERT_INTERMEDIATE,
            "num_experts": variant.experts,
            "num_experts_per_tok": EXPERTS_PER_TOKEN,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": EXPERT_INTERMEDIATE,
        }
    vision = {
        "depth": VISION_DEPTH,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": VISION_HIDDEN,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": VISION_INTERMEDIATE,
        "model_type": kind,
        "num_heads": VISION_HEADS,
        "num_position_embeddings": POSITIONS,
        "out_hidden_size": HIDDEN,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL,
    }
    return {
        "architectures": [name],
        "dtype": CONFIG_DTYPE[variant.dtype],
        "image_token_id": token_id("<|image_pad|>"),
        "model_type": kind,
        "text_config": text,
        "tie_word_embeddings": variant.tied,
        "video_token_id": token_id("<|video_pad|>"),
        "vision_config": vision,
        "vision_end_token_id": token_id("<|vision_end|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
    }


def _qwen3_config(variant: Variant) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": CONFIG_DTYPE[variant.dtype],
        "model_type": "qwen3",
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "sliding_window": None,
        "use_sliding_window": False,
        **_common_config(variant),
    }


def _common_config(variant: Variant) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": token_id("<|im_end|>"),
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 4096,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": None,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": variant.tied,
        "use_cache": True,
        "vocab_size": VOCABULARY,
    }


def _pixels(shortest: int, longest: int) -> dict[str, Any]:
    return {
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": MERGE,
        "patch_size": PATCH,
        "processor_class": "Qwen3VLProcessor",
        "size": {"longest_edge": longest, "shortest_edge": shortest},
        "temporal_patch_size": TEMPORAL,
    }


def _write_text_files(directory: Path) -> None:
    _write_json(directory / "tokenizer.json", tokenizer())
    _write_json(directory / "tokenizer_config.json", tokenizer_config())
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    ends = [token_id("<|im_end|>"), token_id("<|endoftext|>")]
    generation = {"do_sample": True, "eos_token_id": ends, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    _write_json(directory / "generation_config.json", generation)


def _write_weights(directory: Path, specs: list[Spec], source: random.Random) -> None:
    """Two shards named as the hub's, and the index that says which tensor is in which."""
    directory.mkdir(parents=True, exist_ok=True)
    total, done = sum(spec.size for spec in specs), 0
    weight_map: dict[str, str] = {}
    shards: tuple[list[Spec], list[Spec]] = ([], [])
    for spec in specs:
        shards[done >= total / 2].append(spec)
        done += spec.size
    for number, shard in enumerate(shards, 1):
        name = f"model.safetensors-{number:05}-of-{len(shards):05}.safetensors"
        _write_safetensors(directory / name, shard, source)
        weight_map |= {spec.name: name for spec in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(directory / "model.safetensors.index.json", index)


def _write_safetensors(path: Path, specs: list[Spec], source: random.Random) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in (ordered := sorted(specs, key=lambda spec: (-WIDTH[spec.dtype], spec.name))):
        offsets = [end, end + spec.size]
        header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": offsets}
        end += spec.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in ordered:
            file.write(_data(spec, source))


def _data(spec: Spec, source: random.Random) -> bytes:
    count = prod(spec.shape)
    makers: dict[tuple[str, str], Callable[[], bytes]] = {
        ("random", "BF16"): lambda: _small_bf16(count, source),
        ("ones", "BF16"): lambda: b"\x80\x3f" * count,
        ("random", "F16"): lambda: _small_f16(count, source),
        ("ones", "F16"): lambda: b"\x00\x3c" * count,
        ("random", "F32"): lambda: _small_f32(count, source),
        ("ones", "F32"): lambda: b"\x00\x00\x80\x3f" * count,
        # the upper half of a float32 is a bfloat16: 0x3f80 is 1.0, 0x402f is 2.73, between them A_log's range
        ("decay", "F32"): lambda: b"".join(
            b"\x00\x00" + source.randrange(0x3F80, 0x402F).to_bytes(2, "little") for _ in range(count)
        ),
    }
    return makers[spec.fill, spec.dtype]()


def _small_bf16(count: int, source: random.Random) -> bytes:
    """Random bfloat16 of either sign from 2⁻⁷ to 2⁻⁵: of the high byte only the sign is free."""
    data = bytearray(source.randbytes(2 * count))
    data[1::2] = data[1::2].translate(bytes(0x3C | byte & 0x80 for byte in range(256)))
    return bytes(data)


def _small_f16(count: int, source: random.Random) -> bytes:
    """Random float16 in the same range: of the high byte the sign, the exponent's lowest and two bits of value."""
    data = bytearray(source.randbytes(2 * count))
    data[1::2] = data[1::2].translate(bytes(0x20 | byte & 0x87 for byte in range(256)))
    return bytes(data)


def _small_f32(count: int, source: random.Random) -> bytes:
    """Random float32 in the same range."""
    data = bytearray(source.randbytes(4 * count))
    data[3::4] = data[3::4].translate(bytes(0x3C | byte & 0x80 for byte in range(256)))
    return bytes(data)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
