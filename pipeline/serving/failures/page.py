"""The known failures as a page for people; docs/failures.md is this text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.serving.failures.failure import Failure
from pipeline.serving.failures.load import load_failures

_TITLES = {
    "chips": "Chips and driver",
    "memory": "Memory and disk",
    "weights": "Weights",
    "options": "Options",
    "engine": "The engine and its processes",
    "requests": "Requests and health",
    "container": "The container",
}
_HEAD = """\
# Known failures

What `duopack diagnose` knows, as data: `pipeline/serving/failures/*.yaml`. This page is made from it by
`duopack diagnose --table`; a test holds the two together, and each entry to a log that has it and to one that only
looks so.

A **cause** ends a server or spoils its answers. A **consequence** is told where nothing before it is known. A **note**
is about a server that goes on. In a text "…" stands for anything on the same line, and `^` for its beginning, after
times and process names are taken off. Where an entry holds only for some versions or options, the log's header must say
so; a log without its header gets it as likely. `#N` in a source is issue or pull request N of the repository before it,
and "run" was seen with vLLM itself.

Lines that begin with `container:` are what the engine knows of a container, with `smoke:` what a check of the server
saw.
"""


def failures_page() -> str:
    """The whole page, in Markdown."""
    sections = load_failures()
    return "\n".join(
        [_HEAD, *(line for subject, found in sections.items() for line in _section(subject, found))]
    )


def as_rows() -> list[dict[str, Any]]:
    """The same as values, without the example logs."""
    return [
        {
            "id": failure.id,
            "subject": subject,
            "kind": failure.kind.value,
            "texts": [text.words for text in failure.texts],
            "along": [text.words for text in failure.along],
            "health": dict(failure.health),
            "when": str(failure.when),
            "cause": failure.cause,
            "mend": failure.mend,
            "source": failure.source,
        }
        for subject, failures in load_failures().items()
        for failure in failures
    ]


def _section(subject: str, failures: Sequence[Failure]) -> Iterator[str]:
    yield f"## {_TITLES[subject]}\n"
    for failure in failures:
        yield f"### {failure.id}\n"
        yield f"{failure.kind.value.capitalize()}. {failure.cause}\n"
        yield f"- Seen as: {_seen(failure)}."
        if str(failure.when):
            yield f"- Only with: {failure.when}."
        yield f"- To mend: {failure.mend}."
        yield f"- Source: {failure.source}.\n"


def _seen(failure: Failure) -> str:
    numbers = [f"{name} {test}" for name, test in failure.health.items()]
    joined = " or ".join(_code(text.words) for text in failure.texts) or " and ".join(numbers)
    along = " and ".join(_code(text.words) for text in failure.along)
    return f"{joined}, together with {along}" if along else joined


def _code(words: str) -> str:
    return f"`` {words} ``" if "`" in words else f"`{words}`"
