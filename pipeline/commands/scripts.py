"""`duopack scripts`: the launch files of a target in a directory, to read or to use without an image of ours."""

from __future__ import annotations

import argparse

from pipeline.catalog.load import load_catalog
from pipeline.catalog.target import find_target
from pipeline.commands.common import settings_of, showing
from pipeline.files import write_atomically
from pipeline.lock.values import read_lock
from pipeline.reports.output import print_json, print_text
from pipeline.stages.launch import launch_files


def run(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    target = find_target(load_catalog(settings.catalog), options.key, base=options.base)
    base = read_lock(settings.lock).bases.get(target.base_key)
    digest = base.platforms.get(target.platform, "") if base else ""
    if not digest:
        with showing(options) as progress:
            progress.warn("the base is not locked: launch.json says nothing of its digest")
    launch = launch_files(dict(target.models), target.base, digest, target.script)
    written = []
    for path, mode, data in launch.files:
        place = options.to / path.rpartition("/")[2]
        write_atomically(place, data, mode=mode)
        written.append(str(place))
    if options.json:
        print_json(written)
    else:
        print_text("\n".join(written))
    return 0
