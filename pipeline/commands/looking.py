"""What `verify` and `inspect` share: which image is meant, where it lies, and how it is to be looked into."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from pipeline.catalog.load import load_catalog
from pipeline.catalog.target import build_keys, find_target
from pipeline.commands.common import destination_of
from pipeline.errors import UsageError, quoted
from pipeline.oci.limits import DEFAULT, Limits
from pipeline.oci.model import OnBytes, Source
from pipeline.oci.places import open_source
from pipeline.oci.reference import Reference, parse_reference, parse_typed
from pipeline.reports.progress import Progress
from pipeline.settings import Settings
from pipeline.stages.inside.image import Asking

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def find_image(text: str, settings: Settings) -> Reference:
    """An image by name, or where the catalog puts the image of a key. Raises UsageError."""
    if settings.catalog.is_file() and re.fullmatch(r"[A-Za-z0-9._-]+", text):
        catalog = load_catalog(settings.catalog)
        if text in {row.key for row in build_keys(catalog)}:
            return parse_reference(destination_of(catalog, find_target(catalog, text), settings))
    return parse_typed(text)


def open_image(reference: Reference, settings: Settings, progress: Progress) -> Source:
    """The place that the image lies in; an engine's image is fetched, with a note of why."""
    if reference.transport == "docker-daemon":
        progress.note(
            f"{reference}: an engine gives an image only whole: it is read through a temporary file"
        )
    return open_source(reference, scratch=settings.cache)


def asking_of(options: argparse.Namespace, settings: Settings, progress: Progress, title: str) -> Asking:
    """How to look, from the options."""
    base = parse_typed(options.base) if options.base else None

    def begin(total: int) -> OnBytes:
        return progress.open(f"read {title}", total).advance

    return Asking(
        deep=options.deep,
        platform=options.platform,
        limits=limits_of(options.limit or ()),
        base=(open_image(base, settings, progress), base.wanted) if base else None,
        parallel=settings.parallel,
        begin=begin,
    )


def limits_of(texts: Sequence[str]) -> Limits:
    """The limits with some changed, each written NAME=VALUE: a number, with K, M, G or T for binary units.

    Raises UsageError for a name that is no limit, or a value that is no number above zero.
    """
    limits, known = DEFAULT, {one.name for one in fields(Limits)}
    for text in texts:
        name, _, value = text.partition("=")
        match = re.fullmatch(r"([0-9]{1,15})([KMGT]?)", value)
        if name not in known or not match or not int(match[1]):
            raise UsageError(
                f"'{quoted(text)}' is no limit",
                where="--limit",
                mend=f"write NAME=NUMBER, e.g. --limit seconds=3600; names are {', '.join(sorted(known))}",
            )
        number = int(match[1]) * _UNITS[match[2]]
        changed: dict[str, Any] = {name: float(number) if name == "seconds" else number}
        limits = replace(limits, **changed)
    return limits
