"""`duopack smoke`: against a URL, or a container started on the given chips."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from pipeline.catalog.load import load_catalog
from pipeline.catalog.target import Target, find_target
from pipeline.commands.common import destination_of, settings_of, showing
from pipeline.errors import DuopackError, UsageError
from pipeline.oci.reference import parse_reference
from pipeline.reports.output import print_json, print_text, table
from pipeline.reports.progress import Progress
from pipeline.serving.client import ServerClient
from pipeline.stages.smoke import smoke


def run(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    catalog = load_catalog(settings.catalog)
    target = find_target(catalog, options.key)
    url = options.url or os.environ.get("DUOPACK_SMOKE_URL")
    with showing(options) as progress:
        if url:
            checks = smoke(ServerClient(url), target.default_model, target.profile)
        else:
            image = options.image or _image(destination_of(catalog, target, settings))
            with _started(options, target, image, progress) as started:
                checks = smoke(ServerClient(started), target.default_model, target.profile)
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
def _started(options: argparse.Namespace, target: Target, image: str, progress: Progress) -> Iterator[str]:
    from pipeline.ascend.container import container_options, visible_chips
    from pipeline.serving.container import engine, running, runtimes, wait_until

    profile = target.profile
    chips = _chips(options.chips or os.environ.get("DUOPACK_CHIPS"), profile.tensor_parallel, visible_chips())
    with engine() as client:
        wanted = container_options(chips, runtimes=runtimes(client))
        keywords = {
            "command": [f"/models/scripts/{target.profile_name}.sh"],
            "runtime": wanted.runtime,
            "devices": [f"{device}:{device}" for device in wanted.devices],
            "volumes": [f"{path}:{path}:ro" for path in wanted.mounts],
            "environment": wanted.env,
            "shm_size": wanted.shm_size,
        }
        progress.note(f"starting {image} on chips {','.join(map(str, chips))}")
        with running(client, image, profile.port, keywords) as (container, url):
            server = ServerClient(url)
            wait_until(server.healthy, container, limit=options.start_limit * 60, note=progress.note)
            yield url


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
    parts = text.split(",")
    if (
        not all(part.strip().isdigit() for part in parts)
        or len(set(parts)) != len(parts)
        or len(parts) != needed
    ):
        raise UsageError(
            f"'{text}' does not name {needed} chip{'s' if needed > 1 else ''}",
            where="--chips",
            mend="give host ids such as " + ",".join(map(str, range(needed))),
        )
    return tuple(int(part) for part in parts)
