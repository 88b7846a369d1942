"""`duopack run`: an image on chosen chips, right the first time; or the files and command lines that do it."""

from __future__ import annotations

import argparse
import re
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.ascend.container import RUNTIME, chips_in
from pipeline.ascend.spec import ContainerSpec, compose_document, docker_line, kubernetes_documents
from pipeline.commands.common import settings_of, showing
from pipeline.commands.looking import find_image, open_image
from pipeline.errors import DuopackError, UsageError, quoted
from pipeline.files import exclusive, write_atomically
from pipeline.oci.reference import Reference
from pipeline.reports.output import print_json, print_text
from pipeline.reports.progress import Progress
from pipeline.settings import Settings
from pipeline.stages.described import Described, describe_engine, describe_registry
from pipeline.stages.running import (
    Wish,
    choose_chips,
    look_around,
    make_spec,
    obstacles,
    refuse,
    start,
    with_present_mounts,
)

if TYPE_CHECKING:
    from docker import DockerClient

AUTO = "auto"
MOST_MEMORY = 64 << 40


def run(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    wish = _wish(options)
    reference = find_image(options.image, settings)
    if reference.digest:
        reference = replace(reference, tag=None)  # an engine takes one of the two
    if reference.transport not in {"docker", "docker-daemon"}:
        raise UsageError(
            f"an engine cannot start {reference}",
            where="IMAGE",
            mend="publish it ('duopack publish KEY'), or load it: duopack build KEY --to docker-daemon:NAME:TAG",
        )
    with showing(options) as progress, ExitStack() as stack:
        if options.print or options.compose or options.k8s:
            return _write(options, reference, wish, settings, progress)
        client = _engine(stack)
        # Two runs at once must not both find the same chip free.
        stack.enter_context(exclusive(settings.cache / "run.lock", progress.note))
        spec = _start(client, reference, wish, settings, progress)
    if options.json:
        print_json(asdict(spec))
    else:
        chips = ", ".join(map(str, spec.chips))
        print_text(
            f"{spec.name}: {spec.model} as {spec.served} on chips {chips}, http://127.0.0.1:{spec.host_port}\n"
            f"Loading takes minutes: docker logs -f {spec.name}; then duopack ps"
        )
    return 0


def _start(
    client: DockerClient,
    reference: Reference,
    wish: Wish,
    settings: Settings,
    progress: Progress,
) -> ContainerSpec:
    from pipeline.serving.container import pull_image, runtimes
    from pipeline.stages.containers import list_containers

    image, pull = _describe(client, reference, settings, progress)
    around = look_around(client, list_containers(client), settings.devices)
    chips = wish.chips or choose_chips(image.profile(wish.profile).ranks, around)
    spec = make_spec(image, wish, chips, runtimes=runtimes(client), devices=settings.devices)
    refuse(obstacles(spec, around, to_pull=image.size if pull else 0))
    if around.npu is None:
        progress.warn("npu-smi is not there: whether the chips are healthy is not known")
    if around.local:
        spec, missing = with_present_mounts(spec)
        if missing:
            progress.warn(f"not mounted, since this host does not have them: {', '.join(missing)}")
    if pull:
        progress.note(f"pulling {image.name}")
        pull_image(client, image.name, progress.note)
    start(client, spec)
    return spec


def _describe(
    client: DockerClient, reference: Reference, settings: Settings, progress: Progress
) -> tuple[Described, bool]:
    """The image, and whether it must be pulled: the engine has none of this name, or another one."""
    local = None
    problem: DuopackError | None = None
    try:
        local = describe_engine(client, reference.name_tag)
    except DuopackError as error:
        problem = error
    if reference.transport == "docker-daemon":
        if problem:
            raise problem
        if local is None:
            raise DuopackError(
                "the engine does not have this image",
                where=str(reference),
                mend="load it: duopack build KEY --to docker-daemon:NAME:TAG",
            )
        return local, False
    platform = f"linux/{_architecture(client)}"
    try:
        remote = describe_registry(
            open_image(reference, settings, progress), reference.wanted, reference.name_tag, platform
        )
    except DuopackError as error:
        if local is None:
            raise
        progress.warn(f"the registry cannot be read ({error.what}): the engine's own image is taken")
        return local, False
    return remote, local is None or not (local.ids & remote.ids)


def _architecture(client: DockerClient) -> str:
    from pipeline.serving.container import engine_errors
    from pipeline.stages.doctor import ARCHITECTURES

    with engine_errors("asking the engine for its architecture"):
        machine = str(client.info().get("Architecture") or "")
    return ARCHITECTURES.get(machine, machine)


def _write(
    options: argparse.Namespace, reference: Reference, wish: Wish, settings: Settings, progress: Progress
) -> int:
    """What would be started, as text; needs the registry, and an engine only for an image that is in one."""
    with ExitStack() as stack:
        if reference.transport == "docker-daemon":
            image, _ = _describe(_engine(stack), reference, settings, progress)
        else:
            source = open_image(reference, settings, progress)
            image = describe_registry(source, reference.wanted, reference.name_tag, options.platform)
        ranks = image.profile(wish.profile).ranks
        if not wish.chips and (options.print or options.compose):
            from pipeline.stages.containers import list_containers

            client = _engine(stack)
            chips = choose_chips(ranks, look_around(client, list_containers(client), settings.devices))
        else:
            chips = wish.chips
    runtimes = () if options.no_runtime else (RUNTIME,)
    spec = make_spec(image, wish, chips, runtimes=runtimes, devices=settings.devices)
    if options.print:
        print_text(docker_line(spec).text(literal=True))
    if options.compose:
        _write_yaml(options.compose, [compose_document(spec)])
    if options.k8s:
        # The device plugin gives the chips, so the pod names none.
        _write_yaml(options.k8s, kubernetes_documents(replace(spec, env=dict(wish.env or {}))))
    return 0


def _write_yaml(place: str, documents: Any) -> None:
    import yaml

    text = yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True, width=110)
    if place == "-":
        print_text(text.rstrip("\n"))
    else:
        write_atomically(Path(place), text.encode())


