"""What a server's log says: how far it came, how it does, what went wrong first, and how to mend it.

A log is read once, in pieces, in constant memory. It may hold several runs (a container that restarts): the last one
is judged, and those before it are counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pipeline.serving.errors_seen import ErrorReader, SeenError
from pipeline.serving.failures.failure import Kind
from pipeline.serving.failures.match import Match, Matcher, Table
from pipeline.serving.header import Header, model_in, options_in, version_in
from pipeline.serving.health import Health, HealthReader, sample_in
from pipeline.serving.logs import Line, Role, lines_of

MAX_RUNS = 20


class State(StrEnum):
    """How far a server came."""

    NOTHING = "no server's line was seen"
    STARTING = "starting"
    LOADING = "loading the weights"
    CAPTURING = "capturing graphs"
    READY = "ready"
    SERVING = "serving"
    STOPPED = "stopped as it was told to"
    DEAD = "dead"


_STEPS: tuple[tuple[str, State], ...] = (
    ("Starting to load model", State.LOADING),
    ("Loading safetensors checkpoint shards", State.LOADING),
    ("Loading model weights took", State.LOADING),
    ("Loading weights took", State.LOADING),
    ("Warming up model for the compilation", State.CAPTURING),
    ("Capturing CUDA graph", State.CAPTURING),
    ("Capturing ACL graph", State.CAPTURING),
    ("Graph capturing finished", State.CAPTURING),
    ("Application startup complete", State.READY),
)
_DEATHS = (
    "EngineCore failed to start",
    "EngineCore encountered a fatal error",
    "EngineCore encountered an issue",
    "Engine core initialization failed",
    "Engine core proc",
    "died unexpectedly",
    "WorkerProc failed to start",
    "vllm: error:",
    "vllm serve: error:",
    "docker: Error response from daemon",
    "Fatal Python error",
    "container: ended with exit code",
)
_STOPS = ("Shutdown initiated", "Shutting down", "Application shutdown complete", "Finished server process")
_ORDER = {state: number for number, state in enumerate(State)}


@dataclass(frozen=True)
class Diagnosis:
    """What is known of the last run in a log.

    `matches` has causes first; `first_error` is what was first raised or called an error, None when nothing was.
    `earlier` tells how the runs before ended, by the id of their first cause or their state, the last ones only.
    """

    lines: int
    state: State
    header: Header
    matches: tuple[Match, ...]
    first_error: SeenError | None
    health: Health
    runs: int = 1
    earlier: tuple[str, ...] = ()
    first: str = ""
    last: str = ""

    @property
    def causes(self) -> tuple[Match, ...]:
        """What ended the server or spoils its answers, the most likely first."""
        return tuple(match for match in self.matches if match.failure.kind is not Kind.NOTE)

    @property
    def notes(self) -> tuple[Match, ...]:
        """What is worth knowing of a server that goes on."""
        return tuple(match for match in self.matches if match.failure.kind is Kind.NOTE)

    @property
    def failed(self) -> bool:
        """Whether something is wrong, known or not."""
        return bool(self.causes) or self.state is State.DEAD

    @property
    def unknown(self) -> bool:
        """Whether something is wrong whose cause the table does not have."""
        return self.failed and not any(match.failure.kind is Kind.CAUSE for match in self.matches)


def diagnose(chunks: Iterable[bytes], table: Table, symptoms: Sequence[str] = ()) -> Diagnosis:
    """Reads a whole log.

    `symptoms` are what was seen from outside, in the words of the table's `container: …` and `smoke: …` texts; they
    count as the log's last lines.
    """
    reader = LogReader(table)
    for line in lines_of(chunks):
        reader.add(line)
    return reader.result(symptoms)


@dataclass
class _Run:
    """One start of the server; `alive` is the last line that shows that it answers."""

    matcher: Matcher
    errors: ErrorReader = field(default_factory=ErrorReader)
    health: HealthReader = field(default_factory=HealthReader)
    state: State = State.NOTHING
    header: Header = field(default_factory=Header)
    alive: int = 0

    def add(self, line: Line) -> None:
        self.matcher.add(line)
        # While a server stops, its processes lose each other and say so.
        raised = None if self.state is State.STOPPED else self.errors.add(line)
        if raised and not line.level and line.role >= Role.SERVER and not self.reached(State.READY):
            self._reach(State.DEAD)
        self._read_header(line.text)
        self._follow(line)

    def reached(self, state: State) -> bool:
        return _ORDER[self.state] >= _ORDER[state]

    def _reach(self, state: State) -> None:
        if not self.reached(state):
            self.state = state

    def _read_header(self, text: str) -> None:
        known = self.header
        version = known.version or version_in(text)
        model = known.model or model_in(text)
        options = options_in(text) if known.options is None else known.options
        if (version, model, options) != (known.version, known.model, known.options):
            self.header = Header(version, model, options)
            self._reach(State.STARTING)

    def _follow(self, line: Line) -> None:
        text = line.text
        if sample := sample_in(text):
            self.health.add(sample, line.when)
            self._answered(line)
        elif '" 200 OK' in text and "POST /v1/" in text:
            self._answered(line)
        elif self.reached(State.STOPPED):
            return
        elif any(death in text for death in _DEATHS):
            self._reach(State.DEAD)
        elif any(stop in text for stop in _STOPS):
            self._reach(State.STOPPED)
        else:
            for words, state in _STEPS:
                if words in text:
                    self._reach(state)

    def _answered(self, line: Line) -> None:
        self.alive = line.number
        self._reach(State.SERVING)

    def matches(self) -> tuple[Match, ...]:
        """What was met, without what only follows from a known cause, and causes that the server outlived."""
        error = self.errors.raised
        raised = error.line.number if error and not error.wrapper else None
        found = self.matcher.matches(self.header, self.health.result(), raised=raised)
        found = tuple(match for match in found if not self._outlived(match))
        known = any(match.failure.kind is Kind.CAUSE for match in found)
        return tuple(match for match in found if not (known and match.failure.kind is Kind.CONSEQUENCE))

    def _outlived(self, match: Match) -> bool:
        return (
            match.failure.kind is not Kind.NOTE and self.state is not State.DEAD and match.last < self.alive
        )


class LogReader:
    """Takes lines as they come, for a log that is followed; `result` can be asked at any time."""

    def __init__(self, table: Table) -> None:
        self.lines = 0
        self._table = table
        self._run = _Run(Matcher(table))
        self._runs = 1
        self._earlier: deque[str] = deque(maxlen=MAX_RUNS)
        self._times = ("", "")

    def add(self, line: Line) -> None:
        self.lines = line.number
        if line.when:
            self._times = (self._times[0] or line.when, line.when)
        if "█" in line.text and version_in(line.text) and self._run.reached(State.LOADING):
            self._earlier.append(_ending(self._run))
            self._run, self._runs = _Run(Matcher(self._table)), self._runs + 1
        self._run.add(line)

    def result(self, symptoms: Sequence[str] = ()) -> Diagnosis:
        """What the lines so far say, with what was seen from outside."""
        run = self._run
        for number, symptom in enumerate(symptoms, self.lines + 1):
            run.add(Line(number, symptom))
        return Diagnosis(
            lines=self.lines,
            state=run.state,
            header=run.header,
            matches=run.matches(),
            first_error=run.errors.first(),
            health=run.health.result(),
            runs=self._runs,
            earlier=tuple(self._earlier),
            first=self._times[0],
            last=self._times[1],
        )


def _ending(run: _Run) -> str:
    """How a run ended, in a word or a few."""
    causes = [match for match in run.matches() if match.failure.kind is not Kind.NOTE]
    return causes[0].failure.id if causes else run.state.value
