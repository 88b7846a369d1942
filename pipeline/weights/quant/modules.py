"""What msmodelslim writes for each architecture: which tensors, in which order, from where, in which dtype.

The order is that of its visits: vision tower, decoder layers, MTP, and the rest of the model at the end; within
each, transformers' registration order. It decides which tensor goes into which file. Dtypes: the model is loaded in
the dtype D of its config, but the Qwen3.5 adapter makes every layer after the first, and the MTP layer, in BF16;
experts are taken out of their stack in BF16 too. Read in, and compared with the output of, msmodelslim 26.1.0 with
transformers 5.5.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.errors import DuopackError, quoted
from pipeline.weights.check import read_json
from pipeline.weights.quant.floats import FLOATS, passage
from pipeline.weights.safetensors import Tensor
from pipeline.weights.shards.config import Config
from pipeline.weights.shards.qwen3_5 import layer_types
from pipeline.weights.shards.source import Source

DTYPES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
ADAPTER_DTYPE: Final = "BF16"
"""What the Qwen3.5 adapter makes layers in, whatever the checkpoint holds."""
ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
GDN_LINEARS: Final = ("out_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
MLP: Final = ("gate_proj", "up_proj", "down_proj")
NORMS: Final = ("input_layernorm", "post_attention_layernorm")


class NotCoveredError(DuopackError):
    """Something that is not known to come out as msmodelslim would write it; msmodelslim itself may manage."""


@dataclass(frozen=True)
class Slab:
    """Rows of a checkpoint's tensor that lie together: of the whole tensor, or of one matrix of a stack."""

    tensor: str
    first: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """A tensor of the output before quantization."""

    name: str
    slab: Slab
    dtype: str
    """In the checkpoint."""
    casts: tuple[str, ...]
    """The dtypes that the values go through; empty when they stay as they are."""
    linear: bool
    """Whether a recipe may quantize it: the weight of a Linear that msmodelslim visits."""

    @property
    def working(self) -> str:
        """The dtype in the end."""
        return self.casts[-1] if self.casts else self.dtype

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class _Wanted:
    """A parameter by name; `casts` are applied in order. `part` is its place in a stack of matrices."""

    name: str
    casts: tuple[str, ...]
    linear: bool = False
    optional: bool = False
    stack: str = ""
    part: tuple[int, int, int, int] = (0, 1, 0, 1)
    """Which of how many matrices of the stack, and which of how many equal parts of its rows."""


def parameters(config: Config, source: Source) -> tuple[Parameter, ...]:
    """Every tensor of the output in msmodelslim's order.

    Raises NotCoveredError for an architecture, a tensor or a dtype beyond what is known, and DuopackError for a
    checkpoint that lacks a tensor.
    """
    architecture = config.architecture
    if architecture not in ORDERS:
        raise NotCoveredError(
            f"the order in which msmodelslim writes {quoted(architecture)} is not known here",
            where=config.where,
            mend=f"use --engine msmodelslim; the streaming engine knows {', '.join(ORDERS)}",
        )
    wanted = list(ORDERS[architecture](config, source, model_dtype(config, source)))
    found = [one for each in wanted if (one := _find(each, source))]
    missing = [each.name for each in wanted if not each.optional and not _there(each, source.tensors)]
    if missing:
        raise DuopackError(
            f"the checkpoint lacks {_some(missing)}, which config.json calls for",
            where=str(source.directory),
            mend="download the model again, or take the config.json that belongs to the weights",
        )
    unknown = sorted(set(source.tensors) - {one.slab.tensor for one in found})
    if unknown:
        raise NotCoveredError(
            f"what msmodelslim makes of {_some(unknown)} is not known here",
            where=str(source.directory),
            mend="use --engine msmodelslim",
        )
    return tuple(found)


def model_dtype(config: Config, source: Source) -> str:
    """D: the config's dtype, else the index', else that of the first float by name in the first file.

    This is how transformers resolves `auto`; a dtype of `text_config` does not count.
    """
    named = config.values.get("dtype") or config.values.get("torch_dtype")
    index = source.directory / "model.safetensors.index.json"
    if named is None and index.is_file():
        metadata = read_json(index).get("metadata")
        named = metadata.get("dtype") if isinstance(metadata, dict) else None
    if named is not None:
        dtype = DTYPES.get(str(named).removeprefix("torch."))
        if dtype is None:
            config.refuse("dtype", f"is {quoted(str(named))}, not one of {', '.join(DTYPES)}")
        return dtype
    first = source.files[0]
    names = sorted(name for name, (file, _) in source.tensors.items() if file == first)
    return next(
        (source.tensors[name][1].dtype for name in names if source.tensors[name][1].dtype in FLOATS), "F32"
    )


