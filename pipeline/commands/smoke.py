"""`duopack smoke`: against a URL, or a container started on the given chips."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from pipeline.catalog.load import load_catalog
from pipeline.catalog.target import Target, find_target
from pipeline.commands.common import destination_of, settings_of, showing
from pipeline.errors import DuopackError, UsageError, quoted
from pipeline.files import exclusive
from pipeline.oci.reference import parse_reference
from pipeline.reports.output import print_json, print_text, table
from pipeline.reports.progress import Progress
from pipeline.serving.client import ServerClient
from pipeline.settings import Settings
from pipeline.stages.smoke import smoke


def run(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    catalog = load_catalog(settings.catalog)
    target = find_target(catalog, options.key)
    url = options.url or os.environ.get("DUOPACK_SMOKE_URL")
    # vLLM's own variable: a server that was started with a key wants it from its clients.
    api_key = os.environ.get("VLLM_API_KEY")
    with showing(options) as progress, ExitStack() as stack:
        if not url:
            image = options.image or _image(destination_of(catalog, target, settings))
            url = stack.enter_context(_started(options, settings, target, image, progress))
        checks = smoke(ServerClient(url, api_key=api_key), target.default_model, target.profile)
    passed = all(check.verdict == "pass" for check in checks)
    if options.json:
        print_json({"key": target.key, "passed": passed, "checks": [asdict(check) for check in checks]})
    else:
        print_text(
            table([(check.verdict, check.id, f"{check.seconds:.1f} s", check.evidence) for check in checks])
        )
    return 0 if passed else 1


def _image(destination: str) -> str:
    reference = parse_reference(destination)
    if reference.transport not in {"docker", "docker-daemon"}:
        raise UsageError(
            f"an engine cannot start {destination}",
            mend="give --image NAME:TAG, or set DUOPACK_REGISTRY to where the image is published, or give --url",
        )
    return reference.name_tag


@contextmanager
def _started(
    options: argparse.Namespace, settings: Settings, target: Target, image: str, progress: Progress
) -> Iterator[str]:
    from pipeline.ascend.container import container_options, visible_chips
    from pipeline.serving.container import Server, engine, ensure_image, running, runtimes, wait_until

    profile = target.profile
    chips = _chips(options.chips or os.environ.get("DUOPACK_CHIPS"), profile.tensor_parallel, visible_chips())
    limit = _seconds(options.start_limit)
    name = f"smoke-{profile.served_name}"
    # The lock tells a container that a killed run left from one of a run that is still at it.
    with engine() as client, exclusive(settings.cache / f"{name}.lock", progress.note):
        wanted = container_options(chips, runtimes=runtimes(client))
        keywords = {
            "command": [f"/models/scripts/{target.profile_name}.sh"],
            "runtime": wanted.runtime,
            "devices": [f"{device}:{device}" for device in wanted.devices],
            # Of a path that the host does not have, docker would make a directory there.
            "volumes": [f"{path}:{path}:ro" for path in wanted.mounts if Path(path).exists()],
            "environment": wanted.env,
            "shm_size": wanted.shm_size,
        }
        server = Server(image, name, profile.port, str(settings.cache.absolute()), keywords)
        ensure_image(client, image, progress.note)
        progress.note(f"starting {image} as {name} on chips {','.join(map(str, chips))}")
        with running(client, server, progress.note) as (container, url):
            wait_until(ServerClient(url).healthy, container, limit=limit, note=progress.note)
            yield url


def _seconds(minutes: float) -> float:
    if not 0 < minutes <= 24 * 60:
        raise UsageError(
            f"{minutes} is no number of minutes to wait", where="--start-limit", mend="give 1 to 1440"
        )
    return minutes * 60


def _chips(text: str | None, needed: int, visible: tuple[int, ...]) -> tuple[int, ...]:
    """Host ids, as given or the first ones of this host."""
    if not text:
        if len(visible) < needed:
            raise DuopackError(
                f"{needed} chip{'s are' if needed > 1 else ' is'} needed, but this host shows {len(visible)}",
                where="/dev/davinci*",
                mend="run it on an Ascend host ('npu-smi info' lists the chips), or give a running server with --url",
            )
        return visible[:needed]
    ids = [int(part) for part in text.split(",") if re.fullmatch(r" *[0-9]{1,4} *", part)]
    if len(set(ids)) != text.count(",") + 1 or len(ids) != needed:
        raise UsageError(
            f"'{quoted(text)}' does not name {needed} chip{'s' if needed > 1 else ''}",
            where="--chips",
            mend="give host ids such as " + ",".join(map(str, range(needed))),
        )
    return tuple(ids)
