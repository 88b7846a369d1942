"""A plan and a checkpoint brought together: what cannot be split rightly is refused before anything is written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NoReturn

from pipeline.errors import DuopackError, quoted
from pipeline.weights.shards.convert import convertible
from pipeline.weights.shards.plan import Piece, Plan, Target
from pipeline.weights.shards.source import Source


@dataclass(frozen=True)
class Bound:
    """A target and the pieces it will be made of; none when it is filled with a constant."""

    target: Target
    pieces: tuple[Piece, ...]


def bind(plan: Plan, source: Source) -> tuple[Bound, ...]:
    """Each target with its pieces, in the plan's order.

    Raises DuopackError for tensors that are missing or that the plan does not know, for a shape other than
    config.json says, and for a dtype that cannot become the target's.
    """
    if impossible := next((one for one in plan.targets if not one.ways and one.fill is None), None):
        _refuse(
            f"{impossible.name} is compressed (W8A8SC): such weights are made on the chip, for one rank each",
            source,
            "serve the directory as it is, or split the W8A8S weights that it was made from",
        )
    bound = tuple(Bound(target, _choose(target, source)) for target in plan.targets)
    pieces = [(one.target, piece) for one in bound for piece in one.pieces]
    _refuse_missing(source, [piece.source for _, piece in pieces if piece.source not in source.tensors])
    _refuse_extra(source, plan, {piece.source for _, piece in pieces})
    for target, piece in pieces:
        _check(source, target, piece)
    return bound


def _choose(target: Target, source: Source) -> tuple[Piece, ...]:
    for way in target.ways:
        if way[0].source in source.tensors:
            return way
    if target.fill is None:
        return target.ways[0]
    # Some members without their first: naming those that lack is left to the caller.
    return next((way for way in target.ways if any(piece.source in source.tensors for piece in way)), ())


def _check(source: Source, target: Target, piece: Piece) -> None:
    file, tensor = source.tensors[piece.source]
    # A scale of one value is written as [] by some quantizers and as [1] by others.
    single = prod(tensor.shape) == prod(piece.shape) == 1
    if tensor.shape != piece.shape and not single:
        _refuse(
            f"{quoted(piece.source)} in {file} is {list(tensor.shape)}, but by config.json it is {list(piece.shape)}",
            source,
            "take config.json and weights of one model",
        )
    if not convertible(tensor.dtype, target.dtype):
        _refuse(
            f"{quoted(piece.source)} in {file} is {tensor.dtype}, which cannot become"
            f" the {target.dtype} of {target.name}",
            source,
            "check that quant_model_description.json belongs to the weights",
        )


def _refuse_missing(source: Source, names: Sequence[str]) -> None:
    if names:
        _refuse(
            f"{_some(names)} {'is' if len(names) == 1 else 'are'} missing",
            source,
            "download or quantize it again",
        )


def _refuse_extra(source: Source, plan: Plan, known: set[str]) -> None:
    patterns = [re.compile(pattern) for pattern in plan.ignored]
    extra = [
        name for name in source.tensors if name not in known and not any(p.fullmatch(name) for p in patterns)
    ]
    if extra:
        _refuse(
            f"{_some(sorted(extra))} {'has' if len(extra) == 1 else 'have'} no place in a {plan.architecture}"
            " with this config.json",
            source,
            "take config.json and weights of one model; if they are, its kind has no plan here yet",
        )


def _some(names: Sequence[str], limit: int = 3) -> str:
    shown = ", ".join(quoted(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more tensors"


def _refuse(what: str, source: Source, mend: str) -> NoReturn:
    raise DuopackError(what, where=str(source.directory), mend=mend)
