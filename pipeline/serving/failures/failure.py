"""What a known failure is, and when a log's words mean it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pipeline.ascend.versions import version_key
from pipeline.errors import DuopackError
from pipeline.serving.header import Header

ANY = "…"
"""In a text to look for: whatever stands between, or nothing, on the same line."""


class Kind(StrEnum):
    """Cause: it ends a server or spoils its answers. Consequence: something else was before it, and is the cause
    where it is known. Note: the server goes on."""

    CAUSE = "cause"
    CONSEQUENCE = "consequence"
    NOTE = "note"


@dataclass(frozen=True)
class Text:
    """Words to look for in a line: literal parts in their order. `^` before the first holds them to the start."""

    words: str

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(part for part in self.words.removeprefix("^").split(ANY) if part)

    @property
    def needle(self) -> str:
        """The part that is least often met."""
        return max(self.parts, key=len)

    def found_in(self, line: str) -> bool:
        at = 0
        for number, part in enumerate(self.parts):
            if number == 0 and self.words.startswith("^"):
                if not line.startswith(part):
                    return False
                at = len(part)
                continue
            at = line.find(part, at)
            if at < 0:
                return False
            at += len(part)
        return True


@dataclass(frozen=True)
class When:
    """What the header must say: vLLM's version, and options in words such as `given` or `over 2`.

    vllm-ascend's releases carry the number of the vLLM that they are for, so one bound serves both.
    """

    since: str | None = None
    before: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def holds(self, header: Header) -> bool | None:
        """None where the log's header does not tell."""
        answers = [_version_holds(self, header)] if self.since or self.before else []
        for path, test in self.options.items():
            answers.append(None if header.options is None else holds_test(header.option(path), test))
        if False in answers:
            return False
        return None if None in answers else True

    def __str__(self) -> str:
        words = [
            f"vLLM {bound} {version}"
            for bound, version in (("from", self.since), ("before", self.before))
            if version
        ]
        return ", ".join([*words, *(f"{path} {test}" for path, test in self.options.items())])


def _version_holds(when: When, header: Header) -> bool | None:
    if header.version is None:
        return None
    try:
        version = version_key(header.version)
    except DuopackError:
        return None
    if when.since and version < version_key(when.since):
        return False
    return not (when.before and version >= version_key(when.before))


def holds_test(value: Any, test: str) -> bool:
    """Whether a value is what the test says: `given`, `absent`, `is A|B`, `not A|B`, `over N`, `under N`.

    `over` and `under` count what a list holds. Raises ValueError for a test of another form.
    """
    word, _, operand = test.partition(" ")
    given = value not in (None, False, "", [], {})
    if test in {"given", "absent"}:
        return given == (test == "given")
    if word in {"is", "not"} and operand:
        return (str(value) in operand.split("|")) == (word == "is")
    if word in {"over", "under"} and operand:
        bound, number = float(operand), len(value) if isinstance(value, (list, tuple)) else value
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return False
        return number > bound if word == "over" else number < bound
    raise ValueError(f"'{test}' is no test of an option")


@dataclass(frozen=True)
class Failure:
    """One known failure.

    It is met when any of `texts` stands in a line, and each of `along` somewhere in the same run. `yields_to` names
    failures that say it better when they are met too. `seen` is a log that has it, `near` one that only looks so.
    """

    id: str
    kind: Kind
    texts: tuple[Text, ...]
    cause: str
    mend: str
    source: str
    seen: str
    near: str
    along: tuple[Text, ...] = ()
    when: When = When()
    yields_to: tuple[str, ...] = ()
    alone: bool = False
    """Whether it is met only where no error was raised before it."""
    health: Mapping[str, str] = field(default_factory=dict)
    """Tests of the numbers of the engine's lines (`cache_max: over 90`), in place of texts."""
    quiet: bool = False
    """Whether its texts count in lines of level INFO and WARNING too, where others only speak of an error."""
