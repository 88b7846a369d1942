"""One image from inside: manifest, config, layers and tree, read where it lies and within limits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pipeline.errors import DuopackError
from pipeline.oci.contents import LayerContents, Look, look, read_config
from pipeline.oci.digest import Digest
from pipeline.oci.documents import (
    Index,
    Manifest,
    Resolved,
    config_platform,
    parse_document,
    parse_object,
    resolve,
)
from pipeline.oci.limits import DEEP_SECONDS, DEFAULT, Budget, Limits
from pipeline.oci.model import MAX_CONFIG, Descriptor, OnBytes, Source
from pipeline.oci.tarindex import Member
from pipeline.oci.tree import Tree, build_tree
from pipeline.stages.inside.base import BaseLayers, base_from_history, base_from_image, base_from_weights
from pipeline.stages.inside.launch import LAUNCH, Launch, parse_launch
from pipeline.stages.inside.place import ImagePlace, Reading
from pipeline.weights.check import DESCRIPTION, INDEX_SUFFIX
from pipeline.weights.safetensors import LENGTH_BYTES
from pipeline.weights.shards.record import RECORD

MAX_PLATFORMS = 16
MAX_SCRIPT = 256 << 10
_KEPT_OF_BASE = 64 << 10
"""Files of the base from this size in bytes are remembered when every byte is read: what hides one wastes it."""
_DOCUMENTS = frozenset({"config.json", DESCRIPTION, RECORD, "launch.json"})
_SCRIPT = re.compile(r"(?:.*/)?(?:scripts/[^/]+|[A-Za-z0-9_.-]+)\.sh")


@dataclass(frozen=True)
class Asking:
    """How an image is to be seen."""

    deep: bool = False
    """Read and hash every byte."""
    platform: str | None = None
    limits: Limits = DEFAULT
    base: tuple[Source, str] | None = None
    """A base image to tell the base's layers by, and its reference there."""
    parallel: int = 4
    begin: Callable[[int], OnBytes] = lambda _total: lambda _count: None
    """Told the bytes of all layers before they are read deeply."""

    def budget(self) -> Budget:
        """A fresh account; reading every byte may take long, unless a limit is asked for."""
        whole_time = self.deep and self.limits.seconds == DEFAULT.seconds
        return Budget(replace(self.limits, seconds=DEEP_SECONDS) if whole_time else self.limits)


@dataclass(frozen=True)
class Inside:
    """An image as it was found. `base` tells which of `layers` are the base's."""

    source: Source
    reference: str
    resolved: Resolved
    config: dict[str, Any]
    layers: tuple[LayerContents, ...]
    tree: Tree
    base: BaseLayers
    budget: Budget
    deep: bool
    reading: Reading = field(repr=False)

    @property
    def digest(self) -> Digest:
        return self.resolved.descriptor.digest

    @property
    def platform(self) -> str:
        return config_platform(self.config)

    @property
    def size(self) -> int:
        """Bytes of all layers as they are stored."""
        return sum(layer.descriptor.size for layer in self.layers)

    @property
    def own_layers(self) -> tuple[LayerContents, ...]:
        """The layers that are not the base's."""
        return self.layers[self.base.count :]

    @property
    def unread(self) -> tuple[LayerContents, ...]:
        """Layers above the base that were not seen whole: what is missing may be in them."""
        return tuple(layer for layer in self.own_layers if not layer.complete)

    @property
    def settings(self) -> dict[str, Any]:
        """The container's settings: `config` of the config document."""
        found = self.config.get("config")
        return found if isinstance(found, dict) else {}

    @property
    def labels(self) -> dict[str, str]:
        return _texts(self.settings.get("Labels"))

    @property
    def env(self) -> dict[str, str]:
        found = self.settings.get("Env")
        pairs = (
            [text.partition("=") for text in found if isinstance(text, str)]
            if isinstance(found, list)
            else []
        )
        return {name: value for name, _, value in pairs}

    def words(self, name: str) -> tuple[str, ...]:
        """A list of the settings: Cmd, Entrypoint."""
        found = self.settings.get(name)
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def place(self, path: str) -> ImagePlace:
        """A path of the tree, with or without a leading slash."""
        return ImagePlace(self.reading, path.strip("/"))

    @cached_property
    def launch(self) -> Launch | None:
        """What launch.json says; None when there is none. Raises DuopackError when it says nothing sound."""
        place = self.place(LAUNCH)
        return parse_launch(place.read_bytes()) if place.is_file() else None


