"""The engine's own lines, every ten seconds while it works, summed up in bounded memory.

`Engine 000: Avg prompt throughput: 1403.7 tokens/s, Avg generation throughput: 17.0 tokens/s, Running: 1 reqs,
Waiting: 0 reqs, GPU KV cache usage: 1.5%, Prefix cache hit rate: 0.0%` (vLLM 0.20.2; some parts are optional).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_POINTS = 120
MAX_ENGINES = 64
_NUMBER = r"(\d{1,9}(?:\.\d{1,6})?)"
_ENGINE = re.compile(r"Engine (\d{1,4}): ")
_PARTS = {
    "prompt": re.compile(rf"Avg prompt throughput: {_NUMBER} tokens/s"),
    "generation": re.compile(rf"Avg generation throughput: {_NUMBER} tokens/s"),
    "running": re.compile(rf"Running: {_NUMBER} reqs"),
    "waiting": re.compile(rf"Waiting: {_NUMBER} reqs"),
    "preemptions": re.compile(rf"Preemptions: {_NUMBER}"),
    "cache": re.compile(rf"KV cache usage: {_NUMBER}%"),
    "hits": re.compile(rf"(?<!External )Prefix cache hit rate: {_NUMBER}%"),
}


@dataclass(frozen=True)
class Sample:
    """One line of an engine; throughput in tokens/s, cache usage and hit rate in percent."""

    engine: int
    prompt: float
    generation: float
    running: int
    waiting: int
    preemptions: int
    cache: float
    hits: float


@dataclass(frozen=True)
class Point:
    """Throughput at a time, in tokens/s; where there were too many lines, the mean of some neighbours."""

    when: str
    prompt: float
    generation: float
    waiting: float


@dataclass(frozen=True)
class Health:
    """What the engines' lines say together; throughput in tokens/s, shares in percent.

    `generation_mean` is over the lines with running requests; `lines` is their number, 0 when there is none.
    `generation_one` is the mean over the lines where exactly one request ran.
    """

    lines: int = 0
    engines: int = 0
    first: str = ""
    last: str = ""
    prompt_max: float = 0.0
    generation_max: float = 0.0
    generation_mean: float = 0.0
    generation_one: float | None = None
    running_max: int = 0
    waiting_max: int = 0
    waiting_last: int = 0
    preemptions: int = 0
    cache_max: float = 0.0
    hits_last: float = 0.0
    hits_max: float = 0.0
    points: tuple[Point, ...] = ()


def sample_in(text: str) -> Sample | None:
    """The numbers of an engine's line; None for any other."""
    match = _ENGINE.match(text)
    if match is None or "throughput" not in text:
        return None
    found = {name: part.search(text) for name, part in _PARTS.items()}
    values = {name: float(one[1]) if one else 0.0 for name, one in found.items()}
    return Sample(
        int(match[1]),
        values["prompt"],
        values["generation"],
        int(values["running"]),
        int(values["waiting"]),
        int(values["preemptions"]),
        values["cache"],
        values["hits"],
    )


@dataclass
class HealthReader:
    """Takes samples as they come."""

    _lines: int = 0
    _engines: set[int] = field(default_factory=set)
    _times: list[str] = field(default_factory=list)
    _most: dict[str, float] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)
    _busy: list[float] = field(default_factory=lambda: [0, 0.0])
    _one: list[float] = field(default_factory=lambda: [0, 0.0])
    _preemptions: int = 0
    _points: list[Point] = field(default_factory=list)
    _group: list[Point] = field(default_factory=list)
    _stride: int = 1

    def add(self, sample: Sample, when: str) -> None:
        self._lines += 1
        # vLLM counts these from line to line.
        self._preemptions += sample.preemptions
        self._times = [self._times[0] if self._times else when, when]
        if sample.engine in self._engines or len(self._engines) < MAX_ENGINES:
            self._engines.add(sample.engine)
        for name in _PARTS:
            value = float(getattr(sample, name))
            self._most[name] = max(self._most.get(name, 0.0), value)
            self._last[name] = value
        for sums, counts in ((self._busy, sample.running > 0), (self._one, sample.running == 1)):
            if counts and sample.generation > 0:
                sums[0] += 1
                sums[1] += sample.generation
        self._group.append(Point(when, sample.prompt, sample.generation, float(sample.waiting)))
        if len(self._group) == self._stride:
            self._points.append(_mean(self._group))
            self._group = []
        if len(self._points) == MAX_POINTS:
            self._points = [_mean(self._points[at : at + 2]) for at in range(0, MAX_POINTS, 2)]
            self._stride *= 2

    def result(self) -> Health:
        if not self._lines:
            return Health()
        most, last = self._most, self._last
        return Health(
            lines=self._lines,
            engines=len(self._engines),
            first=self._times[0],
            last=self._times[1],
            prompt_max=most["prompt"],
            generation_max=most["generation"],
            generation_mean=round(self._busy[1] / self._busy[0], 2) if self._busy[0] else 0.0,
            generation_one=round(self._one[1] / self._one[0], 2) if self._one[0] else None,
            running_max=int(most["running"]),
            waiting_max=int(most["waiting"]),
            waiting_last=int(last["waiting"]),
            preemptions=self._preemptions,
            cache_max=most["cache"],
            hits_last=last["hits"],
            hits_max=most["hits"],
            points=(*self._points, *([_mean(self._group)] if self._group else [])),
        )


def _mean(points: list[Point]) -> Point:
    count = len(points)
    return Point(
        points[0].when,
        round(sum(point.prompt for point in points) / count, 2),
        round(sum(point.generation for point in points) / count, 2),
        round(sum(point.waiting for point in points) / count, 2),
    )
