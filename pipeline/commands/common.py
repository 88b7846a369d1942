"""What several commands share: settings, progress, and the destination of a target."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.catalog.schema import Catalog
from pipeline.catalog.target import Target, default_destination
from pipeline.errors import UsageError
from pipeline.reports.progress import Progress, open_progress
from pipeline.settings import Settings, read_settings


def settings_of(options: argparse.Namespace) -> Settings:
    """The environment and the common options, read once."""
    return read_settings(os.environ, catalog=options.catalog, work=options.work)


@contextmanager
def showing(options: argparse.Namespace) -> Iterator[Progress]:
    """Progress on stderr for as long as the block runs."""
    progress = open_progress(quiet=options.quiet)
    try:
        yield progress
    finally:
        progress.close()


def require_directory(path: Path, what: str) -> None:
    """Raises UsageError when `path` is not a directory; `what` says what it should be."""
    if not path.is_dir():
        raise UsageError("there is no such directory", where=str(path), mend=f"name {what}")


def destination_of(catalog: Catalog, target: Target, settings: Settings) -> str:
    """Where the target's image goes when no --to is given."""
    return default_destination(
        catalog, target, registry=settings.registry, tag=settings.tag, work=str(settings.work)
    )
