"""The directories of an image that hold weights, by launch.json or by what lies in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.errors import DuopackError
from pipeline.oci.tree import Entry
from pipeline.stages.inside.image import Inside
from pipeline.weights.check import SHARD


@dataclass(frozen=True)
class ModelDirectory:
    """A directory that a server loads; `path` has no leading slash.

    `key` and `title` are the catalog's, from launch.json; empty for a directory that it does not name.
    """

    path: str
    load_format: str
    tensor_parallel: int
    key: str = ""
    title: str = ""

    @property
    def name(self) -> str:
        """What a person calls it."""
        return self.title or f"/{self.path}"


def model_directories(inside: Inside) -> tuple[ModelDirectory, ...]:
    """Those that launch.json names, then any other with weights above the base; each way to load one once."""
    named = _named(inside)
    known = {one.path for one in named}
    return (*named, *(one for one in _found(inside) if one.path not in known))


def _named(inside: Inside) -> tuple[ModelDirectory, ...]:
    try:
        launch = inside.launch
    except DuopackError:
        return ()
    found = [
        ModelDirectory(
            profile.weights.strip("/"), profile.load_format, profile.tensor_parallel, model.key, model.title
        )
        for model, profile in (launch.profiles() if launch else ())
    ]
    # A profile that loads no shards has any number of ranks: one look is enough.
    unique = {
        (one.path, one.load_format, one.load_format == "sharded_state" and one.tensor_parallel): one
        for one in found
    }
    return tuple(unique.values())


def _found(inside: Inside) -> tuple[ModelDirectory, ...]:
    names: dict[str, list[str]] = {}
    for path, entry in inside.tree.entries.items():
        is_weights = path.endswith(".safetensors") and entry.member.kind != "directory"
        if is_weights and entry.layer >= inside.base.count:
            folder, _, name = path.rpartition("/")
            names.setdefault(folder, []).append(name)
    return tuple(_judged(folder, sorted(found)) for folder, found in sorted(names.items()))


def _judged(folder: str, names: list[str]) -> ModelDirectory:
    ranks = [int(match[1]) for name in names if (match := SHARD.fullmatch(name))]
    if not ranks:
        return ModelDirectory(folder, "auto", 1)
    return ModelDirectory(folder, "sharded_state", max(ranks) + 1)


def below(inside: Inside, model: ModelDirectory) -> Iterator[tuple[str, Entry]]:
    """The directory itself and everything in it."""
    for path, entry in inside.tree.entries.items():
        if path == model.path or path.startswith(f"{model.path}/" if model.path else ""):
            yield path, entry
