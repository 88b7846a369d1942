"""A finding: what is wrong with an image, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pipeline.errors import DuopackError, quoted
from pipeline.stages.inside.image import Inside
from pipeline.stages.inside.place import UnreadError

Severity = Literal["error", "warning", "note"]
ORDER: tuple[Severity, ...] = ("error", "warning", "note")
MOST_SHOWN = 5
AGAIN = "build the image again"


@dataclass(frozen=True)
class Finding:
    """Error: it will not serve, or is not what it claims. Warning: it may go wrong, or wastes. Note: worth knowing.

    `where` names the layer, file or directory inside the image.
    """

    id: str
    severity: Severity
    sentence: str
    mend: str = AGAIN
    where: str = ""

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        end = "" if self.sentence.endswith((".", "!", "?")) else "."
        return f"{self.severity}: {where}{self.sentence}{end} To mend: {self.mend} [{self.id}]"


def of_error(id_: str, error: DuopackError, *, severity: Severity = "error") -> Finding:
    """What a check raised, as a finding."""
    return Finding(id_, severity, error.what, error.mend or AGAIN, error.where)


def of_unread(id_: str, error: UnreadError, inside: Inside) -> Finding:
    """Bytes that were not looked into: to be expected, unless every byte was asked for."""
    return of_error(id_, error, severity="error" if inside.deep else "note")


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first; each once."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda one: ORDER.index(one.severity)))


def lines(findings: Iterable[Finding], *, most: int = MOST_SHOWN) -> list[str]:
    """Findings for people, at most so many of one kind."""
    kinds: dict[tuple[str, Severity], list[Finding]] = {}
    for one in findings:
        kinds.setdefault((one.id, one.severity), []).append(one)
    shown = []
    for (id_, severity), same in kinds.items():
        shown += [str(one) for one in same[:most]]
        if len(same) > most:
            shown.append(f"{severity}: and {len(same) - most} more like these; --json has all [{id_}]")
    return shown


def some(names: Iterable[str], limit: int = 3) -> str:
    """A few names in a sentence."""
    known = list(names)
    shown = ", ".join(quoted(name, 120) for name in known[:limit])
    return shown if len(known) <= limit else f"{shown} and {len(known) - limit} more"
