"""What a catalog entry stands for today: a model's files as its hub lists them, a base's digests by platform.

The hub and the registry are parameters, the real ones by default: all of this can be tried without a network.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.catalog.schema import Base, Model
from pipeline.catalog.schema import Source as ModelSource
from pipeline.catalog.target import Target
from pipeline.errors import DuopackError
from pipeline.lock.values import Lock, LockedBase, LockedModel
from pipeline.oci.digest import Digest
from pipeline.oci.model import Source as ImageSource
from pipeline.oci.reference import Reference, parse_reference

if TYPE_CHECKING:
    from pipeline.hubs import Hub

OnNote = Callable[[str], None]
"""Told, in a sentence, what went on without: a source or mirror that could not be used."""
OnFile = Callable[[str, int], None]
"""Told a file's path and how many bytes of it were read for hashing."""
OpenHub = Callable[[ModelSource, Path], "Hub"]
OpenImages = Callable[[Reference], ImageSource]


def wanted_fingerprint(model: Model) -> str:
    """A sha256 over what the catalog asks for (sources, file patterns): another one means stale."""
    asked = {
        "sources": [source.model_dump(mode="json", exclude_none=True) for source in model.sources],
        "include": model.files.include,
        "exclude": model.files.exclude,
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def model_staleness(lock: Lock, key: str, model: Model) -> str | None:
    """Why the lock does not serve a model as the catalog asks for it; None when it does."""
    if key not in lock.models:
        return f"model '{key}' is not in models.lock"
    if lock.models[key].wanted != wanted_fingerprint(model):
        return f"models.yaml asks for other sources or files of model '{key}' than models.lock has"
    return None


def base_staleness(lock: Lock, key: str, base: Base, platform: str | None = None) -> str | None:
    """Why the lock does not serve a base, for one platform or at all; None when it does."""
    if key not in lock.bases:
        return f"base '{key}' is not in models.lock"
    if lock.bases[key].images != base.images:
        return f"models.yaml names other images for base '{key}' than models.lock has"
    if platform and platform not in lock.bases[key].platforms:
        return f"models.lock has no {platform} image of base '{key}'"
    return None


def staleness(lock: Lock, target: Target) -> tuple[str, ...]:
    """Every reason why a target cannot be built from the lock as it is; empty when it can."""
    reasons = [base_staleness(lock, target.base_key, target.base, target.platform)]
    reasons += [model_staleness(lock, key, model) for key, model in target.models]
    return tuple(reason for reason in reasons if reason)


def lock_model(
    key: str,
    model: Model,
    *,
    relative_to: Path,
    sources: Sequence[ModelSource] = (),
    open_hub: OpenHub | None = None,
    on_note: OnNote | None = None,
    on_file: OnFile | None = None,
) -> LockedModel:
    """The model's files from the first source that lists them all.

    `relative_to` is the directory of models.yaml. `sources`, when given, are asked in place of the catalog's;
    the entry still counts as what the catalog asked for. Raises DuopackError when no source serves, with what
    each one said.
    """
    failures: list[tuple[str, DuopackError]] = []
    for source in sources or model.sources:
        try:
            locked = _from_source(key, model, source, (open_hub or _open_hub)(source, relative_to), on_file)
        except DuopackError as error:
            failures.append((source.label, error))
            continue
        for label, failure in failures:
            _tell(
                on_note, f"model '{key}' is locked from {source.label}, since {label} failed: {failure.what}"
            )
        return locked
    raise _all_failed(
        failures,
        f"model '{key}'",
        "no source gives its files",
        "reach one of them, or name a copy with --source dir:PATH",
    )


def _from_source(
    key: str, model: Model, source: ModelSource, hub: Hub, on_file: OnFile | None
) -> LockedModel:
    from pipeline.hubs.selection import complete, select

    listing = select(hub.listing(), model.files, where=f"model '{key}' from {source.label}")
    files = complete(listing, hub, on_file)
    return LockedModel(
        source=source.label,
        commit=listing.commit,
        wanted=wanted_fingerprint(model),
        files=tuple(sorted(files)),
    )


def lock_base(
    key: str,
    base: Base,
    *,
    relative_to: Path,
    open_source: OpenImages | None = None,
    on_note: OnNote | None = None,
) -> LockedBase:
    """The digest under the base's tag, and each platform's manifest.

    All images that answer must give one digest; what does not answer is noted. A platform that the image does
    not have is noted as well, and missing in the entry. Raises DuopackError when none answers, when they
    disagree, or when no platform of the catalog is there.
    """
    where = f"base '{key}'"
    found: dict[str, Digest] = {}
    failures: list[tuple[str, DuopackError]] = []
    chosen: ImageSource | None = None
    for image in base.images:
        try:
            reference = base_reference(image, relative_to)
            source = (open_source or _open_source)(reference)
            found[image] = source.manifest(reference.wanted)[0].digest
            chosen = chosen or source
        except DuopackError as error:
            failures.append((image, error))
    if chosen is None:
        raise _all_failed(failures, where, "no image of it can be read", "reach one of them, or add a mirror")
    _require_agreement(found, where)
    for image, failure in failures:
        _tell(on_note, f"{where}: {image} could not be compared: {failure.what}")
    digest = next(iter(found.values()))
    platforms = _platforms(chosen, digest, base, where, on_note)
    return LockedBase(images=base.images, digest=digest, platforms=platforms)


def base_reference(image: str, relative_to: Path) -> Reference:
    """A base's image from the catalog; an `oci:` directory is relative to models.yaml's."""
    reference = parse_reference(image)
    on_disk = reference.transport in {"oci", "docker-archive"}
    return replace(reference, path=relative_to / reference.path) if on_disk else reference


def _require_agreement(found: Mapping[str, Digest], where: str) -> None:
    if len(set(found.values())) > 1:
        shown = ", ".join(f"{image} is {digest}" for image, digest in found.items())
        raise DuopackError(
            f"its images are not the same: {shown}",
            where=where,
            mend="a mirror may lag behind: wait for it, or take it out of the base's images",
        )


def _platforms(
    source: ImageSource, digest: Digest, base: Base, where: str, on_note: OnNote | None
) -> dict[str, Digest]:
    platforms: dict[str, Digest] = {}
    missing: list[tuple[str, DuopackError]] = []
    for platform in base.platforms:
        try:
            platforms[platform] = _manifest_of(source, digest, platform, where)
        except DuopackError as error:
            missing.append((platform, error))
    if not platforms:
        mend = "name the platforms that the image has under 'platforms'"
        raise _all_failed(missing, where, "none of its platforms can be locked", mend)
    for name, failure in missing:
        _tell(on_note, f"{where} is locked without {name}: {failure.what}")
    return platforms


def _manifest_of(source: ImageSource, digest: Digest, platform: str, where: str) -> Digest:
    """The manifest for a platform; its config must say that platform too, which an index cannot vouch for."""
    from pipeline.oci.documents import config_platform, parse_object, resolve, same_platform
    from pipeline.oci.model import MAX_CONFIG

    resolved = resolve(source, digest, platform)
    config = b"".join(source.blob(resolved.manifest.config).read())
    has = config_platform(parse_object(config, where=where, limit=MAX_CONFIG))
    if not same_platform(has, platform):
        raise DuopackError(f"the image is for {has}", where=where, mend="name its platform under 'platforms'")
    return resolved.descriptor.digest


def _all_failed(
    failures: Sequence[tuple[str, DuopackError]], where: str, what: str, mend: str
) -> DuopackError:
    if len(failures) == 1:
        return failures[0][1]
    lines = [f"\n  {name}: {error.what}" for name, error in failures]
    return DuopackError(f"{what}:{''.join(lines)}", where=where, mend=mend)


def _tell(on_note: OnNote | None, text: str) -> None:
    if on_note:
        on_note(text)


def _open_hub(source: ModelSource, relative_to: Path) -> Hub:
    from pipeline.hubs import open_hub

    return open_hub(source, relative_to=relative_to)


def _open_source(reference: Reference) -> ImageSource:
    from pipeline.oci.places import open_source

    return open_source(reference)
