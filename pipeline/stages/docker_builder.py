"""The second builder: the same image by `docker build`, for whoever wants or needs it.

The engine stores the weights twice, in the context and in the layer, and a push sends them; that is docker's way.
History and dates are docker's own, so digests differ from those of the first builder; files and settings do not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pipeline.errors import UsageError
from pipeline.oci.daemon import DaemonSink
from pipeline.oci.engine_build import Builder, Engine, Recipe
from pipeline.oci.reference import Reference
from pipeline.oci.tar import TarLayer
from pipeline.oci.transfer import write_image
from pipeline.reports.progress import Bar, Progress
from pipeline.stages.base import LOCAL_BASE
from pipeline.stages.build import Built, Parts, Sent, built_of, fetched
from pipeline.stages.dockerfile import make_dockerfile
from pipeline.stages.sending import Sending

if TYPE_CHECKING:
    from pipeline.hubs.hub import Hub


def dockerfile_of(parts: Parts) -> str:
    """The Dockerfile's text, to read; no weights are needed."""
    image = parts.image({key: parts.locked_entries(key) for key, _ in parts.target.models})
    return make_dockerfile(image, parts.base.image, _base_name(parts), parts.target.key).text


def build_with_docker(parts: Parts, hubs: Mapping[str, Hub], builder: Builder, progress: Progress) -> Built:
    """Builds the image in the engine of DOCKER_HOST, and pushes it when the destination is a registry.

    Raises UsageError for a destination that docker cannot write to, DuopackError when the engine fails.
    """
    started = time.monotonic()
    destination = parts.destination
    if destination.transport not in {"docker", "docker-daemon"}:
        raise UsageError(
            "docker builds into its engine and pushes to a registry, and to no other place",
            where=str(destination),
            mend="give --to docker-daemon:NAME:TAG, then 'duopack export docker-daemon:NAME:TAG FILE.tar'",
        )
    engine = Engine()
    provide_base(engine, parts, progress)
    with fetched(parts, [key for key, _ in parts.target.models], hubs, progress) as entries:
        image = parts.image(entries)
        for warning in (*parts.launch.warnings, *image.warnings):
            progress.warn(warning)
        made = make_dockerfile(image, parts.base.image, _base_name(parts), parts.target.key)
        context = made.context
        with progress.bar("docker build", context.size) as bar:
            recipe = Recipe(
                _counted(context, bar), destination.name_tag, parts.target.platform, builder=builder
            )
            digest = engine.build(recipe, progress.note)
    if destination.transport == "docker":
        repository = destination.name_tag.rpartition(":")[0]
        digest = engine.push(repository, destination.tag or "", progress.note)
    sent = Sent(
        platform=parts.target.platform,
        name=str(destination),
        digest=digest,
        size=image.size,
        layers=len(image.layers),
        layers_sent=len(image.layers) - len(parts.base.image.layers),
        sent=context.size,
    )
    return built_of(parts, started, digest, (sent,))


def provide_base(engine: Engine, parts: Parts, progress: Progress) -> None:
    """Lets the engine have the base: pulled by digest, or loaded under a name of ours when it is in no registry."""
    base = parts.base
    if base.reference.transport == "docker":
        engine.pull(_repository(base.reference), base.digest, parts.target.platform, progress.note)
        return
    name = _base_name(parts)
    if not engine.has(name):
        progress.note(f"loading the base into the engine as {name}")
        sink = DaemonSink(name)
        write_image(base.image, sink, parallel=1, on_layer=Sending(progress, sink))


def _base_name(parts: Parts) -> str:
    base = parts.base
    if base.reference.transport == "docker":
        return f"{_repository(base.reference)}@{base.digest}"
    return f"{LOCAL_BASE}:{base.digest.hex[:16]}"


def _repository(reference: Reference) -> str:
    return f"{reference.registry}/{reference.repository}"


def _counted(context: TarLayer, bar: Bar) -> Iterator[bytes]:
    for piece in context.read():
        bar.advance(len(piece))
        yield bytes(piece)
