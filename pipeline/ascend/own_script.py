"""Start scripts of this project read back, without running them: their settings, and the command they come to.

A script is rendered from values (`scripts`), and its form is fixed: settings with their defaults, then an array of
words that grows under conditions on those settings. Another form is none of ours.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.ascend.shell import find_commands
from pipeline.errors import DuopackError, UsageError

_SETTING = re.compile(r"([A-Z][A-Z0-9_]*)=\$\{\1:?-(.*)\}")
_BEGIN = "arguments=("
_CONDITION = re.compile(r"if \[\[ (?:-n \$([A-Z0-9_]+)|\$([A-Z0-9_]+) == (\S+)) \]\]; then(?: (.*); fi)?")
_GROW = re.compile(r"arguments\+=\((.*)\)")


@dataclass(frozen=True)
class OwnScript:
    """The settings by name with their defaults, and the words after `vllm serve` when none is changed."""

    settings: dict[str, str]
    words: tuple[str, ...]


def read_own_script(text: str) -> OwnScript | None:
    """None when the text does not have the form of our scripts."""
    lines = text.splitlines()
    try:
        settings = dict(_settings(lines))
        if _BEGIN not in lines or not settings:
            return None
        words = list(_words(lines[lines.index(_BEGIN) + 1 :], settings))
        assigned = "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items())
        commands = find_commands(f"{assigned}vllm serve {' '.join(words)}\n", where="script")
    except (ValueError, UsageError, DuopackError):
        return None
    return OwnScript(settings, commands[0].words) if len(commands) == 1 else None


def _settings(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        if match := _SETTING.fullmatch(line):
            yield match[1], "".join(shlex.split(match[2]))


def _words(lines: list[str], settings: dict[str, str]) -> Iterator[str]:
    """The source text of the words that the defaults choose. Raises ValueError for another form."""
    in_array, chosen, nested = True, True, False
    for line in lines:
        stripped = line.strip()
        if in_array and stripped != ")":
            yield stripped
        elif in_array:
            in_array = False
        elif not stripped or stripped.startswith("#"):
            continue
        elif match := _CONDITION.fullmatch(stripped):
            holds = _holds(match, settings)
            if match[4] is None:
                nested, chosen = True, holds
            elif holds:
                yield _grown(match[4])
        elif stripped == "else" and nested:
            chosen = not chosen
        elif stripped == "fi" and nested:
            nested, chosen = False, True
        elif stripped.startswith("arguments+=("):
            if chosen:
                yield _grown(stripped)
        else:
            return


def _holds(match: re.Match[str], settings: dict[str, str]) -> bool:
    if match[1]:
        return bool(settings.get(match[1]))
    return settings.get(match[2]) == "".join(shlex.split(match[3]))


def _grown(text: str) -> str:
    match = _GROW.fullmatch(text)
    if not match:
        raise ValueError(text)
    return match[1]