def _engine(stack: ExitStack) -> DockerClient:
    from pipeline.serving.container import engine

    return stack.enter_context(engine())


def _wish(options: argparse.Namespace) -> Wish:
    chips: tuple[int, ...] = ()
    if options.chips and options.chips != AUTO:
        chips = chips_in(options.chips)
        if not chips or (len(chips) != len(re.findall(r"\d+", options.chips)) and "-" not in options.chips):
            raise UsageError(
                f"'{quoted(options.chips)}' names no chips",
                where="--chips",
                mend="write host ids: 2,3 or 0-3, or auto",
            )
    if options.port is not None and not 1 <= options.port <= 65535:
        raise UsageError(f"there is no port {options.port}", where="--port", mend="give 1 to 65535")
    if options.name is not None and not re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}", options.name):
        raise UsageError(
            f"'{quoted(options.name)}' is no container name",
            where="--name",
            mend="use letters, digits, '_', '.', '-'",
        )
    if not re.fullmatch(r"no|always|unless-stopped|on-failure(:\d{1,4})?", options.restart):
        raise UsageError(
            f"'{quoted(options.restart)}' is no restart policy",
            where="--restart",
            mend="use unless-stopped, always, on-failure or no",
        )
    return Wish(
        profile=options.profile,
        chips=chips,
        port=options.port,
        name=options.name,
        memory=_memory(options.memory),
        restart=options.restart,
        env=dict(_variable(text) for text in options.env or ()),
    )


def _memory(text: str | None) -> int | None:
    """Gigabytes as a number, or docker's own form with a unit."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,6})([kmgt]?)b?", text.lower())
    units = {"": 30, "k": 10, "m": 20, "g": 30, "t": 40}
    size = int(found[1]) << units[found[2]] if found else 0
    if not 0 < size <= MOST_MEMORY:
        raise UsageError(
            f"'{quoted(text)}' is no amount of memory", where="--memory", mend="write 250 or 250g"
        )
    return size


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not value.isprintable():
        raise UsageError(f"'{quoted(text)}' is no variable", where="--env", mend="write NAME=VALUE")
    return name, value