def _qwen3(config: Config, source: Source, dtype: str) -> Iterator[_Wanted]:
    del source
    casts = (dtype,)
    for number in range(config.natural("num_hidden_layers")):
        prefix = f"model.layers.{number}"
        yield from _attention(prefix, casts)
        yield from _mlp(f"{prefix}.mlp", casts)
        yield from _norms(prefix, casts)
    yield _Wanted("model.embed_tokens.weight", casts)
    yield _Wanted("model.norm.weight", casts)
    yield _head(config, "model.embed_tokens.weight", casts)


def _qwen3_5(config: Config, source: Source, dtype: str) -> Iterator[_Wanted]:
    text, prefix = config.section("text_config"), "model.language_model"
    moe = config.architecture == "Qwen3_5MoeForConditionalGeneration"
    yield from _vision(config.section("vision_config"), (dtype,))
    for number, kind in enumerate(layer_types(text)):
        layer = f"{prefix}.layers.{number}"
        casts = (ADAPTER_DTYPE,) if number else (dtype,)
        yield from (
            _gdn(f"{layer}.linear_attn", casts) if kind == "linear_attention" else _attention(layer, casts)
        )
        if moe:
            # The block of single experts is made in BF16 and then cast to what the block before it was.
            yield from _moe(text, f"{layer}.mlp", (*casts, ADAPTER_DTYPE, *casts))
        else:
            yield from _mlp(f"{layer}.mlp", casts)
        yield from _norms(layer, casts)
    if any(name.startswith("mtp.") for name in source.tensors):
        yield from _mtp(text, moe, source)
    yield _Wanted(f"{prefix}.embed_tokens.weight", (dtype,))
    yield _Wanted(f"{prefix}.norm.weight", (dtype,))
    yield _head(config, f"{prefix}.embed_tokens.weight", (dtype,))


def _mtp(text: Config, moe: bool, source: Source) -> Iterator[_Wanted]:
    casts = (ADAPTER_DTYPE,)
    yield _Wanted("mtp.pre_fc_norm_embedding.weight", casts)
    yield _Wanted("mtp.pre_fc_norm_hidden.weight", casts)
    yield _Wanted("mtp.fc.weight", casts, linear=True)
    for number in range(text.natural("mtp_num_hidden_layers", default=1)):
        layer = f"mtp.layers.{number}"
        yield from _attention(layer, casts)
        if moe:
            yield from _moe(
                text, f"{layer}.mlp", casts, single=f"{layer}.mlp.experts.0.up_proj.weight" in source.tensors
            )
        else:
            yield from _mlp(f"{layer}.mlp", casts)
        yield from _norms(layer, casts)
    yield _Wanted("mtp.norm.weight", casts)


def _vision(vision: Config, casts: tuple[str, ...]) -> Iterator[_Wanted]:
    yield _Wanted("model.visual.patch_embed.proj.weight", casts)
    yield _Wanted("model.visual.patch_embed.proj.bias", casts)
    yield _Wanted("model.visual.pos_embed.weight", casts)
    for number in range(vision.natural("depth")):
        block = f"model.visual.blocks.{number}"
        for norm in ("norm1", "norm2"):
            yield _Wanted(f"{block}.{norm}.weight", casts)
            yield _Wanted(f"{block}.{norm}.bias", casts)
        for linear in ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"):
            yield from _linear(f"{block}.{linear}", casts)
    yield _Wanted("model.visual.merger.norm.weight", casts)
    yield _Wanted("model.visual.merger.norm.bias", casts)
    yield from _linear("model.visual.merger.linear_fc1", casts)
    yield from _linear("model.visual.merger.linear_fc2", casts)


def _attention(layer: str, casts: tuple[str, ...]) -> Iterator[_Wanted]:
    for name in ATTENTION:
        yield from _linear(f"{layer}.self_attn.{name}", casts)
    yield _Wanted(f"{layer}.self_attn.q_norm.weight", casts)
    yield _Wanted(f"{layer}.self_attn.k_norm.weight", casts)


