"""Targets that architectures share, named as vLLM's layers: column and row linears, experts, embeddings, norms.

A checkpoint's linear has its weight as [out, in]. A column linear is cut along `out`, with all that belongs to
an output channel; a row linear along `in`, and each rank keeps every channel's scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.errors import DuopackError
from pipeline.weights.shards.config import Config
from pipeline.weights.shards.plan import WHOLE, Cut, Piece, Target
from pipeline.weights.shards.quantization import DYNAMIC, FLOAT, W8A8, W8A8S, W8A8SC, Quantization

Platform = Literal["310p", "cpu"]

VOCABULARY_MULTIPLE = 64
"""vLLM pads a vocabulary to a multiple of this before it is split."""


@dataclass(frozen=True)
class Model:
    """What a plan is made from."""

    config: Config
    quantization: Quantization
    ranks: int
    platform: Platform


@dataclass(frozen=True)
class Member:
    """One of the checkpoint's linears that vLLM fuses into one: its module, its rows and how they are cut."""

    module: str
    rows: int
    segments: tuple[int, ...] = ()
    shards: int | None = None

    @property
    def cut(self) -> Cut:
        return Cut(0, self.segments, self.shards)


Span = Literal["tensor", "channel", "column"]


@dataclass(frozen=True)
class Companion:
    """A tensor beside a quantized weight: [1] per linear, [out] or [out, 1] per channel.

    `loaded` tells whether a checkpoint must have it; else it holds `fill` where the checkpoint lacks it.
    """

    suffix: str
    dtype: str
    span: Span
    loaded: bool = True
    fill: float = 0.0


COMPANIONS: dict[str, tuple[Companion, ...]] = {
    FLOAT: (),
    W8A8: (
        Companion("input_scale", "F16", "tensor"),
        Companion("input_offset", "I8", "tensor"),
        Companion("quant_bias", "I32", "channel"),
        Companion("deq_scale", "I64", "channel"),
        Companion("weight_scale", "F16", "column", loaded=False),
        Companion("weight_offset", "F16", "column", loaded=False),
    ),
    W8A8S: (
        Companion("input_scale", "F16", "tensor"),
        Companion("input_offset", "I8", "tensor"),
        Companion("quant_bias", "I32", "channel"),
        Companion("deq_scale", "I64", "channel"),
    ),
    DYNAMIC: (
        Companion("input_scale", "F16", "tensor", loaded=False, fill=1.0),
        Companion("input_offset", "I8", "tensor", loaded=False),
        Companion("weight_scale", "F32", "column"),
        Companion("weight_offset", "F32", "column"),
    ),
}
"""What 310P registers beside a linear's weight, in its order."""


def column(
    model: Model, target: str, members: Sequence[Member], inputs: int, *, bias: bool = False
) -> Iterator[Target]:
    """A column linear, or several fused into one: the members' shares follow each other."""
    kind = model.quantization.linear(member.module for member in members)
    outputs = sum(Piece("", (one.rows,), one.cut).share(model.ranks) for one in members)
    weight = [Piece(f"{one.module}.weight", (one.rows, inputs), one.cut) for one in members]
    yield from _linear(model, target, kind, members, (outputs, inputs), weight, bias=bias)


