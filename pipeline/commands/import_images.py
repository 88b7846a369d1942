"""`duopack import`: what `duopack export` brought, into a registry, an engine or a layout."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from pipeline.commands.common import settings_of, showing
from pipeline.errors import UsageError, quoted
from pipeline.files import human_size
from pipeline.oci.reference import parse_reference
from pipeline.reports.output import print_json, print_text
from pipeline.stages.importing import Imported, Offered, bring, destinations, open_export


def run(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    if options.to and options.under:
        raise UsageError("--to and --under exclude each other", mend="give one of them")
    source, offered = open_export(options.path)
    chosen = _chosen(offered, options.image)
    to = parse_reference(options.to) if options.to else None
    under = options.under or (None if to else settings.registry)
    have = [parse_reference(text) for text in options.have]
    done: list[Imported] = []
    with showing(options) as progress:
        # Every destination is known to be a sound one before the first image moves.
        for one, destination in destinations(chosen, to, under):
            done.append(bring(source, one, destination, have, settings, progress, platform=options.platform))
            if not options.json:
                print_text(_summary(done[-1]))
    if options.json:
        print_json([asdict(one) for one in done])
    return 0


def _chosen(offered: Sequence[Offered], names: Sequence[str]) -> tuple[Offered, ...]:
    """The images with these names or tags; all when none is given."""
    if not names:
        return tuple(offered)
    known = {name: one for one in offered for name in _names(one)}
    if unknown := [name for name in names if name not in known]:
        have = ", ".join(quoted(_names(one)[0], 100) for one in offered)
        raise UsageError(
            f"there is no image '{quoted(unknown[0])}' in it", where="--image", mend=f"it has: {have}"
        )
    return tuple(dict.fromkeys(known[name] for name in names))


def _names(one: Offered) -> tuple[str, ...]:
    return tuple(filter(None, (one.name.name_tag if one.name else "", one.tag, one.wanted))) or ("",)


def _summary(done: Imported) -> str:
    return (
        f"{done.destination}\n  digest    {done.digest}\n"
        f"  sent      {done.layers_sent} layers, {human_size(done.sent)} in {done.seconds:.1f} s"
    )
