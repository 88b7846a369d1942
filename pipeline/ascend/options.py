"""Checks a `vllm serve` command line against the options that a version of vLLM really has.

The facts are `data/vllm-<version>-serve-options.json`, read from that version's own parser: flags, whether a
value follows, how many, and which; `data/vllm-<version>-registered.json` names the parsers in its registries,
to which a plugin may add. A version without a file is held against the newest older one, and then nothing is
certain: every problem is a warning.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Literal

from pipeline.ascend.versions import version_key
from pipeline.errors import DuopackError, quoted

_FILE = re.compile(r"vllm-(.+)-serve-options\.json")
_PLUGINS = {"--reasoning-parser": "--reasoning-parser-plugin", "--tool-call-parser": "--tool-parser-plugin"}
_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")


@dataclass(frozen=True)
class Option:
    """One option: all its spellings, how many values follow (None: exactly one), and the allowed ones."""

    flags: tuple[str, ...]
    takes_value: bool
    nargs: str | None
    choices: tuple[str, ...] | None


@dataclass(frozen=True)
class Problem:
    """Something wrong with one option of a command line."""

    severity: Literal["error", "warning"]
    option: str
    sentence: str
    mend: str

    def __str__(self) -> str:
        return f"{self.sentence}. To mend: {self.mend}."


@dataclass(frozen=True)
class OptionTable:
    """The options of one version of `vllm serve`, by flag."""

    version: str
    by_flag: Mapping[str, Option]


@functools.cache
def load_table(vllm_version: str) -> OptionTable:
    """The options of this version; of the newest older one that is known; else of the oldest known."""
    folder = resources.files("pipeline.ascend").joinpath("data")
    known = {found[1]: file for file in folder.iterdir() if (found := _FILE.fullmatch(file.name))}
    if not known:
        raise DuopackError("no table of vLLM options is installed", mend="install duopack again")
    wanted = version_key(vllm_version)
    ordered = sorted(known, key=version_key)
    version = max(
        (name for name in ordered if version_key(name) <= wanted), key=version_key, default=ordered[0]
    )
    data = json.loads(known[version].read_text("utf-8"))
    registered = _registered(version)
    options = (
        Option(
            flags=tuple(entry["flags"]),
            takes_value=entry["takes_value"],
            nargs=entry["nargs"] if isinstance(entry["nargs"], str) else None,
            choices=tuple(entry["choices"] or registered.get(entry["flags"][0], ())) or None,
        )
        for entry in data["options"]
    )
    return OptionTable(version, {flag: option for option in options for flag in option.flags})


def _registered(version: str) -> Mapping[str, list[str]]:
    file = resources.files("pipeline.ascend").joinpath("data", f"vllm-{version}-registered.json")
    if not file.is_file():
        return {}
    names: Mapping[str, list[str]] = json.loads(file.read_text("utf-8"))["registered"]
    return names


def check_options(args: Sequence[str], vllm_version: str) -> list[Problem]:
    """The problems of the words after `vllm serve`; empty when this version takes the command line.

    Raises DuopackError when `vllm_version` is no version.
    """
    table = load_table(vllm_version)
    problems = list(_problems(args, table))
    if version_key(table.version) == version_key(vllm_version):
        return problems
    doubt = f" (known options are those of vLLM {table.version}, not {vllm_version})"
    return [replace(problem, severity="warning", sentence=problem.sentence + doubt) for problem in problems]


@dataclass(frozen=True)
class Word:
    """An option as it stands on a command line, with the values that belong to it.

    `flag` is its spelling with dashes (`--x.y` keeps its `.y`); `option` is None for an unknown one, and `flag`
    is empty for a word that belongs to no option. `glued` tells whether the value was given as `--x=value`.
    """

    text: str
    flag: str
    option: Option | None
    values: tuple[str, ...] = ()
    glued: bool = False

    @property
    def name(self) -> str:
        """The flag without what follows a dot."""
        return self.flag.partition(".")[0]


def walk(args: Sequence[str], table: OptionTable) -> Iterator[Word]:
    """The options among the words after `vllm serve`, in order, as vLLM's parser groups them; the model is left out."""
    position = 1 if args and not _is_option(args[0]) else 0
    while position < len(args):
        text = args[position]
        position += 1
        if not _is_option(text):
            yield Word(text, "", None)
            continue
        flag, glued = _split(text)
        option = table.by_flag.get(flag.partition(".")[0])
        following = _following(args, position)
        if glued is not None:
            yield Word(text, flag, option, (glued,), glued=True)
            continue
        many = option is None or option.nargs == "+"
        takes = option is None or option.takes_value
        values = following if many else following[:1]
        values = values if takes else []
        position += len(values)
        yield Word(text, flag, option, tuple(values))


def _problems(args: Sequence[str], table: OptionTable) -> Iterator[Problem]:
    plugins = {_split(word)[0] for word in args if word.startswith("--")}
    for word in walk(args, table):
        option, flag = word.option, word.flag
        if not flag:
            yield _error(
                word.text,
                f"the word '{quoted(word.text)}' belongs to no option",
                "remove it, or name its option",
            )
        elif option is None:
            yield _unknown(flag, table)
        elif not option.takes_value:
            if word.glued or flag != word.name:
                yield _error(flag, f"{word.name} takes no value", f"write {word.name} alone")
        else:
            if not word.values and option.nargs != "?":
                yield _error(flag, f"{flag} needs a value, and none follows it", f"write {flag} VALUE")
            if flag == word.name and _PLUGINS.get(flag) not in plugins:
                yield from _bad_values(flag, word.values, option)


def _bad_values(flag: str, values: Sequence[str], option: Option) -> Iterator[Problem]:
    for value in values:
        if option.choices and value not in option.choices:
            near = difflib.get_close_matches(value, option.choices, n=1)
            mend = f"did you mean {near[0]}" if near else f"use one of {', '.join(option.choices)}"
            yield _error(flag, f"{flag} does not take '{quoted(value)}'", mend)
        if value.startswith("{"):
            try:
                json.loads(value)
            except ValueError as error:
                yield _error(flag, f"the value of {flag} is not JSON: {error}", "correct the JSON text")


def _is_option(word: str) -> bool:
    # As argparse sees it: a dash, but neither a dash alone, nor a negative number, nor a text with spaces.
    return (
        len(word) > 1 and word.startswith("-") and not _NUMBER.match(word) and " " not in word.split("=")[0]
    )


def _following(args: Sequence[str], position: int) -> list[str]:
    end = position
    while end < len(args) and not _is_option(args[end]):
        end += 1
    return list(args[position:end])


def _split(word: str) -> tuple[str, str | None]:
    if re.fullmatch(r"-O=?.+", word):
        return "--optimization-level", word[2:].removeprefix("=")
    flag, equals, value = word.partition("=")
    if flag.startswith("--"):
        name, dot, rest = flag.partition(".")
        flag = name.replace("_", "-") + dot + rest
    if flag == "-O":
        flag = "--optimization-level"
    return flag, value if equals else None


def _unknown(flag: str, table: OptionTable) -> Problem:
    near = difflib.get_close_matches(flag, table.by_flag, n=3, cutoff=0.75)
    mend = f"did you mean {' or '.join(near)}" if near else "remove it, or see `vllm serve --help=all`"
    return _error(flag, f"vLLM {table.version} has no option {quoted(flag)}", mend)


def _error(option: str, sentence: str, mend: str) -> Problem:
    return Problem("error", option, sentence, mend)
