"""Manifest, config and layers: whether they fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.errors import quoted
from pipeline.files import human_size
from pipeline.oci.contents import LayerContents
from pipeline.oci.documents import config_platform, same_platform
from pipeline.oci.image import MAX_LAYERS, WARN_LAYERS
from pipeline.stages.inside.image import Inside
from pipeline.stages.verify.finding import Finding, Severity

_ELSEWHERE = "do not use this image: take it from where it was made, or build it again"
_FAULTS: dict[str, tuple[Severity, str]] = {
    "layer-broken": ("error", _ELSEWHERE),
    "layer-unreadable": ("error", "push the image again, or ask who runs the place"),
    "layer-digest": ("error", _ELSEWHERE),
    "layer-type": ("warning", "push the image again with a current tool: some engines go by the media type"),
    "layer-trailing": ("warning", "look what it is: tail -c the layer; build the image again"),
    "entry-outside": ("error", _ELSEWHERE),
    "entry-absolute": ("warning", "build the layer with a tool that writes names without a leading '/'"),
    "entry-unprintable": ("error", _ELSEWHERE),
    "entry-too-long": ("error", _ELSEWHERE),
    "entry-device": ("warning", "leave device nodes out of images: containers get theirs from the engine"),
    "entry-fifo": ("warning", "leave pipes out of images"),
    "entry-unknown": ("warning", "build the layer with a current tool"),
    "entry-sparse": (
        "warning",
        "build the layer without sparse files: their real size surprises whoever unpacks them",
    ),
}
"""Severity and mend of what `oci.contents` finds."""


def check_documents(inside: Inside) -> Iterator[Finding]:
    """Everything that the manifest, the config and the layers say about each other."""
    yield from _families(inside)
    yield from _count(inside)
    yield from _diff_ids(inside)
    yield from _platform(inside)
    yield from _base(inside)
    yield from _history(inside)
    for layer in inside.layers:
        yield from _faults(layer)
    yield from _repeated(inside)
    yield from _unread_deep(inside) if inside.deep else _unread(inside)


def layer_name(number: int) -> str:
    """How a layer is called in findings."""
    return f"layer {number}"


def _families(inside: Inside) -> Iterator[Finding]:
    manifest = inside.resolved.manifest
    types = [manifest.media_type, manifest.config.media_type, *(one.media_type for one in manifest.layers)]
    families = {"docker" if ".docker." in one else "oci" for one in types}
    if len(families) > 1:
        sentence = (
            "the manifest mixes media types of Docker and of OCI, which some registries and engines refuse"
        )
        yield Finding(
            "manifest-mixed", "warning", sentence, "push it again with a tool that converts it whole"
        )


def _count(inside: Inside) -> Iterator[Finding]:
    count = len(inside.layers)
    if count > MAX_LAYERS:
        sentence = f"it has {count} layers; more than {MAX_LAYERS} cannot be mounted"
        yield Finding("layers-many", "error", sentence, "put fewer models into one image")
    elif count >= WARN_LAYERS:
        sentence = f"it has {count} layers; some hosts cannot mount {WARN_LAYERS} or more"
        yield Finding("layers-many", "warning", sentence, "put fewer models into one image")
    elif count == 0:
        yield Finding("layers-none", "error", "it has no layers, so there is nothing in it", "build it again")


def _diff_ids(inside: Inside) -> Iterator[Finding]:
    rootfs = inside.config.get("rootfs")
    diff_ids: Any = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(diff_ids, list) or len(diff_ids) != len(inside.layers):
        count = len(diff_ids) if isinstance(diff_ids, list) else "no"
        sentence = f"the manifest has {len(inside.layers)} layers, and the config {count} diff ids: no engine takes it"
        yield Finding("diff-ids", "error", sentence, _ELSEWHERE)
        return
    for layer, diff_id in zip(inside.layers, diff_ids, strict=True):
        # An uncompressed layer's digest is its diff id: that costs nothing to check.
        uncompressed = not layer.method and not any(one.id == "layer-unreadable" for one in layer.faults)
        found = layer.diff_id or (layer.descriptor.digest if uncompressed else None)
        if found is not None and found != diff_id:
            sentence = (
                f"its unpacked bytes have the digest {found}, and the config says {quoted(str(diff_id), 80)}"
            )
            yield Finding("diff-id", "error", sentence, _ELSEWHERE, layer_name(layer.number))


def _platform(inside: Inside) -> Iterator[Finding]:
    claimed, found = inside.resolved.descriptor.platform, config_platform(inside.config)
    if claimed and not same_platform(claimed, found):
        sentence = (
            f"it is taken for {quoted(claimed, 60)}, and its config says {quoted(found, 60) or 'nothing'}"
        )
        yield Finding("platform", "error", sentence, _ELSEWHERE)


def _base(inside: Inside) -> Iterator[Finding]:
    if inside.base.told_by == "manifest" and not inside.base.count:
        sentence = "it does not begin with the layers of the base image that was given"
        yield Finding(
            "base-other", "error", sentence, "name the base that it was built on, or build it on this one"
        )


def _history(inside: Inside) -> Iterator[Finding]:
    history = inside.config.get("history")
    entries = [one for one in history if isinstance(one, dict)] if isinstance(history, list) else []
    told = sum(1 for one in entries if not one.get("empty_layer"))
    if entries and told != len(inside.layers):
        sentence = f"its history tells of {told} layers, and it has {len(inside.layers)}"
        yield Finding("history", "warning", sentence, "build it again with a current tool")


def _faults(layer: LayerContents) -> Iterator[Finding]:
    for fault in layer.faults:
        where = layer_name(layer.number) + (f", /{fault.path}" if fault.path else "")
        severity, mend = _FAULTS.get(fault.id, ("error", ""))
        if fault.id.startswith("limit-"):
            mend = f"do not trust this image, or raise the limit: --limit {fault.id.removeprefix('limit-')}=…"
        yield Finding(fault.id, severity, fault.sentence, mend, where)


def _repeated(inside: Inside) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for layer in inside.layers:
        digest = layer.descriptor.digest
        # Tools make an empty layer now and then; it weighs nothing.
        if digest in first and layer.descriptor.size > 4096:
            sentence = f"it is layer {first[digest]} once more ({human_size(layer.descriptor.size)})"
            mend = "build the image without copying the same files twice"
            yield Finding("layer-twice", "warning", sentence, mend, layer_name(layer.number))
        first.setdefault(digest, layer.number)


def _unread(inside: Inside) -> Iterator[Finding]:
    skipped = [layer for layer in inside.layers if layer.unread]
    if skipped:
        size = sum(layer.descriptor.size - layer.read for layer in skipped)
        numbers = ", ".join(str(layer.number) for layer in skipped[:20]) + (
            ", …" if len(skipped) > 20 else ""
        )
        which = f"layer{'' if len(skipped) == 1 else 's'} {numbers}"
        reasons = "; ".join(
            dict.fromkeys(layer.unread for layer in skipped if layer.number >= inside.base.count)
        )
        sentence = f"{human_size(size)} of {which} were not looked into" + (
            f" ({reasons})" if reasons else ""
        )
        yield Finding("unread", "note", sentence, "read every byte: --deep")


def _unread_deep(inside: Inside) -> Iterator[Finding]:
    for layer in inside.layers:
        if not layer.complete and not layer.faults:
            mend = "make what is missing available, and verify again"
            yield Finding("unread-deep", "error", layer.unread, mend, layer_name(layer.number))