def platforms(source: Source, reference: str, platform: str | None) -> tuple[Resolved, ...]:
    """The images under a reference: one, or one per platform of an index when no platform is asked for.

    Raises DuopackError for none, and for more than there are platforms in the world.
    """
    descriptor, data = source.manifest(reference)
    document = parse_document(data, descriptor.media_type, where=reference)
    if isinstance(document, Manifest) or platform is not None:
        found = resolve(source, reference, platform)
        # What was asked for is what its config must say.
        return (replace(found, descriptor=replace(found.descriptor, platform=platform)),)
    return tuple(_of_index(source, document, reference))


def _of_index(source: Source, index: Index, reference: str) -> Iterator[Resolved]:
    if not 0 < len(index.manifests) <= MAX_PLATFORMS:
        raise DuopackError(
            f"the index has {len(index.manifests)} images; from 1 to {MAX_PLATFORMS} are accepted",
            where=reference,
            mend="name one platform with --platform, or use another image",
        )
    for entry in index.manifests:
        found = resolve(source, str(entry.digest), entry.platform)
        yield replace(found, descriptor=replace(found.descriptor, platform=entry.platform))


def see(source: Source, reference: str, resolved: Resolved, asking: Asking) -> Inside:
    """Looks into one image. Raises DuopackError when its config cannot be used, LimitError when the time is over."""
    manifest = resolved.manifest
    budget = asking.budget()
    config = parse_object(read_config(source, manifest.config), where=reference, limit=MAX_CONFIG)
    base = _base(manifest, config, asking)
    how = Look(
        budget,
        deep=asking.deep,
        wanted=lambda path, size, head: _wanted(path, size, head, asking.limits),
        skip=frozenset(range(base.count)),
        keep=lambda number, member: number >= base.count or _worth_keeping(member),
        parallel=asking.parallel,
        on_bytes=asking.begin(sum(one.size for one in _unique(manifest.layers))) if asking.deep else _ignore,
    )
    layers = look(source, manifest.layers, how)
    tree = build_tree(layers)
    if base.told_by == "nothing":
        base = base_from_weights(tree)
    reading = Reading(source, layers, tree, budget, asking.deep)
    return Inside(source, reference, resolved, config, layers, tree, base, budget, asking.deep, reading)


def _base(manifest: Manifest, config: dict[str, Any], asking: Asking) -> BaseLayers:
    if asking.base:
        source, reference = asking.base
        return base_from_image(manifest.layers, source, reference, config_platform(config) or None)
    return base_from_history(config, len(manifest.layers))


def _wanted(path: str, size: int, head: bytes, limits: Limits) -> int:
    """How many first bytes of a file that goes by will be looked at."""
    name = path.rpartition("/")[2]
    if name.endswith(".safetensors"):
        length = int.from_bytes(head[:LENGTH_BYTES], "little") if len(head) >= LENGTH_BYTES else 0
        return LENGTH_BYTES + (length if length <= limits.document else 0)
    if name in _DOCUMENTS or name.endswith(INDEX_SUFFIX):
        return size
    return size if _SCRIPT.fullmatch(path) and size <= MAX_SCRIPT else 0


def _worth_keeping(member: Member) -> bool:
    return member.kind == "file" and member.size >= _KEPT_OF_BASE


def _unique(layers: tuple[Descriptor, ...]) -> list[Descriptor]:
    return list({layer.digest: layer for layer in layers}.values())


def _texts(value: Any) -> dict[str, str]:
    return {str(key): str(text) for key, text in value.items()} if isinstance(value, dict) else {}


def _ignore(count: int) -> None:
    """Progress that nobody wants to see."""
