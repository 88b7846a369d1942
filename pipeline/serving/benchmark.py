"""What a benchmark of a server gives: one point for each concurrency; as values, and as JSON with a schema's name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import UsageError, quoted

SCHEMA = "duopack-bench/1"
AGREED = 0.02
"""The share by which client and server may differ over the tokens made."""


@dataclass(frozen=True)
class Spread:
    """How a time is spread over requests, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class ServerSide:
    """What the server counted meanwhile. `prefix_hit_rate` is a share from 0 to 1."""

    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    prefix_hit_rate: float


@dataclass(frozen=True)
class Point:
    """One concurrency: `requests` answered and `failed` in `seconds`; throughput in tokens/s by the client's clock.

    `ttft` is the time to the first token, `tpot` the time for each token after it; None where no request tells.
    `agreed` is whether the server counted the same tokens; None when it was not asked. `errors` are the first few.
    """

    concurrency: int
    requests: int
    failed: int
    seconds: float
    output_throughput: float
    total_throughput: float
    ttft: Spread | None
    tpot: Spread | None
    server: ServerSide | None = None
    agreed: bool | None = None
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Benchmark:
    """A sweep over concurrencies. `tool` made the requests: `duopack` or `vllm bench serve`."""

    url: str
    model: str
    root: str
    tool: str
    input_tokens: int
    output_tokens: int
    seed: int
    started: str
    points: tuple[Point, ...]

    @property
    def failed(self) -> bool:
        return any(point.failed or not point.requests for point in self.points)


@dataclass(frozen=True)
class Compared:
    """A point against one of a baseline with the same concurrency; ratios of new to old."""

    concurrency: int
    output_throughput: float
    ttft: float | None
    slower: bool


def spread(seconds: Sequence[float]) -> Spread | None:
    """The spread of some times in seconds; percentiles are of the nearest rank."""
    if not seconds:
        return None
    ordered = sorted(seconds)

    def rank(percent: int) -> float:
        return round(1000 * ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)], 3)

    return Spread(round(1000 * sum(ordered) / len(ordered), 3), rank(50), rank(90), rank(99))


def as_value(benchmark: Benchmark) -> dict[str, Any]:
    """For machines; keys are only ever added under one schema name."""
    return {"schema": SCHEMA, **asdict(benchmark)}


def read_benchmark(path: Path) -> Benchmark:
    """A benchmark from a file that `duopack bench --out` wrote. Raises UsageError for any other."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(
            f"cannot be read: {error.strerror}", where=str(path), mend="give a file of 'duopack bench --out'"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            "this is no JSON", where=str(path), mend="give a file of 'duopack bench --out'"
        ) from error
    return from_value(value, where=str(path))


def from_value(value: Any, *, where: str) -> Benchmark:
    """A benchmark from its JSON value. Raises UsageError for one that is none, or of another schema."""
    mend = "give a file of 'duopack bench --out'"
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        raise UsageError(f"its schema is {quoted(str(schema))}, not {SCHEMA}", where=where, mend=mend)
    try:
        return Benchmark(
            **{name: kind(value[name]) for name, kind in _FIELDS.items()},
            points=tuple(_point(row) for row in value["points"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"it is damaged: {type(error).__name__} {quoted(str(error))}", where=where, mend=mend
        ) from error


def check_comparable(old: Benchmark, *, input_tokens: int, output_tokens: int, at: Sequence[int]) -> None:
    """Raises UsageError when nothing can be compared: other token counts, or no concurrency in common."""
    if (input_tokens, output_tokens) != (old.input_tokens, old.output_tokens):
        raise UsageError(
            f"it has {old.input_tokens} tokens in and {old.output_tokens} out, not {input_tokens} and {output_tokens}",
            where="--baseline",
            mend=f"give --input-tokens {old.input_tokens} --output-tokens {old.output_tokens}",
        )
    if not {point.concurrency for point in old.points if point.output_throughput > 0} & set(at):
        raise UsageError(
            "it has no concurrency in common with this",
            where="--baseline",
            mend="give --concurrency " + ",".join(str(point.concurrency) for point in old.points),
        )


def compare(new: Benchmark, old: Benchmark, *, tolerance: float) -> tuple[Compared, ...]:
    """The points that both have; `slower` where the output throughput fell by more than the tolerance (a share)."""
    before = {point.concurrency: point for point in old.points if point.output_throughput > 0}
    return tuple(
        _compared(point, before[point.concurrency], tolerance)
        for point in new.points
        if point.concurrency in before
    )


def _compared(new: Point, old: Point, tolerance: float) -> Compared:
    ratio = new.output_throughput / old.output_throughput
    ttft = new.ttft.p50 / old.ttft.p50 if new.ttft and old.ttft and old.ttft.p50 else None
    return Compared(new.concurrency, round(ratio, 4), ttft and round(ttft, 4), ratio < 1 - tolerance)


_FIELDS: Mapping[str, Any] = {
    "url": str,
    "model": str,
    "root": str,
    "tool": str,
    "input_tokens": int,
    "output_tokens": int,
    "seed": int,
    "started": str,
}


def _point(row: Mapping[str, Any]) -> Point:
    server = row.get("server")
    return Point(
        concurrency=int(row["concurrency"]),
        requests=int(row["requests"]),
        failed=int(row["failed"]),
        seconds=float(row["seconds"]),
        output_throughput=float(row["output_throughput"]),
        total_throughput=float(row["total_throughput"]),
        ttft=_spread(row["ttft"]),
        tpot=_spread(row["tpot"]),
        server=None
        if server is None
        else ServerSide(**{name: server[name] for name in ServerSide.__annotations__}),
        agreed=row.get("agreed"),
        errors=tuple(map(str, row.get("errors", ()))),
    )


def _spread(row: Mapping[str, Any] | None) -> Spread | None:
    return None if row is None else Spread(*(float(row[name]) for name in ("mean", "p50", "p90", "p99")))
