"""The bases of the catalog: what is known of each, what the lock says, and how one is made from a checkout."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipeline.ascend.abilities import Ability, abilities
from pipeline.catalog.schema import Base, Catalog
from pipeline.errors import DuopackError, UsageError, quoted
from pipeline.lock.resolve import base_reference, base_staleness, lock_base
from pipeline.lock.values import Lock
from pipeline.oci.digest import Digest
from pipeline.oci.documents import resolve
from pipeline.oci.engine_build import Builder, Engine, Recipe
from pipeline.oci.places import open_sink, open_source
from pipeline.oci.reference import Reference, parse_reference
from pipeline.oci.tar import header
from pipeline.oci.transfer import copy_image
from pipeline.reports.progress import Bar, Progress
from pipeline.settings import Settings
from pipeline.stages.base import LOCAL_BASE
from pipeline.stages.locking import change_lock
from pipeline.stages.sending import Sending

DOCKERFILE = "Dockerfile.310p.openEuler"
_KEY = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_MAX_DOCKERFILE = 1 << 20
_CANN = re.compile(r"/cann:(?P<cann>[0-9][A-Za-z0-9.-]*?)-310p[A-Za-z0-9.-]*-py(?P<python>[0-9.]+)")
_VLLM = re.compile(r"^\s*ARG\s+VLLM_(?:TAG|VERSION)=[\"']?v?(?P<vllm>[0-9][A-Za-z0-9.]*)", re.MULTILINE)


@dataclass(frozen=True)
class BaseReport:
    """A base as a person chooses it. `stale` says why the lock does not serve it; None when it does."""

    key: str
    is_default: bool
    base: Base
    abilities: tuple[Ability, ...]
    stale: str | None
    digests: Mapping[str, Digest]


@dataclass(frozen=True)
class Tags:
    """The tags of a base's repository; `image` is the mirror that answered."""

    key: str
    image: str
    tags: tuple[str, ...]


@dataclass(frozen=True)
class BuiltBase:
    """A base made here. `known` is what its sources tell of its versions; `locked` whether models.lock has it now."""

    key: str
    name: str
    image: str
    digest: str
    image_id: str
    platform: str
    size: int
    known: Mapping[str, str]
    locked: bool


def report_bases(catalog: Catalog, lock: Lock) -> tuple[BaseReport, ...]:
    """Every base of the catalog, in its order. Asks nobody."""
    return tuple(_report(key, base, catalog, lock) for key, base in catalog.bases.items())


def _report(key: str, base: Base, catalog: Catalog, lock: Lock) -> BaseReport:
    stale = base_staleness(lock, key, base)
    return BaseReport(
        key=key,
        is_default=key == catalog.default_base,
        base=base,
        abilities=abilities(base.vllm_ascend),
        stale=stale,
        digests={} if stale else lock.bases[key].platforms,
    )


def find_tags(catalog: Catalog, relative_to: Path, progress: Progress) -> Iterator[Tags]:
    """The tags of each repository that bases are from, once: from the first of a base's images that answers.

    Raises DuopackError when none of them does.
    """
    seen: set[str] = set()
    for key, base in catalog.bases.items():
        images = [base_reference(image, relative_to) for image in base.images]
        places = {f"{one.registry}/{one.repository}" for one in images if one.transport == "docker"}
        if not places or places & seen:
            continue
        seen |= places
        yield _tags(key, images, progress)


def _tags(key: str, images: list[Reference], progress: Progress) -> Tags:
    from pipeline.oci.registry.source import RegistrySource

    problems = []
    for image in images:
        source = open_source(image)
        if not isinstance(source, RegistrySource):
            continue
        try:
            return Tags(key, f"{image.registry}/{image.repository}", source.tags())
        except DuopackError as error:
            problems.append(str(error))
            progress.warn(f"{image.registry} does not tell its tags: {error.what}")
    raise DuopackError(
        f"no repository of base '{key}' tells its tags: {' '.join(problems)}",
        where="bases",
        mend="reach one of them, or add a mirror to the base's images",
    )


