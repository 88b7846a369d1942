"""A benchmark for people: a table for the terminal, and a page with its plots that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from pipeline.reports.lines import Series, svg_lines
from pipeline.serving.benchmark import Benchmark, Compared, Point, Spread

HEAD = (
    "at a time",
    "requests",
    "failed",
    "output tok/s",
    "total tok/s",
    "TTFT p50/p90/p99 ms",
    "TPOT p50/p90/p99 ms",
    "server's count",
)
_STYLE = (
    "body{font-family:sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.3em .6em;text-align:right}"
    "svg{max-width:100%;height:auto}"
)


def rows(benchmark: Benchmark) -> list[tuple[str, ...]]:
    """The table, its head first."""
    return [HEAD, *(_row(point) for point in benchmark.points)]


def remarks(benchmark: Benchmark) -> list[str]:
    """What one should know before believing the numbers."""
    found = []
    for point in benchmark.points:
        at = f"at {point.concurrency} at a time"
        found += [f"{at} a request failed: {error}" for error in point.errors]
        if point.agreed is False and point.server:
            found.append(
                f"{at} the server made {point.server.generation_tokens} tokens and the client saw another number: "
                "somebody else uses the server, or requests were cut"
            )
        if point.server and point.server.preemptions:
            found.append(
                f"{at} the server put {point.server.preemptions} requests back: its KV cache was full"
            )
        if point.server and point.server.prefix_hit_rate > 0.05:
            found.append(f"{at} {point.server.prefix_hit_rate:.0%} of the prompts came from the prefix cache")
    if all(point.server is None for point in benchmark.points):
        found.append(
            "the server's own counters (/metrics) could not be read, so nothing checks these numbers"
        )
    return found


def comparison(compared: Sequence[Compared]) -> list[str]:
    """A line for each point that the baseline has too."""
    return [
        f"{one.concurrency} at a time: {one.output_throughput:.1%} of the baseline's output"
        + (f", {one.ttft:.1%} of its time to the first token" if one.ttft is not None else "")
        + (": slower" if one.slower else "")
        for one in compared
    ]


def throughput_svg(benchmark: Benchmark, baseline: Benchmark | None = None) -> str:
    """Output and total throughput over concurrency, with the baseline's output beside them."""
    series = [
        Series("output", [(point.concurrency, point.output_throughput) for point in benchmark.points]),
        Series("total", [(point.concurrency, point.total_throughput) for point in benchmark.points]),
    ]
    if baseline:
        points = [(point.concurrency, point.output_throughput) for point in baseline.points]
        series.append(Series("baseline's output", points))
    return svg_lines(
        f"{benchmark.model}: throughput", series, x_label="requests at a time", y_label="tokens/s"
    )


def latency_svg(benchmark: Benchmark, name: str, title: str) -> str:
    """Percentiles of `ttft` or `tpot` over concurrency."""
    points: list[tuple[int, Spread]] = [
        (point.concurrency, times)
        for point in benchmark.points
        if (times := getattr(point, name)) is not None
    ]
    series = [
        Series(percentile, [(concurrency, getattr(times, percentile)) for concurrency, times in points])
        for percentile in ("p50", "p90", "p99")
    ]
    return svg_lines(f"{benchmark.model}: {title}", series, x_label="requests at a time", y_label="ms")


def as_html(
    benchmark: Benchmark, compared: Sequence[Compared] = (), baseline: Benchmark | None = None
) -> str:
    """The whole page; it asks no other server for anything."""
    head, *body = rows(benchmark)
    table = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    columns = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(f"<li>{escape(line)}</li>" for line in [*comparison(compared), *remarks(benchmark)])
    about = (
        f"{benchmark.url}, {benchmark.root or benchmark.model}; {benchmark.input_tokens} tokens in and "
        f"{benchmark.output_tokens} out; measured with {benchmark.tool} on {benchmark.started}"
    )
    plots = (
        throughput_svg(benchmark, baseline),
        latency_svg(benchmark, "ttft", "time to the first token"),
        latency_svg(benchmark, "tpot", "time for each token after it"),
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(benchmark.model)}: benchmark'
        f"</title><style>{_STYLE}</style></head><body>\n<h1>{escape(benchmark.model)}</h1>\n<p>{escape(about)}</p>\n"
        f"<table><tr>{columns}</tr>{table}</table>\n<ul>{lines}</ul>\n{''.join(plots)}</body></html>\n"
    )


def _row(point: Point) -> tuple[str, ...]:
    counted = "not asked" if point.agreed is None else "agrees" if point.agreed else "differs"
    return (
        str(point.concurrency),
        str(point.requests),
        str(point.failed),
        f"{point.output_throughput:.1f}",
        f"{point.total_throughput:.1f}",
        _times(point.ttft),
        _times(point.tpot),
        counted,
    )


def _times(times: Spread | None) -> str:
    return "-" if times is None else f"{times.p50:.1f}/{times.p90:.1f}/{times.p99:.1f}"
