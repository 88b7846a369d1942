"""`duopack budget`: what a chip's memory goes to, whether it is enough, and what to change if not."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pipeline.ascend.budget import GIB
from pipeline.catalog.load import load_catalog
from pipeline.catalog.target import find_base, find_target
from pipeline.commands.common import settings_of, showing
from pipeline.errors import UsageError
from pipeline.files import write_atomically
from pipeline.lock.values import read_lock
from pipeline.reports.bars import Stack, svg_bars, text_bar
from pipeline.reports.output import print_json, print_text, table
from pipeline.stages.budget import Changes, Fitting, Impossible, compare, find_facts, fit
from pipeline.stages.locking import parse_source


def run(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    catalog = load_catalog(settings.catalog)
    lock = read_lock(settings.lock)
    base = find_base(catalog, options.base)
    changes = _changes(options)
    source = parse_source(options.source) if options.source else None
    keys = options.keys or list(catalog.models)
    if source and len(keys) > 1:
        raise UsageError("--source is for one model", where="--source", mend="name one KEY")
    rows: dict[str, Sequence[Fitting | Impossible]] = {}
    with showing(options) as progress:
        for key in keys:
            target = find_target(catalog, key)
            if len(target.models) > 1:
                raise UsageError(f"{key} is a set", where="KEY", mend="name one of its models")
            (model_key, model), profile = target.models[0], target.profile
            facts = find_facts(
                model_key, model, profile, settings, lock, progress, source=source, offline=options.offline
            )
            if options.compare:
                rows[key] = compare(facts, model, profile, base, changes)
            else:
                rows[key] = (fit(facts, model, profile, base, changes),)
    everything = [one for found in rows.values() for one in found]
    if options.svg:
        write_atomically(options.svg, _picture(rows).encode())
    if options.json:
        print_json({key: [_as_json(one) for one in found] for key, found in rows.items()})
    elif options.compare or len(rows) > 1:
        print_text(_as_table(rows))
    else:
        (key,) = rows
        print_text(_as_text(key, _only(everything)))
    return 1 if not options.compare and not all(_fits(one) for one in everything) else 0


def _changes(options: argparse.Namespace) -> Changes:
    share = options.utilization
    if options.compare and options.tp:
        raise UsageError("--compare shows 1, 2 and 4 chips", where="--tp", mend="leave out one of the two")
    if share is not None and not 0 < share < 1:
        raise UsageError(f"{share} is no share", where="--utilization", mend="give for example 0.8")
    for name in ("max_model_len", "max_num_seqs"):
        value = getattr(options, name)
        if value is not None and value < 1:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{value} is not above zero", where=flag, mend="give a number of 1 or more")
    return Changes(options.tp, options.max_model_len, options.max_num_seqs, share)


def _fits(one: Fitting | Impossible) -> bool:
    return isinstance(one, Fitting) and one.budget.fits


def _only(rows: Sequence[Fitting | Impossible]) -> Fitting:
    (one,) = rows
    assert isinstance(one, Fitting)
    return one


def _as_json(one: Fitting | Impossible) -> dict[str, Any]:
    values = asdict(one)
    if isinstance(one, Fitting):
        values["budget"]["fits"] = one.budget.fits
        values["weights"]["total"] = one.weights.total
    return values


def _as_text(key: str, one: Fitting) -> str:
    budget, options = one.budget, one.budget.options
    verdict = f"fits, {_gib(budget.spare)} of each chip is free" if budget.fits else "does not fit"
    lines = [
        f"{key}: {one.title}, TP {options.ranks}, {options.max_model_len} tokens, {options.max_num_seqs} sequences, "
        f"utilization {options.utilization}: {verdict}",
        *(f"  {problem}" for problem in budget.problems),
        "",
        table([*_rows(one), ("  free" if budget.spare >= 0 else "  MISSING", _gib(abs(budget.spare)), "")]),
        "",
        _bar(one),
        "",
        f"KV cache: {budget.kv_tokens:,} tokens, {budget.full_sequences:.1f} sequences of full length "
        f"({budget.kv_per_token / 1024:.0f} KiB a token, {budget.state_per_sequence / 2**20:.1f} MiB of state each)",
        f"Sizes from {one.origin}.",
    ]
    if one.guide:
        lines.append(
            f"The deployment guide's table 4.2 has about {one.guide} GB of weights per chip; "
            f"these are {one.weights.total / 1e9:.1f} GB."
        )
    if budget.advice:
        lines.append("To mend, one of: " + "; ".join(budget.advice))
    elif budget.problems:
        lines.append("To mend: more chips (--tp), or quantized weights; `--compare` shows them side by side")
    return "\n".join(lines)


def _rows(one: Fitting) -> list[tuple[str, str, str]]:
    weights = one.weights
    parts = [
        ("  " + part.name, _gib(part.size), "estimate" if part.estimate else "") for part in one.budget.parts
    ]
    split = [
        ("    split among the chips", _gib(weights.split), ""),
        ("    alike on several", _gib(weights.shared), "fewer KV heads than chips"),
        ("    whole on every chip", _gib(weights.replicated), ""),
        ("    added by vLLM", _gib(weights.added), "scales that no checkpoint has"),
    ]
    shown = [row for row, size in zip(split, asdict(weights).values(), strict=True) if size >= GIB // 200]
    return [
        ("  one chip", _gib(one.budget.options.chip), ""),
        parts[0],
        *(shown if len(shown) > 1 else []),
        *parts[1:],
    ]


def _as_table(rows: dict[str, Sequence[Fitting | Impossible]]) -> str:
    head = ("KEY", "WEIGHTS ARE", "TP", "WEIGHTS", "GUIDE", "KV CACHE", "TOKENS", "FULL LENGTH", "FREE", "")
    cells = []
    for key, found in rows.items():
        for one in found:
            if isinstance(one, Impossible):
                cells.append((key, one.kind, str(one.ranks), *["–"] * 6, one.why))
                continue
            budget = one.budget
            cells.append(
                (
                    key,
                    one.kind,
                    str(budget.options.ranks),
                    _gib(one.weights.total),
                    f"~{one.guide} GB" if one.guide else "",
                    _gib(budget.kv_cache),
                    f"{budget.kv_tokens:,}",
                    f"{budget.full_sequences:.1f} × {budget.options.max_model_len}",
                    _gib(budget.spare),
                    "fits" if budget.fits else budget.problems[0],
                )
            )
    return table([head, *cells])


def _bar(one: Fitting) -> str:
    plain = "utf" not in (sys.stdout.encoding or "").lower()
    return text_bar(_stack(one, ""), plain=plain)


def _picture(rows: dict[str, Sequence[Fitting | Impossible]]) -> str:
    stacks = [
        _stack(one, f"{key} {one.kind} TP{one.budget.options.ranks}")
        for key, found in rows.items()
        for one in found
        if isinstance(one, Fitting)
    ]
    if not stacks:
        raise UsageError("there is nothing to draw", where="--svg", mend="choose another TP")
    return svg_bars("Memory of one 310P chip, GiB", stacks, unit="GiB")


def _stack(one: Fitting, label: str) -> Stack:
    parts = [(part.name, part.size / GIB) for part in one.budget.parts if part.size]
    return Stack(label, parts, one.budget.options.chip / GIB)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