def build_base(
    source: Path,
    key: str,
    platform: str,
    catalog: Catalog | None,
    settings: Settings,
    progress: Progress,
    *,
    dockerfile: str = DOCKERFILE,
    arguments: Mapping[str, str] | None = None,
    builder: Builder = Builder.BUILDKIT,
    network: str | None = None,
) -> BuiltBase:
    """Makes a base from a vllm-ascend checkout in the engine, as `duopack-base:<key>`, and copies it to a layout.

    An engine's image has no digest that a lock could name before it is somewhere else: so the base of a build is the
    copy, `oci:<work>/bases/<key>`. When the catalog's base `key` names it, models.lock gets it. Raises UsageError for
    a directory that is no such checkout, DuopackError when the engine fails.
    """
    text = _read_dockerfile(source, dockerfile)
    if not _KEY.fullmatch(key):
        raise UsageError(
            f"'{quoted(key)}' cannot be a base's key",
            where="--name",
            mend="write lower-case letters, digits, '.', '_' and '-'",
        )
    name = f"{LOCAL_BASE}:{key}"
    engine = Engine()
    with _context(source, dockerfile) as (stream, size), progress.bar("send the checkout", size) as bar:
        recipe = Recipe(
            _pieces(stream, bar),
            name,
            platform,
            dockerfile=dockerfile,
            builder=builder,
            arguments=arguments or {},
            network=network,
        )
        image_id = engine.build(recipe, progress.note)
    layout = settings.work / "bases" / key
    progress.note(f"copying {name} to {layout}")
    made = parse_reference(f"docker-daemon:{name}")
    sink = open_sink(Reference("oci", path=layout, tag="latest"))
    descriptor = copy_image(
        open_source(made, scratch=settings.cache),
        "",
        platform,
        sink,
        parallel=settings.parallel,
        on_layer=Sending(progress, sink),
    )
    image = f"oci:{_relative(layout, settings.catalog.parent)}:latest"
    return BuiltBase(
        key=key,
        name=name,
        image=image,
        digest=descriptor.digest,
        image_id=image_id,
        platform=platform,
        size=_size(layout),
        known=_known(text, source),
        locked=_lock(catalog, key, layout, settings, progress),
    )


def _read_dockerfile(source: Path, dockerfile: str) -> str:
    path = source / dockerfile
    try:
        with path.open("rb") as file:
            return file.read(_MAX_DOCKERFILE).decode(errors="replace")
    except OSError as error:
        raise UsageError(
            f"there is no {dockerfile} that can be read: {error.strerror}",
            where=str(source),
            mend="name a checkout: git clone --branch v0.20.2rc1 https://github.com/vllm-project/vllm-ascend",
        ) from error


@contextmanager
def _context(source: Path, dockerfile: str) -> Iterator[tuple[IO[bytes], int]]:
    """The checkout as docker's client would send it, .dockerignore heeded, and its size: for the time of a block."""
    from docker.utils.build import tar

    ignore = source / ".dockerignore"
    lines = ignore.read_text(encoding="utf-8", errors="replace").splitlines() if ignore.is_file() else []
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    made: Any = tar(source, exclude=patterns, dockerfile=(dockerfile, None))
    with made as file:
        size = file.seek(0, 2)
        file.seek(0)
        yield file, size


def _pieces(file: IO[bytes], bar: Bar) -> Iterator[bytes]:
    # BuildKit takes the stream for a tar only when its first header is plain, and not pax as the docker package's.
    yield header(".", mode=0o755, directory=True)
    while piece := file.read(1 << 20):
        bar.advance(len(piece))
        yield piece


def _lock(catalog: Catalog | None, key: str, layout: Path, settings: Settings, progress: Progress) -> bool:
    base = catalog.bases.get(key) if catalog else None
    relative_to = settings.catalog.parent
    if base is None or not any(_is(image, layout, relative_to) for image in base.images):
        return False
    locked = lock_base(key, base, relative_to=relative_to, on_note=progress.warn)
    change_lock(settings.lock, lambda old: old.with_base(key, locked), progress)
    return True


def _is(image: str, layout: Path, relative_to: Path) -> bool:
    reference = base_reference(image, relative_to)
    return reference.transport == "oci" and reference.path.resolve() == layout.resolve()


def _relative(layout: Path, directory: Path) -> Path:
    """A path as models.yaml should name it: relative where that is possible."""
    there, here = layout.resolve(), directory.resolve()
    return there.relative_to(here) if there.is_relative_to(here) else there


def _size(layout: Path) -> int:
    source = open_source(Reference("oci", path=layout, tag="latest"))
    return sum(layer.size for layer in resolve(source, "latest", None).manifest.layers)


def _known(text: str, source: Path) -> dict[str, str]:
    """The versions that the Dockerfile and the checkout's tag tell; what they do not tell is left out."""
    known = {}
    if found := _VLLM.search(text):
        known["vllm"] = found["vllm"]
    if tag := _tag(source):
        known["vllm_ascend"] = tag.removeprefix("v")
    if found := _CANN.search(text):
        known |= {"cann": found["cann"], "python": found["python"]}
    return known


def _tag(source: Path) -> str:
    command = ["git", "-C", str(source), "describe", "--tags", "--exact-match"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = done.stdout.strip()
    return found if done.returncode == 0 and re.fullmatch(r"v?[0-9][A-Za-z0-9.]*", found) else ""
