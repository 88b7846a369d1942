"""The known failures held against the lines of one run of a server, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from pipeline.serving.failures.failure import Failure, Kind, Text, holds_test
from pipeline.serving.header import Header
from pipeline.serving.health import Health
from pipeline.serving.logs import Line

_QUIET = {"DEBUG", "INFO", "WARNING"}
_MOST_PLAIN = 1024
_BEYOND = "beyond_graphs"
FACTS = frozenset({one.name for one in fields(Health)} | {_BEYOND})
"""The numbers that a failure's `health` may test."""
_QUOTING = ("Received request ", "Added request ", "Generated response ")
"""Records that quote what users sent or got: only texts that are held to a line's beginning count in them."""


@dataclass(frozen=True)
class Match:
    """A failure that was met: the first line that shows it, the number of the last one, and how many did.

    `certain` is False where the log's header does not tell what the failure depends on.
    """

    failure: Failure
    line: Line
    last: int
    count: int
    certain: bool


@dataclass(frozen=True)
class Table:
    """Failures, prepared for the search: what to look for in quiet lines, and in all others."""

    failures: tuple[Failure, ...]
    loud: tuple[tuple[str, Text, Failure], ...]
    quiet: tuple[tuple[str, Text, Failure], ...]
    along: tuple[tuple[str, Text], ...]


def table_of(failures: Sequence[Failure]) -> Table:
    texts = tuple((text.needle, text, failure) for failure in failures for text in failure.texts)
    along = {text: None for failure in failures for text in failure.along}
    return Table(
        tuple(failures),
        texts,
        tuple(row for row in texts if row[2].quiet),
        tuple((text.needle, text) for text in along),
    )


@dataclass
class Matcher:
    """Takes lines as they come; keeps one line and two numbers for each failure."""

    table: Table
    _met: dict[str, tuple[Line, int, int]] = field(default_factory=dict)
    _along: set[Text] = field(default_factory=set)
    _plain: set[tuple[str, bool]] = field(default_factory=set)
    """Lines that are known to show nothing: tracebacks repeat themselves."""

    def add(self, line: Line) -> None:
        key = line.text, line.level in _QUIET
        if key in self._plain:
            return
        if not self._search(line):
            if len(self._plain) >= _MOST_PLAIN:
                self._plain.clear()
            self._plain.add(key)

    def _search(self, line: Line) -> bool:
        """Whether the line shows anything."""
        words, found = line.text, False
        quoting = words.startswith(_QUOTING)
        for needle, along in self.table.along:
            if needle in words and not quoting and along not in self._along and along.found_in(words):
                self._along.add(along)
                found = True
        for needle, text, failure in self.table.quiet if line.level in _QUIET else self.table.loud:
            if needle in words and text.found_in(words) and (not quoting or text.words.startswith("^")):
                first, _, count = self._met.get(failure.id, (line, 0, 0))
                self._met[failure.id] = (first, line.number, count + 1)
                found = True
        return found

    def matches(self, header: Header, health: Health, *, raised: int | None = None) -> tuple[Match, ...]:
        """What was met: causes before what follows from them, certain before likely, then by time and process.

        `raised` is the number of the line where the first error was raised.
        """
        facts = facts_of(health, header)
        met: dict[str, Match] = {}
        for failure in self.table.failures:
            holds = failure.when.holds(header)
            if holds is False:
                continue
            if failure.health and all(holds_test(facts[name], test) for name, test in failure.health.items()):
                words = ", ".join(f"{name} {facts[name]}" for name in failure.health)
                met[failure.id] = Match(failure, Line(0, words), 0, 1, certain=holds is True)
            elif failure.id in self._met and self._along.issuperset(failure.along):
                met[failure.id] = Match(failure, *self._met[failure.id], certain=holds is True)
        for match in tuple(met.values()):
            if match.failure.alone and raised is not None and raised < match.line.number:
                del met[match.failure.id]
        kept = [
            match for match in met.values() if not any(better in met for better in match.failure.yields_to)
        ]
        return tuple(sorted(kept, key=_order))


def facts_of(health: Health, header: Header) -> dict[str, object]:
    """The numbers by name; `beyond_graphs` is how many requests ran beyond the largest captured batch."""
    facts: dict[str, object] = {one.name: getattr(health, one.name) for one in fields(Health)}
    sizes = header.option("compilation_config.cudagraph_capture_sizes")
    numbers = [size for size in sizes if isinstance(size, int)] if isinstance(sizes, (list, tuple)) else []
    facts[_BEYOND] = health.running_max - max(numbers) if numbers else None
    return facts


def _order(match: Match) -> tuple[int, bool, str, int, int]:
    line = match.line
    return list(Kind).index(match.failure.kind), not match.certain, line.when, line.role, line.number
