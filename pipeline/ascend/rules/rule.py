"""What a rule is, and what it says when it applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Generic, TypeVar

from pipeline.ascend.versions import version_key

if TYPE_CHECKING:
    from pipeline.ascend.docker_line import DockerLine
    from pipeline.ascend.serve_line import ServeLine


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
class Bases:
    """The vllm-ascend versions that a rule is about: from `since` on, and before `before`; absent: no bound."""

    since: str | None = None
    before: str | None = None

    def have(self, version: str) -> bool:
        key = version_key(version)
        return not (self.since and key < version_key(self.since)) and not (
            self.before and key >= version_key(self.before)
        )

    def __str__(self) -> str:
        words = [f"from {self.since}" if self.since else "", f"before {self.before}" if self.before else ""]
        return " ".join(filter(None, words)) or "all"


ALL = Bases()
CaseType = TypeVar("CaseType")


@dataclass(frozen=True)
class Rule(Generic[CaseType]):
    """One piece of knowledge.

    `looks_at` names the options, variables or catalog keys in question. `applies` gives None when all is well, else
    the words that complete `consequence` where it has `{}`. `fix` gives the command without the fault, where one
    answer is right for everybody.
    """

    id: str
    severity: Severity
    looks_at: str
    applies: Callable[[CaseType], str | None]
    consequence: str
    mend: str
    source: str
    bases: Bases = ALL
    fix: Callable[[CaseType], ServeLine | DockerLine] | None = None

    def judge(self, case: CaseType, version: str) -> Finding | None:
        """What it says of a case on a base with this vllm-ascend version; None when it does not apply."""
        detail = self.applies(case) if self.bases.have(version) else None
        if detail is None:
            return None
        sentence = self.consequence.replace("{}", detail)
        return Finding(self.id, self.severity, sentence, self.mend, self.source)
