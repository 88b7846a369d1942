"""What a rule is, and what it says when it applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pipeline.ascend.rules.case import Case


class Severity(StrEnum):
    """Error: it cannot work. Warning: it may go wrong. Note: it could be better."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """A rule that applies: what follows from it, what to do, and where the knowledge comes from."""

    id: str
    severity: Severity
    sentence: str
    mend: str
    source: str
    where: str = ""

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        return f"{where}{self.sentence}. To mend: {self.mend} [{self.id}; {self.source}]"


def when(applies: object, detail: object = "") -> str | None:
    """The answer of `Rule.applies`: the detail when it holds, else None."""
    return str(detail) if applies else None


@dataclass(frozen=True)
class Rule:
    """One piece of knowledge.

    `applies` gives None when all is well, else the words that complete `consequence` where it has `{}`.
    """

    id: str
    severity: Severity
    applies: Callable[[Case], str | None]
    consequence: str
    mend: str
    source: str

    def judge(self, case: Case) -> Finding | None:
        detail = self.applies(case)
        if detail is None:
            return None
        sentence = self.consequence.replace("{}", detail)
        return Finding(self.id, self.severity, sentence, self.mend, self.source)
