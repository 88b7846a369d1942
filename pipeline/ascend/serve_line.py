"""A `vllm serve` command as a value: its model, its options and its environment, read from words and changed in copies.

Options have one spelling here: the long name with dashes (`-tp` and `--tensor_parallel_size` are one); a switch's
`--no-` form stays what it is. Where an option stands twice the last counts, as for vLLM's parser.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.ascend.options import OptionTable, Word, load_table, walk

_HUMAN = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
UNREAD = re.compile(r"[$`]")
"""A value with one of these is the shell's to make: what it is cannot be told from the text."""


@dataclass(frozen=True)
class Given:
    """An option and its values; `--x.y` keeps its `.y`."""

    flag: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServeLine:
    """What follows `vllm serve`, and the environment variables that the same text sets."""

    model: str
    options: tuple[Given, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    stray: tuple[str, ...] = ()
    """Words that belong to no option."""

    def has(self, flag: str) -> bool:
        return any(one.flag.partition(".")[0] == flag for one in self.options)

    def value(self, flag: str) -> str | None:
        """The option's first value; None when it is absent, has none, or the shell makes it."""
        found = next((one for one in reversed(self.options) if one.flag == flag), None)
        if found is None or not found.values or UNREAD.search(found.values[0]):
            return None
        return found.values[0]

    def number(self, flag: str) -> int | None:
        """A whole number, in vLLM's human form too (16k is 16,000 and 16K is 16,384); None when it is none."""
        match = re.fullmatch(r"(\d{1,12})([kmgKMG]?)", self.value(flag) or "")
        return int(match[1]) * _HUMAN.get(match[2], 1) if match else None

    def fraction(self, flag: str) -> float | None:
        text = self.value(flag) or ""
        return float(text) if re.fullmatch(r"\d{0,6}\.?\d{1,12}", text) else None

    def switch(self, flag: str) -> bool | None:
        """True for `--x`, False for `--no-x`, None when neither is given."""
        negative = f"--no-{flag.removeprefix('--')}"
        last = next((one.flag for one in reversed(self.options) if one.flag in {flag, negative}), None)
        return None if last is None else last == flag

    def config(self, flag: str) -> dict[str, Any]:
        """A JSON option with its dotted forms merged in; what is not JSON counts as empty."""
        merged: dict[str, Any] = {}
        for one in self.options:
            name, _, path = one.flag.partition(".")
            if name == flag and one.values:
                value = _json(one.values[0])
                merged = (
                    value if not path and isinstance(value, dict) else _with(merged, path.split("."), value)
                )
        return merged

    def with_option(self, flag: str, *values: str) -> ServeLine:
        """The option with these values: where it stood, or last."""
        at = next((number for number, one in enumerate(self.options) if one.flag == flag), len(self.options))
        kept = tuple(one for one in self.options if one.flag.partition(".")[0] != flag)
        at = min(at, len(kept))
        return replace(self, options=(*kept[:at], Given(flag, values), *kept[at:]))

    def with_config(self, flag: str, value: Mapping[str, Any]) -> ServeLine:
        return self.with_option(flag, json.dumps(value))

    def without(self, *flags: str) -> ServeLine:
        return replace(
            self, options=tuple(one for one in self.options if one.flag.partition(".")[0] not in flags)
        )

    def with_env(self, name: str, value: str) -> ServeLine:
        return replace(self, env={**self.env, name: value})

    def without_env(self, *names: str) -> ServeLine:
        return replace(self, env={name: value for name, value in self.env.items() if name not in names})

    def words(self) -> list[str]:
        """The words after `vllm serve`."""
        words = [self.model] if self.model else []
        return words + [word for one in self.options for word in (one.flag, *one.values)]

    def text(self) -> str:
        """The command for a shell: exports, then one option a line. What the shell is to expand stays open to it."""
        exports = [f"export {name}={shell_word(value)}\n" for name, value in self.env.items()]
        lines = [f"vllm serve {shell_word(self.model)}".rstrip()]
        lines += [" ".join([one.flag, *map(shell_word, one.values)]) for one in self.options]
        return "".join(exports) + " \\\n  ".join(lines)


def read_line(words: Sequence[str], env: Mapping[str, str], vllm: str) -> ServeLine:
    """The words after `vllm serve` of this vLLM version, as a value. An unknown option keeps its name."""
    table = load_table(vllm)
    options, stray, model = [], [], words[0] if words and not words[0].startswith("-") else ""
    for word in walk(words, table):
        flag = _main_flag(word, table)
        if not flag:
            stray.append(word.text)
        elif flag == "--model" and word.values:
            model = word.values[0]
        else:
            options.append(Given(flag, word.values))
    return ServeLine(model, tuple(options), dict(env), tuple(stray))


def _main_flag(word: Word, table: OptionTable) -> str:
    option = table.by_flag.get(word.name)
    if option is None:
        return word.flag
    negative = word.name.startswith("--no-")
    alike = [flag for flag in option.flags if flag.startswith("--no-") == negative and flag.startswith("--")]
    return (alike or [word.name])[0] + word.flag[len(word.name) :]


def shell_word(text: str) -> str:
    """A word for a shell: what the shell is to expand in it stays open."""
    if not UNREAD.search(text):
        return shlex.quote(text)
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _with(config: dict[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    key = path[0].replace("-", "_")
    inner = config.get(key)
    return {
        **config,
        key: _with(inner if isinstance(inner, dict) else {}, path[1:], value) if path[1:] else value,
    }