def row(
    model: Model, target: str, module: str, outputs: int, inputs: int, *, bias: bool = False
) -> Iterator[Target]:
    """A row linear."""
    kind = model.quantization.linear([module])
    weight = [Piece(f"{module}.weight", (outputs, inputs), Cut(1))]
    whole = [Member(module, outputs, shards=1)]
    yield from _linear(model, target, kind, whole, (outputs, inputs // model.ranks), weight, bias=bias)


def _linear(
    model: Model,
    target: str,
    kind: str,
    members: Sequence[Member],
    shape: tuple[int, int],
    weight: Sequence[Piece],
    *,
    bias: bool,
) -> Iterator[Target]:
    if bias and kind == DYNAMIC:
        raise DuopackError(
            f"{members[0].module} is {DYNAMIC} and has a bias, which 310P refuses at the first request",
            where=model.quantization.where,
            mend="leave this linear FLOAT when quantizing",
        )
    outputs = shape[0]
    if kind == W8A8SC:
        yield from _compressed(target, shape)
    else:
        yield Target(f"{target}.weight", "F16" if kind == FLOAT else "I8", shape, (tuple(weight),))
    for one in COMPANIONS[W8A8S if kind == W8A8SC else kind]:
        yield _companion(one, target, members, outputs)
    if bias:
        pieces = tuple(Piece(f"{one.module}.bias", (one.rows,), one.cut) for one in members)
        yield Target(f"{target}.bias", "F16", (outputs,), (pieces,))


def _companion(one: Companion, target: str, members: Sequence[Member], outputs: int) -> Target:
    tail = (1,) if one.span == "column" else ()
    name, fill = f"{target}.{one.suffix}", None if one.loaded else one.fill
    if one.span == "tensor":
        pieces = tuple(Piece(f"{member.module}.{one.suffix}", (1,), WHOLE) for member in members)
        return Target(name, one.dtype, (1,), (pieces,), fill, alike=True)
    pieces = tuple(
        Piece(f"{member.module}.{one.suffix}", (member.rows, *tail), member.cut) for member in members
    )
    return Target(name, one.dtype, (outputs, *tail), (pieces,), fill)


def _compressed(target: str, shape: tuple[int, int]) -> Iterator[Target]:
    """W8A8SC: made on the chip for one rank, so there is no checkpoint to make it from; it is only checked."""
    outputs, inputs = shape
    blocks = -(-inputs // 256) * -(-outputs // 128)
    # vLLM registers the size before compression and loads what is shorter into its beginning, as intended here.
    yield Target(f"{target}.weight", "I8", (outputs * inputs,), flexible=True)
    yield Target(f"{target}.index", "I8", (blocks * 8,), flexible=True)
    yield Target(f"{target}.info", "I64", (5,))


def gate_up(model: Model, target: str, source: str, inner: int, hidden: int) -> Iterator[Target]:
    """gate_proj and up_proj, fused."""
    members = [Member(f"{source}.gate_proj", inner), Member(f"{source}.up_proj", inner)]
    yield from column(model, f"{target}.gate_up_proj", members, hidden)


def mlp(model: Model, target: str, source: str, inner: int, hidden: int) -> Iterator[Target]:
    """A gated MLP."""
    yield from gate_up(model, target, source, inner, hidden)
    yield from row(model, f"{target}.down_proj", f"{source}.down_proj", hidden, inner)


def experts(model: Model, target: str, source: str, count: int, inner: int, hidden: int) -> Iterator[Target]:
    """The routed experts of one layer, stacked: w13 is gate above up for each expert, w2 is down.

    A checkpoint has them one by one, or (Qwen3.5 before quantization) fused over all experts.
    """
    each = [f"{source}.{number}" for number in range(count)]
    projections = ("gate_proj", "up_proj", "down_proj")
    kind = model.quantization.experts(f"{one}.{part}" for one in each for part in projections)
    share, fused = inner // model.ranks, kind == FLOAT

    def w13(suffix: str, width: int) -> tuple[Piece, ...]:
        names = [f"{one}.{part}.{suffix}" for one in each for part in projections[:2]]
        return tuple(Piece(name, (inner, width)) for name in names)

    def w2(suffix: str, width: int, cut: Cut) -> tuple[Piece, ...]:
        return tuple(Piece(f"{one}.down_proj.{suffix}", (hidden, width), cut) for one in each)

    stacked13 = Piece(f"{source}.gate_up_proj", (count, 2 * inner, hidden), Cut(1, (inner, inner)))
    stacked2 = Piece(f"{source}.down_proj", (count, hidden, inner), Cut(2))
    dtype = "F16" if fused else "I8"
    yield Target(
        f"{target}.w13_weight",
        dtype,
        (count, 2 * share, hidden),
        (w13("weight", hidden), (stacked13,)) if fused else (w13("weight", hidden),),
    )
    yield Target(
        f"{target}.w2_weight",
        dtype,
        (count, hidden, share),
        (w2("weight", inner, Cut(1)), (stacked2,)) if fused else (w2("weight", inner, Cut(1)),),
    )
    if kind == DYNAMIC:
        for suffix, scale_dtype in (("weight_scale", "F32"), ("weight_offset", "F16")):
            yield Target(f"{target}.w13_{suffix}", scale_dtype, (count, 2 * share, 1), (w13(suffix, 1),))
        for suffix, scale_dtype in (("weight_scale", "F32"), ("weight_offset", "F16")):
            yield Target(f"{target}.w2_{suffix}", scale_dtype, (count, hidden, 1), (w2(suffix, 1, WHOLE),))


def embedding(model: Model, target: str, module: str, vocabulary: int, hidden: int) -> Target:
    """An embedding or output head: rows padded with zeros to a multiple of 64, then split evenly."""
    model.quantization.unquantized(module)
    padded = -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    piece = Piece(f"{module}.weight", (vocabulary, hidden), Cut(padded=padded))
    return Target(f"{target}.weight", "F16", (padded // model.ranks, hidden), ((piece,),))


def whole(target: str, source: str, *shape: int, dtype: str = "F16") -> Target:
    """A tensor that every rank has all of: a norm, a router."""
    return Target(target, dtype, shape, ((Piece(source, shape, WHOLE),),))


def rms_norm(model: Model, target: str, source: str, size: int) -> Iterator[Target]:
    """An RMSNorm; vllm-ascend gives it a bias, zero unless loaded, when the quantizer made any (anti-outlier)."""
    yield whole(f"{target}.weight", f"{source}.weight", size)
    if model.quantization.norm_bias:
        yield Target(
            f"{target}.bias", "F16", (size,), ((Piece(f"{source}.bias", (size,), WHOLE),),), fill=0.0
        )


def layer_norm(target: str, source: str, size: int) -> Iterator[Target]:
    """A LayerNorm: weight and bias."""
    yield whole(f"{target}.weight", f"{source}.weight", size)
    yield whole(f"{target}.bias", f"{source}.bias", size)


def kv_scales(target: str) -> Iterator[Target]:
    """The scales that vLLM's Attention registers for a quantized KV cache; 1.0 where it is not quantized."""
    for name in ("_k_scale", "_v_scale", "_q_scale", "_prob_scale"):
        yield Target(f"{target}.{name}", "F32", (), fill=1.0)
