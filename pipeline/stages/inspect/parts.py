"""An image's stored bytes, shared out to its parts: every byte belongs to exactly one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pipeline.ascend.serve import MODELS_ROOT
from pipeline.errors import DuopackError
from pipeline.oci.contents import LayerContents
from pipeline.stages.inside.image import Inside
from pipeline.stages.inside.launch import LAUNCH
from pipeline.stages.inside.leftovers import Leftover, leftovers
from pipeline.stages.inside.models import ModelDirectory, model_directories
from pipeline.stages.inspect.duplicates import Duplicate, duplicates

Kind = Literal["base", "model", "scripts", "other", "hidden", "unread"]
_SCRIPTS = f"{MODELS_ROOT}/scripts/".lstrip("/")
_ORDER: tuple[Kind, ...] = ("base", "model", "scripts", "other", "hidden", "unread")


@dataclass(frozen=True)
class File:
    """A file of a part; size in bytes as a container sees it."""

    path: str
    size: int
    layer: int


@dataclass(frozen=True)
class Part:
    """Part of an image. `stored` is its share of the layers' bytes, `size` what its files have when unpacked."""

    kind: Kind
    name: str
    path: str
    stored: int
    size: int
    layers: tuple[int, ...]
    files: tuple[File, ...]
    """The largest first; the base's only when every byte was read, and then only larger ones."""


@dataclass(frozen=True)
class Inventory:
    """What an image holds. `waste` is what a better build would not have in it, in bytes."""

    reference: str
    digest: str
    platform: str
    stored: int
    layers: int
    base_name: str
    base_told_by: str
    base_sentence: str
    parts: tuple[Part, ...]
    duplicates: tuple[Duplicate, ...]
    hidden: tuple[File, ...]
    """Files in a layer that a later layer replaces or removes."""
    leftovers: tuple[Leftover, ...]
    faults: tuple[str, ...]
    command: tuple[str, ...]

    @property
    def waste(self) -> int:
        return (
            sum(one.waste for one in self.duplicates)
            + sum(one.size for one in self.hidden)
            + sum(one.size for one in self.leftovers)
        )


def take_inventory(inside: Inside) -> Inventory:
    """Shares out the layers."""
    models = _model_roots(inside)
    parts = tuple(_parts(inside, models))
    hidden = tuple(File(one.path, one.size, one.layer) for one in inside.tree.hidden)
    return Inventory(
        reference=inside.reference,
        digest=inside.digest,
        platform=inside.platform,
        stored=inside.size,
        layers=len(inside.layers),
        base_name=inside.labels.get("org.opencontainers.image.base.name", ""),
        base_told_by=inside.base.told_by,
        base_sentence=inside.base.sentence,
        parts=parts,
        duplicates=duplicates(inside),
        hidden=hidden,
        leftovers=leftovers(inside, [ModelDirectory(path, "", 1) for path in models]),
        faults=tuple(
            f"layer {layer.number}{f', /{fault.path}' if fault.path else ''}: {fault.sentence}"
            for layer in inside.layers
            for fault in layer.faults
        ),
        command=inside.words("Cmd"),
    )


def _model_roots(inside: Inside) -> dict[str, str]:
    """Directory to name: launch.json's model directories, and others with weights that lie in none of them."""
    try:
        launch = inside.launch
    except DuopackError:
        launch = None
    roots = {model.directory.strip("/"): model.title for model in launch.models} if launch else {}
    for one in model_directories(inside):
        if not any(f"{one.path}/".startswith(f"{root}/") for root in roots):
            roots[one.path] = one.path.rpartition("/")[2] or "/"
    return roots


def _parts(inside: Inside, models: dict[str, str]) -> Iterable[Part]:
    shares: dict[tuple[Kind, str], int] = defaultdict(int)
    numbers: dict[tuple[Kind, str], set[int]] = defaultdict(set)
    files: dict[tuple[Kind, str], list[File]] = defaultdict(list)
    for path, entry in inside.tree.files():
        key = _part_of(path, entry.layer, inside, models)
        files[key].append(File(path, entry.member.size, entry.layer))
    for layer in inside.layers:
        for key, stored in _shared_out(layer, inside, models).items():
            shares[key] += stored
            numbers[key].add(layer.number)
    for kind, path in sorted(
        shares.keys() | files.keys(), key=lambda key: (_ORDER.index(key[0]), -shares[key], key[1])
    ):
        key = (kind, path)
        found = tuple(sorted(files[key], key=lambda one: (-one.size, one.path)))
        yield Part(
            kind,
            models.get(path, kind) if kind == "model" else kind,
            path,
            shares[key],
            sum(one.size for one in found),
            tuple(sorted(numbers[key])),
            found,
        )


def _shared_out(layer: LayerContents, inside: Inside, models: dict[str, str]) -> dict[tuple[Kind, str], int]:
    """A layer's stored bytes by part, in proportion to the files' sizes; nothing is lost to rounding."""
    stored = layer.descriptor.size
    if layer.number < inside.base.count:
        return {("base", ""): stored}
    weights: dict[tuple[Kind, str], int] = defaultdict(int)
    for member in layer.members:
        if member.kind == "file":
            entry = inside.tree.entries.get(member.path)
            is_seen = entry is not None and entry.member is member
            key = _part_of(member.path, layer.number, inside, models) if is_seen else ("hidden", "")
            weights[key] += member.size
    if not layer.complete:
        # What was seen of it says nothing of its proportions.
        return {("unread", ""): stored}
    total = sum(weights.values())
    if not total:
        return {("other", ""): stored}
    shares = {key: stored * weight // total for key, weight in weights.items()}
    largest = max(weights, key=lambda key: weights[key])
    shares[largest] += stored - sum(shares.values())
    return shares


def _part_of(path: str, layer: int, inside: Inside, models: dict[str, str]) -> tuple[Kind, str]:
    if layer < inside.base.count:
        return "base", ""
    root = max((root for root in models if path.startswith(f"{root}/") or not root), key=len, default=None)
    if root is not None:
        return "model", root
    return ("scripts", "") if path.startswith(_SCRIPTS) or path == LAUNCH else ("other", "")
