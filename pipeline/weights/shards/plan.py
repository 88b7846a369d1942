"""The vocabulary of a plan: target tensors, the pieces each is made of, and how a piece is cut for a rank.

A plan is data. Every target is its pieces one behind the other: concatenation is always along the cut axis, or
along the leading one, so that a rank's bytes are the bytes of its shares in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Cut:
    """How a source tensor is shared out: equal shares along `axis`.

    `segments` are lengths along the axis that are each cut on their own, and whose shares follow each other
    (absent: the whole axis at once). `shards` is the number of different shares (absent: one per rank); with
    fewer than ranks, neighbouring ranks get the same one. `padded` is the axis' length after zeros are appended.
    """

    axis: int = 0
    segments: tuple[int, ...] = ()
    shards: int | None = None
    padded: int | None = None

    def lengths(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The segments along the axis, padding included."""
        return self.segments or (self.padded or shape[self.axis],)


WHOLE = Cut(shards=1)
"""Every rank gets all of it."""


@dataclass(frozen=True)
class Piece:
    """A source tensor by name, the shape that config.json gives it, and how it is cut."""

    source: str
    shape: tuple[int, ...]
    cut: Cut = Cut()

    def share(self, ranks: int) -> int:
        """Elements that one rank gets."""
        if not self.shape:
            return 1
        shards = self.cut.shards or ranks
        along = sum(length // shards for length in self.cut.lengths(self.shape))
        return prod(self.shape) // max(self.shape[self.cut.axis], 1) * along


@dataclass(frozen=True)
class Target:
    """A tensor of every rank's file: its name, dtype and shape are the same on all ranks.

    `ways` are the ways to make it, of which the first is taken whose tensors the checkpoint has; `fill` is every
    element's value when it has none of them (None: then the checkpoint is refused). `alike` means that the pieces
    must hold equal values, of which one is written. `flexible` marks a length that the file itself decides.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ways: tuple[tuple[Piece, ...], ...] = ()
    fill: float | None = None
    alike: bool = False
    flexible: bool = False


@dataclass(frozen=True)
class Plan:
    """All targets, in the order in which vLLM registers them, and what of the checkpoint is left out.

    `ignored` are regular expressions for whole source names that vLLM does not load either.
    """

    architecture: str
    ranks: int
    targets: tuple[Target, ...]
    ignored: tuple[str, ...]


def make_plan(architecture: str, ranks: int, targets: Iterable[Target], ignored: tuple[str, ...]) -> Plan:
    """A plan whose shapes agree with its pieces: a wrong table is a fault of ours, found when it is made."""
    plan = Plan(architecture, ranks, tuple(targets), ignored)
    names = {target.name for target in plan.targets}
    if len(names) != len(plan.targets):
        raise ValueError(f"the plan of {architecture} has a name twice")
    for target in plan.targets:
        for way in target.ways:
            shares = [piece.share(ranks) for piece in (way[:1] if target.alike else way)]
            if sum(shares) != prod(target.shape):
                raise ValueError(f"{target.name} {target.shape} is not made of {way}")
    return plan
