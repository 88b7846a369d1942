"""A diagnosis in words for people, and as one value for machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pipeline.errors import quoted
from pipeline.serving.diagnosis import Diagnosis, State
from pipeline.serving.errors_seen import SeenError
from pipeline.serving.failures.match import Match
from pipeline.serving.health import Health
from pipeline.serving.logs import Line

SCHEMA = "duopack-diagnosis/1"
_WIDTH = 220
_STEPS = " ▁▂▃▄▅▆▇█"
_PLAIN_STEPS = " .:-=+*#@"
_COLUMNS = 60
_MANY = 4


def summary(diagnosis: Diagnosis) -> str:
    """The cause and its mend in a paragraph; what was first seen where no cause is known; "" when all is well."""
    causes = diagnosis.causes
    if causes:
        first = causes[0]
        doubt = "" if first.certain else "Probably: "
        return f"{doubt}{first.failure.cause} To mend: {first.failure.mend}. [{first.failure.id}]"
    if not diagnosis.failed:
        return ""
    error = diagnosis.first_error
    seen = f" The first error in the log: {quoted(error.text, _WIDTH)}" if error else " The log has no error."
    return f"The cause is not known: no known failure fits.{seen}"


def as_value(diagnosis: Diagnosis, where: str) -> dict[str, Any]:
    """The diagnosis for machines; keys are only ever added under one schema name."""
    header = diagnosis.header
    return {
        "schema": SCHEMA,
        "where": where,
        "state": diagnosis.state.name.lower(),
        "failed": diagnosis.failed,
        "unknown": diagnosis.unknown,
        "summary": summary(diagnosis),
        "causes": [_match_value(match) for match in diagnosis.causes],
        "notes": [_match_value(match) for match in diagnosis.notes],
        "first_error": _error_value(diagnosis.first_error),
        "vllm": header.version,
        "model": header.model,
        "options": header.options,
        "health": asdict(diagnosis.health) if diagnosis.health.lines else None,
        "lines": diagnosis.lines,
        "first": diagnosis.first,
        "last": diagnosis.last,
        "runs": diagnosis.runs,
        "earlier": list(diagnosis.earlier),
    }


def as_text(diagnosis: Diagnosis, where: str, *, plain: bool = False) -> str:
    """The diagnosis for people; `plain` keeps to ASCII where it draws."""
    return "\n".join(
        [
            f"{quoted(where)}: {_head(diagnosis)}",
            *_judgement(diagnosis),
            *_health(diagnosis.health, plain=plain),
            *(line for note in diagnosis.notes for line in _told(note, "note")),
            *_earlier(diagnosis),
        ]
    )


def _head(diagnosis: Diagnosis) -> str:
    header = diagnosis.header
    what = [
        diagnosis.state.value,
        f"vLLM {header.version}" if header.version else "",
        quoted(header.model) if header.model else "",
        f"{diagnosis.first} to {diagnosis.last}" if diagnosis.first else "",
        f"{diagnosis.lines} lines",
    ]
    return ", ".join(filter(None, what))


def _judgement(diagnosis: Diagnosis) -> Iterator[str]:
    causes = diagnosis.causes
    for number, match in enumerate(causes[:_MANY]):
        word = "cause" if match.certain else "likely cause"
        yield from _told(match, word if number == 0 else f"after it, or another {word}")
    if len(causes) > _MANY:
        yield f"and {len(causes) - _MANY} more (--json has them)"
    error = diagnosis.first_error
    if diagnosis.failed and not causes:
        yield "the cause is not known: no known failure fits" + (
            "" if error else ", and the log has no error"
        )
    if diagnosis.failed and error and (not causes or _is_before(error, causes[0])):
        yield from _first(error)
    if not diagnosis.failed:
        yield _calm(diagnosis)


def _calm(diagnosis: Diagnosis) -> str:
    if diagnosis.state is State.NOTHING:
        return "nothing of a server is in it: is it the right log, and does the server write to it?"
    if diagnosis.state is State.STOPPED:
        return "no failure: the server was told to stop, and did"
    if diagnosis.state in {State.READY, State.SERVING}:
        return (
            "no failure was seen; a server that was killed from outside (kill -9) leaves a log like this too"
        )
    return "no failure was seen; it still starts, or was killed from outside (kill -9) before it was ready"


def _is_before(error: SeenError, match: Match) -> bool:
    return not error.wrapper and 0 < error.line.number < match.line.number - 1


def _first(error: SeenError) -> Iterator[str]:
    yield f"first error: {quoted(error.text, 2 * _WIDTH)}"
    yield f"  {_place(error.line)}" + (f", {quoted(error.frame)}" if error.frame else "")


def _told(match: Match, word: str) -> Iterator[str]:
    failure = match.failure
    yield f"{word}: {failure.cause}"
    if match.line.number:
        more = f" ({match.count} times)" if match.count > 1 else ""
        yield f"  {_place(match.line)}{more}: {quoted(match.line.text.strip(), _WIDTH)}"
    else:
        yield f"  {match.line.text}"
    yield f"  to mend: {failure.mend}"
    yield f"  [{failure.id}; {failure.source}]"


def _place(line: Line) -> str:
    return " ".join(
        filter(None, (f"line {line.number}", f"({line.process})" if line.process else "", line.when))
    )


def _health(health: Health, *, plain: bool) -> Iterator[str]:
    if not health.lines:
        return
    alone = f", {health.generation_one:g} with one request alone" if health.generation_one is not None else ""
    yield (
        f"health, {health.first} to {health.last}: generation {health.generation_mean:g} tokens/s, at most "
        f"{health.generation_max:g}{alone}; prompts at most {health.prompt_max:g} tokens/s"
    )
    yield (
        f"  at most {health.running_max} running and {health.waiting_max} waiting, {health.preemptions} preempted; KV "
        f"cache at most {health.cache_max:g} %, prefix hits {health.hits_last:g} %"
    )
    if len(health.points) > 1:
        yield f"  generation over time: {sparkline([point.generation for point in health.points], plain=plain)}"


def sparkline(values: list[float], *, plain: bool = False) -> str:
    """The course of some values in one line of at most 60 characters, from 0 to their maximum."""
    steps = _PLAIN_STEPS if plain else _STEPS
    columns = min(_COLUMNS, len(values))
    cuts = [values[len(values) * at // columns : len(values) * (at + 1) // columns] for at in range(columns)]
    means = [sum(cut) / len(cut) for cut in cuts]
    top = max(means) or 1.0
    return "".join(steps[round(mean / top * (len(steps) - 1))] for mean in means)


def _earlier(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.runs > 1:
        yield (
            f"{diagnosis.runs - 1} run{'s' if diagnosis.runs > 2 else ''} before this one ended with: "
            f"{', '.join(dict.fromkeys(diagnosis.earlier))}"
        )


def _match_value(match: Match) -> dict[str, Any]:
    failure = match.failure
    return {
        "id": failure.id,
        "kind": failure.kind.value,
        "certain": match.certain,
        "cause": failure.cause,
        "mend": failure.mend,
        "source": failure.source,
        "count": match.count,
        "line": match.line.number,
        "process": match.line.process,
        "when": match.line.when,
        "text": match.line.text,
    }


def _error_value(error: SeenError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {
        "text": error.text,
        "frame": error.frame,
        "line": error.line.number,
        "process": error.line.process,
        "when": error.line.when,
        "wrapper": error.wrapper,
    }
