"""The known failures, read from the YAML files beside this module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.ascend.versions import version_key
from pipeline.errors import DuopackError
from pipeline.serving.failures.failure import Failure, Kind, Text, When, holds_test
from pipeline.serving.failures.match import FACTS

SUBJECTS = ("chips", "memory", "weights", "options", "engine", "requests", "container")
"""The files, in the order of the page."""
_NEEDED = {"id", "kind", "cause", "mend", "source", "seen", "near"}
_ALLOWED = _NEEDED | {"along", "when", "yields_to", "quiet", "alone", "health", "texts"}


def load_failures() -> dict[str, tuple[Failure, ...]]:
    """The failures by subject. Raises DuopackError for a file that is not as it must be."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    directory = Path(__file__).parent
    found = {}
    for subject in SUBJECTS:
        path = directory / f"{subject}.yaml"
        rows = yaml.load(path.read_bytes(), Loader=loader)  # a safe loader
        found[subject] = tuple(_failures(rows, path.name))
    _check_names([failure for failures in found.values() for failure in failures])
    return found


def _failures(rows: Any, where: str) -> Iterator[Failure]:
    if not isinstance(rows, list):
        raise _wrong("it is no list", where)
    for row in rows:
        name = str(row.get("id")) if isinstance(row, dict) else "?"
        try:
            yield _failure(row)
        except (TypeError, ValueError, KeyError, AttributeError, DuopackError) as error:
            raise _wrong(f"'{name}': {error}", where) from error


def _failure(row: Mapping[str, Any]) -> Failure:
    if missing := _NEEDED - set(row):
        raise ValueError(f"{', '.join(sorted(missing))} missing")
    if unknown := set(row) - _ALLOWED:
        raise ValueError(f"{', '.join(sorted(unknown))} unknown")
    when = When(**(row.get("when") or {}))
    for version in filter(None, (when.since, when.before)):
        version_key(version)
    health = row.get("health") or {}
    for test in (*when.options.values(), *health.values()):
        holds_test(None, test)
    if unknown := set(health) - FACTS:
        raise ValueError(f"{', '.join(sorted(unknown))} is no number of the engine's lines")
    if ("texts" in row) == bool(health):
        raise ValueError("it needs texts or health, and not both")
    return Failure(
        id=row["id"],
        kind=Kind(row["kind"]),
        texts=_texts(row["texts"]) if "texts" in row else (),
        cause=row["cause"].strip(),
        mend=row["mend"].strip(),
        source=row["source"].strip(),
        seen=row["seen"],
        near=row["near"],
        along=_texts(row["along"]) if "along" in row else (),
        when=when,
        yields_to=tuple(row.get("yields_to") or ()),
        alone=row.get("alone", False),
        health=health,
        quiet=row.get("quiet", False),
    )


def _texts(words: Any) -> tuple[Text, ...]:
    texts = tuple(Text(word) for word in ([words] if isinstance(words, str) else words))
    if not texts or any(len(text.needle) < 6 for text in texts):
        raise ValueError(
            "a text needs a part of six characters or more, to be found fast and to mean something"
        )
    return texts


def _check_names(failures: list[Failure]) -> None:
    names = [failure.id for failure in failures]
    if len(set(names)) < len(names):
        raise _wrong("two failures have one id", "failures")
    for failure in failures:
        if unknown := set(failure.yields_to) - set(names):
            raise _wrong(f"'{failure.id}' yields to {', '.join(unknown)}, which is not there", "failures")


def _wrong(what: str, where: str) -> DuopackError:
    return DuopackError(
        f"the table of known failures is broken: {what}", where=where, mend="correct the file"
    )
