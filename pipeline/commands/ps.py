"""`duopack ps`: what runs where, what it really serves, and what about it is wrong."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from urllib.parse import urlsplit

from pipeline.ascend.host import run as run_program
from pipeline.ascend.npu_smi import NpuSmi, parse_npu_smi
from pipeline.errors import DuopackError
from pipeline.reports.output import print_json, print_text, table
from pipeline.stages.survey import Row, ask_servers, strangers, survey


def run(options: argparse.Namespace) -> int:
    from pipeline.serving.container import engine
    from pipeline.stages.containers import list_containers
    from pipeline.stages.running import is_local

    with engine() as client:
        held = list_containers(client, pids=True)
        local = is_local(client)
        host = "127.0.0.1" if local else urlsplit(str(client.api.base_url)).hostname or "127.0.0.1"
    npu = _npu() if local else None
    rows = survey(held, ask_servers(held, host), npu)
    others = strangers(held, npu)
    if options.json:
        print_json({"containers": [asdict(row) for row in rows], "others": others})
        return 0
    if rows:
        head = ("CONTAINER", "MODEL", "SERVED NAME", "CHIPS", "PORT", "STATE")
        print_text(table([head, *map(_cells, rows)]))
    else:
        print_text("no container has chips or serves a model")
    for row in rows:
        for warning in row.warnings:
            print_text(f"warning: {row.name}: {warning}")
    for line in others:
        print_text(f"note: {line}")
    return 0


def _npu() -> NpuSmi | None:
    try:
        return parse_npu_smi(run_program(("npu-smi", "info")).text)
    except DuopackError:
        return None


def _cells(row: Row) -> tuple[str, ...]:
    chips = "all" if row.chips is None else ",".join(map(str, row.chips))
    state = f"{row.state} ({row.health})" if row.health and row.state == "running" else row.state
    return (
        row.name,
        row.model or "?",
        row.served or "?",
        chips or "-",
        ",".join(map(str, row.ports)) or "-",
        f"{state}, answers" if row.answers else state,
    )