def _gdn(prefix: str, casts: tuple[str, ...]) -> Iterator[_Wanted]:
    for name in ("dt_bias", "A_log", "conv1d.weight", "norm.weight"):
        yield _Wanted(f"{prefix}.{name}", casts)
    for name in GDN_LINEARS:
        yield from _linear(f"{prefix}.{name}", casts)


def _mlp(prefix: str, casts: tuple[str, ...]) -> Iterator[_Wanted]:
    for name in MLP:
        yield from _linear(f"{prefix}.{name}", casts)


def _moe(text: Config, prefix: str, casts: tuple[str, ...], *, single: bool = False) -> Iterator[_Wanted]:
    """Router, routed experts (stacked in the checkpoint, gate above up, unless `single`), shared expert."""
    yield _Wanted(f"{prefix}.gate.weight", casts)
    experts, both, down = f"{prefix}.experts", f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj"
    count = text.natural("num_experts")
    for number in range(count):
        if single:
            yield from _mlp(f"{experts}.{number}", casts)
            continue
        stacks = ((both, 0, 2), (both, 1, 2), (down, 0, 1))
        for name, (stack, part, parts) in zip(MLP, stacks, strict=True):
            place = (number, count, part, parts)
            yield _Wanted(f"{experts}.{number}.{name}.weight", casts, linear=True, stack=stack, part=place)
    yield from _mlp(f"{prefix}.shared_expert", casts)
    yield _Wanted(f"{prefix}.shared_expert_gate.weight", casts, linear=True)


def _norms(layer: str, casts: tuple[str, ...]) -> Iterator[_Wanted]:
    for name in NORMS:
        yield _Wanted(f"{layer}.{name}.weight", casts)


def _linear(module: str, casts: tuple[str, ...]) -> Iterator[_Wanted]:
    yield _Wanted(f"{module}.weight", casts, linear=True)
    yield _Wanted(f"{module}.bias", casts, optional=True)


def _head(config: Config, table: str, casts: tuple[str, ...]) -> _Wanted:
    """The output head, written out also where it is the embedding. No visit reaches it, so it stays as it is."""
    text = config.section("text_config") if "text_config" in config.values else config
    tied = config.flag("tie_word_embeddings", default=text.flag("tie_word_embeddings", default=False))
    return _Wanted("lm_head.weight", casts, stack=table if tied else "")


ORDERS: Final[Mapping[str, Callable[[Config, Source, str], Iterator[_Wanted]]]] = {
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3_5ForConditionalGeneration": _qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5,
}


def _there(wanted: _Wanted, tensors: Mapping[str, object]) -> bool:
    return (wanted.stack or wanted.name) in tensors


def _find(wanted: _Wanted, source: Source) -> Parameter | None:
    name = wanted.stack or wanted.name
    if name not in source.tensors:
        return None
    file, tensor = source.tensors[name]
    where = str(source.directory / file)
    if tensor.dtype not in FLOATS:
        raise DuopackError(
            f"{quoted(name)} is {tensor.dtype}; only {', '.join(FLOATS)} can be quantized",
            where=where,
            mend="take the model's float weights (BF16 or F16), not ones that are quantized already",
        )
    slab = _slab(wanted, name, tensor, where)
    if wanted.linear and len(slab.shape) != 2:
        raise DuopackError(
            f"{quoted(name)} has the shape {list(tensor.shape)}, but a linear's weight has two dimensions",
            where=where,
            mend="take the config.json that belongs to the weights",
        )
    casts = passage(tensor.dtype, wanted.casts)
    return Parameter(wanted.name, slab, tensor.dtype, casts, wanted.linear)


def _slab(wanted: _Wanted, name: str, tensor: Tensor, where: str) -> Slab:
    if wanted.linear and wanted.stack:
        index, count, part, parts = wanted.part
        if len(tensor.shape) != 3 or count != tensor.shape[0] or tensor.shape[1] % parts:
            raise DuopackError(
                f"{quoted(name)} has the shape {list(tensor.shape)}, from which {count} experts cannot be taken",
                where=where,
                mend="take the config.json that belongs to the weights",
            )
        rows = tensor.shape[1] // parts
        return Slab(name, index * tensor.shape[1] + part * rows, (rows, tensor.shape[2]))
    return Slab(name, 0, tensor.shape)


def _some(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(quoted(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
