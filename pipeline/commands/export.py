"""`duopack export`: images in a file or a directory, to be carried to where there is no network."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict, replace
from pathlib import Path

from pipeline.catalog.load import load_catalog
from pipeline.catalog.schema import Catalog
from pipeline.catalog.target import (
    build_keys,
    find_target,
    image_name,
    image_tag,
    repository_part,
)
from pipeline.commands.common import settings_of, showing
from pipeline.commands.looking import find_image, open_image
from pipeline.errors import UsageError, quoted
from pipeline.files import human_size
from pipeline.oci.bundle import Chosen, choose_image
from pipeline.oci.reference import DEFAULT_TAG, Reference, parse_reference
from pipeline.reports.output import print_json, print_text
from pipeline.reports.progress import Progress
from pipeline.settings import Settings
from pipeline.stages.export import FAT32_LIMIT, Exported, export_archive, export_layout

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def run(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    part_size = parse_size(options.split) if options.split else None
    destination, is_archive = _destination(options.to)
    if part_size and is_archive:
        raise UsageError(
            "parts lie in a directory with the script that joins them",
            where=options.to,
            mend="name a directory, without .tar",
        )
    if options.name and len(options.images) > 1:
        raise UsageError("--as names one image", mend="export the images one by one, or leave it out")
    with showing(options) as progress:
        if part_size and part_size > FAT32_LIMIT:
            progress.note(
                f"parts of {human_size(part_size)} do not fit on a FAT32 disk: there it is --split 4095M"
            )
        catalog = load_catalog(settings.catalog) if settings.catalog.exists() else None
        images = [_choose(text, options, catalog, settings, progress) for text in options.images]
        if options.name:
            images = [replace(images[0], name=_full(options.name))]
        since = [_choose(text, options, catalog, settings, progress) for text in options.since]
        if is_archive or part_size:
            made = export_archive(images, since, destination, progress, part_size=part_size)
        else:
            made = export_layout(images, since, destination, settings.parallel, progress)
    if options.json:
        print_json(asdict(made))
    else:
        print_text(_summary(made))
    return 0


def parse_size(text: str) -> int:
    """Bytes from `4G`, `4095M`, `700MiB`, `1000000`: binary units. Raises UsageError for anything else."""
    found = re.fullmatch(r"([1-9][0-9]{0,15})([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise UsageError(f"'{quoted(text)}' is not a size", where="--split", mend="write it as 4G or 4095M")
    return int(found[1]) << _UNITS[found[2].upper()]


def _destination(text: str) -> tuple[Path, bool]:
    """Where to write, and whether that is an archive: `x.tar` is one, other names are directories."""
    if text.startswith(("docker-archive:", "oci:")):
        reference = parse_reference(text)
        if reference.repository or reference.tag:
            raise UsageError(
                "the images keep their names", where=text, mend="leave the name out, or give it with --as"
            )
        return reference.path, reference.transport == "docker-archive"
    if "://" in text or text.startswith("docker-daemon:"):
        raise UsageError(
            "an export goes to a file or a directory",
            where=text,
            mend="to copy to a registry, use 'duopack publish'",
        )
    return Path(text), text.endswith(".tar")


def _choose(
    text: str, options: argparse.Namespace, catalog: Catalog | None, settings: Settings, progress: Progress
) -> Chosen:
    """An image by reference, or of a key from where `build` puts it, under the name it will have."""
    place = find_image(text, settings)
    name = _name_of(place)
    if catalog and place.transport == "oci" and text in {row.key for row in build_keys(catalog)}:
        target = find_target(catalog, text)
        name = _full(f"{image_name(target)}:{image_tag(catalog, target, settings.tag)}")
    source = open_image(place, settings, progress)
    return choose_image(source, place.wanted, options.platform, name)


def _name_of(place: Reference) -> Reference:
    """The name on the other side: its own; a directory's is made from the directory."""
    if place.repository:
        return replace(place, transport="docker", path=Path(), tag=place.tag or DEFAULT_TAG, digest=None)
    stem = repository_part(place.path.resolve().name.removesuffix(".tar")) or "image"
    return _full(f"{stem}:{place.tag or DEFAULT_TAG}")


def _full(name: str) -> Reference:
    reference = parse_reference(name)
    if reference.transport != "docker" or reference.digest:
        raise UsageError(f"'{quoted(name)}' is not a name as NAME:TAG", where="--as")
    return reference


def _summary(made: Exported) -> str:
    rows = [f"{made.destination}: {human_size(made.size)} in {made.seconds:.1f} s"]
    for image in made.images:
        without = f", without {image.left_out} that the other side has" if image.left_out else ""
        rows.append(f"  {image.name}\n    digest  {image.digest}\n    layers  {image.layers}{without}")
    if made.sha256:
        rows.append(f"  sha256  {made.sha256}")
    if made.parts:
        rows.append(f"  parts   {len(made.parts)}, with SHA256SUMS and load.sh")
    there = {
        "archive": f"docker load -i {Path(made.destination).name}",
        "parts": "sh load.sh",
        "layout": f"skopeo copy oci:{Path(made.destination).name}:TAG …",
    }[made.form]
    return "\n".join([*rows, f"There: {there}, or duopack import {Path(made.destination).name}"])
