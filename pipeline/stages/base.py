"""The base image of a build: found by digest, and never written over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.catalog.schema import Base, Catalog
from pipeline.catalog.target import Target
from pipeline.errors import DuopackError, UsageError
from pipeline.lock.resolve import base_reference
from pipeline.lock.values import Lock
from pipeline.oci.digest import Digest
from pipeline.oci.image import Image, load_base
from pipeline.oci.places import open_source
from pipeline.oci.reference import DEFAULT_TAG, Reference
from pipeline.settings import Settings

LOCAL_BASE = "duopack-base"
"""The repository under which an engine has a base that is in no registry."""


@dataclass(frozen=True)
class OpenBase:
    """A base image that has been found: its value, the reference that gave it, and its manifest's digest."""

    image: Image
    reference: Reference
    digest: Digest

    @property
    def pinned(self) -> Reference:
        """The reference with the digest: what exactly was built upon."""
        return self.reference.with_digest(self.digest)


def open_base(target: Target, lock: Lock, settings: Settings, override: Reference | None) -> OpenBase:
    """The base for the target's platform, always by digest: the lock's, from the first mirror that answers.

    With `override` the given image instead, its tag resolved to a digest now. Raises DuopackError when no
    mirror has it, with what each one said.
    """
    if override is not None:
        source = open_source(override)
        image = load_base(source, override.wanted, target.platform)
        assert image.base_digest is not None  # load_base reads it from a manifest
        return OpenBase(image, override, image.base_digest)
    digest = lock.bases[target.base_key].platforms[target.platform]
    problems = []
    for text in target.base.images:
        reference = base_reference(text, settings.catalog.parent).with_digest(digest)
        try:
            source = open_source(reference)
            return OpenBase(load_base(source, digest, target.platform), reference, digest)
        except DuopackError as error:
            problems.append(str(error))
    raise DuopackError(
        f"no image of base '{target.base_key}' can be read: " + " ".join(problems),
        where="models.yaml",
        mend="reach one of them, add a mirror to the base's images, or name one with --base",
    )


def described_base(base: Base, override: Reference) -> Base:
    """What is told of a base that --base named: its own name, the versions of the catalog's base.

    A directory of the building machine has no name that means anything elsewhere.
    """
    name = str(replace(override, digest=None)).removeprefix("docker://")
    return base.model_copy(update={"images": (name if override.transport == "docker" else "local",)})


def refuse_base_as_destination(destination: Reference, base_names: Iterable[Reference]) -> None:
    """An image of ours must never carry the name of the image it is layered on.

    A committed container that kept the upstream name is how the guide's 194 GB image came to lie.
    Raises UsageError.
    """
    if any(_is_same_place(base, destination) for base in base_names):
        raise UsageError(
            "this is the name of the base image: an image with models must not carry it",
            where=str(destination),
            mend="choose a name of your own with --to, or set DUOPACK_REGISTRY=registry.example/namespace",
        )


def _is_same_place(base: Reference, destination: Reference) -> bool:
    if base.transport == destination.transport == "oci":
        same = base.path.absolute().resolve() == destination.path.absolute().resolve()
        return same and (base.tag or DEFAULT_TAG) == (destination.tag or DEFAULT_TAG)
    name = (destination.registry, destination.repository, destination.tag)
    return bool(base.repository) and (base.registry, base.repository, base.tag) == name


def base_names(catalog: Catalog, relative_to: Path, override: Reference | None) -> tuple[Reference, ...]:
    """Every name that a base image has, as far as this build knows."""
    known = [base_reference(text, relative_to) for base in catalog.bases.values() for text in base.images]
    return (*known, override) if override else tuple(known)


def mountable(base: Reference, destination: Reference) -> tuple[str, ...]:
    """Repositories of the destination's registry from which it may mount the base's layers."""
    same = base.transport == destination.transport == "docker" and base.registry == destination.registry
    return (base.repository,) if same else ()
