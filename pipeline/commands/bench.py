"""`duopack bench`: how fast a running server answers."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.commands.common import showing
from pipeline.errors import DuopackError, UsageError, quoted
from pipeline.files import write_atomically
from pipeline.reports.output import print_json, print_text, table
from pipeline.serving.bench_page import as_html, comparison, remarks, rows
from pipeline.serving.benchmark import Benchmark, as_value, check_comparable, compare, read_benchmark
from pipeline.serving.client import ServerClient
from pipeline.stages.bench import Wanted, bench

if TYPE_CHECKING:
    from docker.models.containers import Container


def run(options: argparse.Namespace) -> int:
    wanted = Wanted(
        concurrencies=_numbers(options.concurrency),
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        requests=options.requests,
        model=options.model,
        # A server caches prefixes: the same prompts a second time would measure the cache.
        seed=secrets.randbelow(2**31) if options.seed is None else options.seed,
        tool=options.tool,
    )
    baseline = _baseline(options.baseline, wanted) if options.baseline else None
    if not 0 <= options.tolerance < 1:
        raise UsageError("it is a share from 0 to 1", where="--tolerance", mend="give 0.05 for five percent")
    client = ServerClient(
        options.url, api_key=os.environ.get("VLLM_API_KEY"), connections=max(wanted.concurrencies)
    )
    with showing(options) as progress, _container(options.container) as container:
        result = bench(client, wanted, progress.note, container)
    compared = compare(result, baseline, tolerance=options.tolerance) if baseline else ()
    value = as_value(result) | ({"compared": [asdict(one) for one in compared]} if baseline else {})
    if options.out:
        _write(options.out, value)
    if options.html:
        write_atomically(options.html, as_html(result, compared, baseline).encode())
    if options.json:
        print_json(value)
    else:
        print_text("\n".join([table(rows(result)), *comparison(compared), *remarks(result)]))
    return 1 if result.failed or any(one.slower for one in compared) else 0


def _baseline(path: Path, wanted: Wanted) -> Benchmark:
    """An earlier result, found fit to be compared before anything is measured."""
    baseline = read_benchmark(path)
    check_comparable(
        baseline,
        input_tokens=wanted.input_tokens,
        output_tokens=wanted.output_tokens,
        at=wanted.concurrencies,
    )
    return baseline


def _write(path: Path, value: object) -> None:
    write_atomically(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def _numbers(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        raise UsageError(f"'{quoted(text)}' is no list of numbers", where="--concurrency", mend="give 1,4,8")
    return tuple(dict.fromkeys(map(int, text.split(","))))


@contextmanager
def _container(name: str | None) -> Iterator[Container | None]:
    if name is None:
        yield None
        return
    import docker

    from pipeline.serving.container import engine, engine_errors

    with engine() as client:
        with engine_errors(name):
            try:
                found = client.containers.get(name)
            except docker.errors.NotFound:
                raise DuopackError(
                    "there is no such container", where=quoted(name), mend="'docker ps' lists those that run"
                ) from None
        yield found
