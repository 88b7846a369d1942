"""The whole job on a tiny model: hub, lock, download, launch files, image, and every byte read back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from pipeline.catalog.load import load_catalog
from pipeline.catalog.target import find_target
from pipeline.demo.base import make_base
from pipeline.demo.hub import LocalHub
from pipeline.demo.model import make_model
from pipeline.files import disk_errors, exclusive
from pipeline.hubs import open_hub
from pipeline.oci.places import open_source
from pipeline.oci.reference import Reference, parse_reference
from pipeline.reports.progress import Progress
from pipeline.settings import Settings
from pipeline.stages.build import Built, build
from pipeline.stages.locking import ensure_locked
from pipeline.stages.readback import ReadBack, read_back

KEY = "demo"
REPOSITORY = "duopack/Tiny-Qwen3.5"


@dataclass(frozen=True)
class Demo:
    """What the demo made."""

    directory: Path
    destination: Reference
    built: Built
    read: ReadBack


def demo(settings: Settings, environ: MutableMapping[str, str], progress: Progress) -> Demo:
    """Runs it below the work directory; the destination is `oci:<work>/demo`.

    `environ` is where the real modelscope client looks for its endpoint: it is pointed at a hub on loopback
    for as long as the demo runs.
    """
    with exclusive(settings.cache / "demo.lock", progress.note):
        return _demo(settings, environ, progress)


def _demo(settings: Settings, environ: MutableMapping[str, str], progress: Progress) -> Demo:
    directory = settings.cache / "demo"
    shutil.rmtree(directory, ignore_errors=True)
    progress.note("making a tiny random model in the layout of Qwen3.5, and a stand-in for the base image")
    with disk_errors(directory):
        directory.mkdir(parents=True)
        make_model(directory / "hub" / REPOSITORY)
        make_base(directory / "base", "demo", "linux/arm64")
        (directory / "models.yaml").write_bytes(files("pipeline.demo").joinpath("catalog.yaml").read_bytes())
    own = replace(settings, catalog=directory / "models.yaml", work=directory, registry=None, tag=None)
    destination = parse_reference(f"oci:{settings.work / KEY}")
    target = find_target(load_catalog(own.catalog), KEY)
    with LocalHub(directory / "hub") as hub, _endpoint(environ, hub.url, directory):
        progress.note(f"serving it as {REPOSITORY} from a ModelScope-compatible hub on {hub.url}")
        lock = ensure_locked(target, own, progress, locked=False)
        source = dict(target.models)[KEY].sources[0]
        built = build(
            target,
            load_catalog(own.catalog),
            lock,
            own,
            destination,
            {KEY: open_hub(source, relative_to=directory)},
            progress,
        )
    progress.note("reading every byte of the image back")
    read = read_back(open_source(destination), destination.wanted, target, lock)
    return Demo(directory, destination, built, read)


@contextmanager
def _endpoint(environ: MutableMapping[str, str], url: str, directory: Path) -> Iterator[None]:
    """The modelscope client's own variables, set for a while: it must not ask or fill anything of the user's."""
    wanted = {
        "MODELSCOPE_ENDPOINT": url,
        "MODELSCOPE_CACHE": str(directory / "modelscope"),
        "MODELSCOPE_HOME": str(directory / "modelscope-home"),
        # The client reads the small name first, where both are there.
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    # The user's token is not for this hub, which anybody on this machine could listen to.
    unwanted = ("MODELSCOPE_API_TOKEN", "MODELSCOPE_DOMAIN")
    before = {name: environ.get(name) for name in (*wanted, *unwanted)}
    for name in unwanted:
        environ.pop(name, None)
    environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value
