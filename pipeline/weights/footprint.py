"""How many bytes of parameters each rank holds, told apart by how they are shared out; from headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

from pipeline.errors import DuopackError
from pipeline.weights.check import SHARD
from pipeline.weights.place import Place
from pipeline.weights.safetensors import DTYPE_BITS, Header, read_header
from pipeline.weights.shards.binding import bind
from pipeline.weights.shards.plan import Piece, Plan, Target
from pipeline.weights.shards.source import Source

AT_ONCE = 8
"""Headers read at the same time: of a hub each is one or two requests."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of parameters on one rank.

    `split` is a rank's own share; `shared` is held alike by some ranks (fewer KV heads than ranks); `replicated` is
    whole on every rank; `added` is in no checkpoint, but registered by vLLM.
    """

    split: int
    shared: int = 0
    replicated: int = 0
    added: int = 0

    @property
    def total(self) -> int:
        return self.split + self.shared + self.replicated + self.added


def planned_footprint(plan: Plan) -> Footprint:
    """What a checkpoint with every tensor of the plan takes."""
    return _sum(plan, ((target, target.ways[0] if target.ways else ()) for target in plan.targets))


def checkpoint_footprint(plan: Plan, directory: Place, names: Sequence[str]) -> Footprint:
    """What these weight files of a directory take. Raises DuopackError where they do not fit the plan."""
    headers = _headers(directory, names)
    tensors = {
        tensor: (name, place)
        for name, header in zip(names, headers, strict=True)
        for tensor, place in header.tensors.items()
    }
    source = Source(Path(str(directory)), tuple(names), tensors)
    return _sum(plan, ((one.target, one.pieces) for one in bind(plan, source)))


def shards_footprint(plan: Plan, directory: Place, names: Sequence[str]) -> Footprint:
    """What a directory that is split per rank takes: the parameters that vLLM registers for it.

    Compressed weights (W8A8SC) are registered in the size that they have without compression. Raises DuopackError
    when it is split for another number of ranks.
    """
    found = {int(match[1]) for name in names if (match := SHARD.fullmatch(name))}
    if found != set(range(plan.ranks)):
        raise DuopackError(
            f"it is split for {len(found)} ranks, not for {plan.ranks}",
            where=str(directory),
            mend=f"ask with --tp {len(found)}, or split the model for {plan.ranks}",
        )
    first = [name for name in names if (match := SHARD.fullmatch(name)) and match[1] == "0"]
    held = {name for header in _headers(directory, first) for name in header.tensors}
    missing = sorted({target.name for target in plan.targets} - held)
    if missing:
        raise DuopackError(
            f"rank 0 lacks {missing[0]}" + (f" and {len(missing) - 1} more tensors" if missing[1:] else ""),
            where=str(directory),
            mend="split the model again, or download it again",
        )
    return planned_footprint(plan)


def _headers(directory: Place, names: Sequence[str]) -> list[Header]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda name: read_header(directory / name), names))


def _sum(plan: Plan, made: Iterable[tuple[Target, Sequence[Piece]]]) -> Footprint:
    sums = dict.fromkeys(("split", "shared", "replicated", "added"), 0)
    for target, pieces in made:
        width = DTYPE_BITS[target.dtype] // 8
        if not pieces:
            # W8A8SC weights have no source here, and are a rank's own.
            kind = "added" if target.fill is not None else "split"
            sums[kind] += prod(target.shape) * width
        for piece in pieces[:1] if target.alike else pieces:
            sums[_kind(piece, plan.ranks)] += piece.share(plan.ranks) * width
    return Footprint(**sums)


def _kind(piece: Piece, ranks: int) -> str:
    shards = piece.cut.shards or ranks
    if shards >= ranks:
        return "split"
    return "replicated" if shards == 1 else "shared"
