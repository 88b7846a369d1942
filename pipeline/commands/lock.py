"""`duopack lock`: resolve the catalog into models.lock, and show what has moved."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial
from typing import Any

from pipeline.catalog.load import load_catalog
from pipeline.commands.common import settings_of, showing
from pipeline.errors import DuopackError, UsageError
from pipeline.files import exclusive
from pipeline.lock.refresh import Change, Refreshed, refresh
from pipeline.lock.resolve import lock_base
from pipeline.lock.values import Lock, read_lock, write_lock
from pipeline.reports.output import print_json, print_text
from pipeline.stages.locking import lock_file_guard, parse_source, resolve_model


def run(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    catalog = load_catalog(settings.catalog)
    if options.source and len(options.keys) != 1:
        raise UsageError(
            "--source is for one model", where="--source", mend="name the model: duopack lock KEY --source …"
        )
    source = parse_source(options.source) if options.source else None

    def keep(change: Change, lock: Lock) -> None:
        # What succeeded is written at once: a later failure or Ctrl-C does not lose it.
        if not options.check and change.kind in {"locked", "updated", "dropped"}:
            write_lock(settings.lock, lock)

    with showing(options) as progress, ExitStack() as stack:
        if not options.check:
            stack.enter_context(exclusive(lock_file_guard(settings.lock), progress.note))
        done = refresh(
            catalog,
            read_lock(settings.lock),
            options.keys,
            resolve_model=partial(resolve_model, settings=settings, progress=progress, source=source),
            resolve_base=partial(lock_base, relative_to=settings.catalog.parent, on_note=progress.warn),
            update=options.update,
            on_start=lambda name: progress.note(f"resolving {name}"),
            on_change=keep,
        )
    _show(done, options)
    if options.check:
        return 0 if done.current else 1
    return 1 if done.moved or done.failures else 0


def _show(done: Refreshed, options: argparse.Namespace) -> None:
    if options.json:
        print_json({"changes": [_plain(change) for change in done.changes]})
        return
    for change in done.changes:
        detail = str(change.error) if change.error else change.reason
        print_text(f"{change.kind:8} {change.entry}: {detail}")
        for line in change.lines:
            print_text(f"           {line}")


def _plain(change: Change) -> dict[str, Any]:
    error: DuopackError | None = change.error
    return {
        "kind": change.kind,
        "entry": change.entry,
        "reason": change.reason,
        "lines": list(change.lines),
        "error": str(error) if error else None,
    }
