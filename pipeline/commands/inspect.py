"""`duopack inspect`: what is in an image and what it weighs; with two, what differs."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from pipeline.commands.common import settings_of, showing
from pipeline.commands.looking import asking_of, find_image, open_image
from pipeline.errors import UsageError, quoted
from pipeline.files import human_size
from pipeline.oci.reference import Reference
from pipeline.reports.output import print_json, print_text
from pipeline.reports.progress import Progress
from pipeline.settings import Settings
from pipeline.stages.inside.image import Inside, platforms, see
from pipeline.stages.inspect.compare import Comparison, FileChange, compare
from pipeline.stages.inspect.parts import Inventory, Part, take_inventory

MOST_FILES = 8
MOST_CHANGES = 40
_SURE = {True: "the same", False: "probably the same (--deep proves it)"}


def run(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    first = find_image(options.image, settings)
    second = find_image(options.other, settings) if options.other else None
    with showing(options) as progress:
        images = _see(first, options, settings, progress)
        others = _see(second, options, settings, progress) if second else ()
        if second and (len(images) > 1 or len(others) > 1):
            raise UsageError(
                "two images are compared for one platform",
                where=str(first if len(images) > 1 else second),
                mend="say which with --platform",
            )
        inventories = [take_inventory(one) for one in (*images, *others)]
        comparison = compare(images[0], others[0]) if others else None
    if options.json:
        value: dict[str, Any] = {"images": [_as_json(one) for one in inventories]}
        print_json(value | ({"comparison": asdict(comparison)} if comparison else {}))
    elif comparison and second:
        print_text(_comparison_text(comparison, first, second))
    else:
        print_text("\n\n".join(_inventory_text(one, first) for one in inventories))
    return 0


def _see(
    reference: Reference, options: argparse.Namespace, settings: Settings, progress: Progress
) -> tuple[Inside, ...]:
    source = open_image(reference, settings, progress)
    asking = asking_of(options, settings, progress, str(reference))
    found = platforms(source, reference.wanted, asking.platform)
    return tuple(see(source, str(reference), one, asking) for one in found)


def _as_json(inventory: Inventory) -> dict[str, Any]:
    value = asdict(inventory)
    for one, duplicate in zip(value["duplicates"], inventory.duplicates, strict=True):
        one["waste"] = duplicate.waste
    return value | {"waste": inventory.waste}


def _inventory_text(inventory: Inventory, reference: Reference) -> str:
    rows = [
        f"{reference} ({inventory.platform or 'no platform'})",
        f"  {inventory.digest}",
        f"  {human_size(inventory.stored)} in {inventory.layers} layers; "
        f"runs {quoted(' '.join(inventory.command)) or 'its entrypoint'}",
    ]
    parts = [part for part in inventory.parts if part.stored or part.files]
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        rows.append(f"{'└' if is_last else '├'}─ {_part_text(part, inventory)}")
        rows += [f"{' ' if is_last else '│'}   {line}" for line in _file_lines(part)]
    return "\n".join([*rows, *_waste_lines(inventory)])


def _part_text(part: Part, inventory: Inventory) -> str:
    layers = f"{len(part.layers)} layer{'' if len(part.layers) == 1 else 's'}"
    files = f"{len(part.files)} file{'' if len(part.files) == 1 else 's'}"
    stored = f"{human_size(part.stored):>8}"
    if part.kind == "base":
        name = f" {quoted(inventory.base_name)}" if inventory.base_name else ""
        return f"{stored}  base{name}: {layers}; {inventory.base_sentence}"
    if part.kind == "model":
        return f"{stored}  {quoted(part.name)} in /{quoted(part.path)}: {files} in {layers}"
    what = {
        "scripts": f"start scripts and launch.json: {files}",
        "other": f"other files: {files} in {layers}",
        "hidden": f"files that later layers replace or remove: in {layers}",
        "unread": f"not looked into: {layers}; --deep reads every byte",
    }[part.kind]
    return f"{stored}  {what}"


def _file_lines(part: Part) -> list[str]:
    if part.kind in {"base", "hidden", "unread"}:
        return []
    shown = [
        f"{human_size(one.size):>8}  {quoted(_relative(one.path, part))}" for one in part.files[:MOST_FILES]
    ]
    rest = part.files[MOST_FILES:]
    if rest:
        shown.append(f"{human_size(sum(one.size for one in rest)):>8}  in {len(rest)} more")
    return shown


def _relative(path: str, part: Part) -> str:
    return path.removeprefix(f"{part.path}/") if part.path else f"/{path}"


def _waste_lines(inventory: Inventory) -> list[str]:
    rows = [
        (one.waste, f"{_SURE[one.proved]}: {', '.join(f'/{quoted(path)}' for path in one.paths[:4])}")
        for one in inventory.duplicates[:MOST_FILES]
    ]
    rows += [
        (one.size, f"in layer {one.layer}, replaced or removed later: /{quoted(one.path)}")
        for one in inventory.hidden[:MOST_FILES]
    ]
    rows += [
        (one.size, f"left behind by a download or tool: /{quoted(one.path)}")
        for one in inventory.leftovers[:MOST_FILES]
    ]
    head = [f"Waste: {human_size(inventory.waste)}"] if rows else []
    wasted = [f"  {human_size(size):>8}  {what}" for size, what in rows]
    return [*head, *wasted, *(f"At fault: {fault}" for fault in inventory.faults[:MOST_FILES])]


def _comparison_text(found: Comparison, first: Reference, second: Reference) -> str:
    rows = [f"from {first}", f"     {found.before}", f"to   {second}", f"     {found.after}"]
    if found.same:
        return "\n".join([*rows, "One image: nothing differs."])
    transfer = found.transfer
    rows += [
        f"  shared    {found.shared_layers} layers, {human_size(found.shared_size)}",
        f"  transfer  {transfer.layers} layers, {human_size(transfer.size)}"
        + (
            ""
            if transfer.size == transfer.docker_size
            else f"; docker pull: {transfer.docker_layers} layers, {human_size(transfer.docker_size)}, "
            "since it keeps a layer only where all below it is the same"
        ),
    ]
    rows += [
        f"  setting   {quoted(one.name)}: {_value(one.before)} → {_value(one.after)}"
        for one in found.settings
    ]
    rows += [f"  {one.change:<8}  {_change(one)}" for one in found.files[:MOST_CHANGES]]
    if len(found.files) > MOST_CHANGES:
        rows.append(f"  and {len(found.files) - MOST_CHANGES} more files; --json has all")
    if found.unread:
        rows.append("  Files in layers that were not looked into are not compared; --deep reads them.")
    return "\n".join(rows)


def _value(value: Any) -> str:
    return "nothing" if value is None else quoted(str(value), 70)


def _change(one: FileChange) -> str:
    sizes = [human_size(size) for size in (one.before, one.after) if size is not None]
    size = sizes[0] if len(set(sizes)) == 1 else " → ".join(sizes)
    return f"/{quoted(one.path)} ({size}{f', {quoted(one.what)}' if one.what else ''})"
