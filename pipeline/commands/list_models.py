"""`duopack list`: the keys that can be built, and what each serves."""

from __future__ import annotations

import argparse

from pipeline.catalog.load import load_catalog
from pipeline.catalog.target import build_keys, find_target
from pipeline.commands.common import destination_of, settings_of
from pipeline.lock.values import read_lock
from pipeline.reports.output import print_json, print_text, table


def run(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    catalog = load_catalog(settings.catalog)
    lock = read_lock(settings.lock)
    rows = []
    for row in build_keys(catalog):
        target = find_target(catalog, row.key)
        locked = all(key in lock.models for key, _ in target.models) and target.base_key in lock.bases
        rows.append(
            {
                "key": row.key,
                "chips": row.chips,
                "command": f"{target.script}.sh",
                "served_name": target.profile.served_name,
                "locked": locked,
                "destination": destination_of(catalog, target, settings),
                "description": row.description,
            }
        )
    if options.json:
        print_json(rows)
        return 0
    head = ("KEY", "CHIPS", "LOCKED", "WHAT", "WHERE TO")
    cells = [
        (
            str(row["key"]),
            str(row["chips"]),
            "yes" if row["locked"] else "no",
            str(row["description"]),
            str(row["destination"]),
        )
        for row in rows
    ]
    print_text(table([head, *cells]))
    return 0
