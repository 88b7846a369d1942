"""Which of an image's layers are the base's: proved by the base's manifest, told by our history, or guessed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.errors import DuopackError
from pipeline.oci.documents import resolve
from pipeline.oci.model import Descriptor, Source
from pipeline.oci.tree import Tree

OURS = "duopack: "
"""How `created_by` of each layer begins that a build of ours adds."""
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt")
MIN_WEIGHTS = 1 << 20


class BaseImageError(DuopackError):
    """The base image that was named is at fault, not the image that is looked into."""


@dataclass(frozen=True)
class BaseLayers:
    """The number of layers, from the bottom, that are the base's, and how that is known."""

    count: int
    told_by: Literal["manifest", "history", "guess", "nothing"]

    @property
    def sentence(self) -> str:
        return {
            "manifest": "they are those of the base image that was given",
            "history": "the image's history names the layers that duopack added",
            "guess": "a guess: what lies below the first layer with weights",
            "nothing": "nothing tells which layers are the base's",
        }[self.told_by]


def base_from_history(config: dict[str, Any], count: int) -> BaseLayers:
    """What the history tells of `count` layers: those below the first that a build of ours made."""
    history = config.get("history")
    entries = [one for one in history if isinstance(one, dict)] if isinstance(history, list) else []
    creators = [str(one.get("created_by", "")) for one in entries if not one.get("empty_layer")]
    if len(creators) != count:
        return BaseLayers(0, "nothing")
    ours = next((number for number, text in enumerate(creators) if text.startswith(OURS)), None)
    return BaseLayers(0, "nothing") if ours is None else BaseLayers(ours, "history")


def base_from_image(
    layers: Sequence[Descriptor], source: Source, reference: str, platform: str | None
) -> BaseLayers:
    """Compares with the manifest of a base image: its layers, if the image begins with all of them, else none.

    Raises BaseImageError when the base cannot be had.
    """
    try:
        base = resolve(source, reference, platform).manifest.layers
    except DuopackError as error:
        raise BaseImageError(f"the base image: {error.what}", where=error.where, mend=error.mend) from error
    same = [one.digest for one in base] == [one.digest for one in layers[: len(base)]]
    return BaseLayers(len(base) if same else 0, "manifest")


def base_from_weights(tree: Tree) -> BaseLayers:
    """A guess: the base ends where the first weights are."""
    seen = [(path, entry.layer, entry.member.size) for path, entry in tree.files()]
    hidden = [(one.path, one.layer, one.size) for one in tree.hidden]
    numbers = [
        layer for path, layer, size in (*seen, *hidden) if path.endswith(WEIGHTS) and size >= MIN_WEIGHTS
    ]
    return BaseLayers(min(numbers), "guess") if numbers else BaseLayers(0, "nothing")
