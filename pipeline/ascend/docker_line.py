"""A `docker run` command as a value: what it says of chips, names, ports and memory, changed in copies."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipeline.ascend.serve_line import UNREAD, shell_word

_SWITCHES = frozenset(
    {
        *("-d", "--detach", "-i", "--interactive", "-t", "--tty", "-P", "--publish-all", "-q", "--quiet"),
        *("--rm", "--privileged", "--init", "--read-only", "--no-healthcheck", "--oom-kill-disable"),
        *("--sig-proxy", "--disable-content-trust"),
    }
)
"""Options of `docker run` that take no value; all others take one."""
_LONG = {
    "-e": "--env",
    "-p": "--publish",
    "-v": "--volume",
    "-m": "--memory",
    "-d": "--detach",
    "-i": "--interactive",
    "-t": "--tty",
    "-w": "--workdir",
    "-u": "--user",
    "-l": "--label",
    "-h": "--hostname",
    "--net": "--network",
}
_CHIP = re.compile(r"davinci(\d+)")


@dataclass(frozen=True)
class DockerLine:
    """Options in order, by their long names (value None for a switch), the image, and the command inside."""

    options: tuple[tuple[str, str | None], ...]
    image: str
    command: tuple[str, ...] = ()

    def values(self, name: str) -> tuple[str, ...]:
        return tuple(value for flag, value in self.options if flag == name and value is not None)

    def value(self, name: str) -> str | None:
        """The last one; None when it is absent or the shell makes it."""
        found = self.values(name)
        return found[-1] if found and not UNREAD.search(found[-1]) else None

    def has(self, name: str) -> bool:
        return any(flag == name and value != "false" for flag, value in self.options)

    @property
    def env(self) -> dict[str, str]:
        pairs = (text.partition("=") for text in self.values("--env"))
        return {name: value for name, _, value in pairs}

    @property
    def chips(self) -> tuple[int, ...]:
        """Host ids of the chips whose nodes are mapped, in order, each once."""
        nodes = (_CHIP.search(text.partition(":")[0]) for text in self.values("--device"))
        return tuple(dict.fromkeys(int(node[1]) for node in nodes if node))

    @property
    def ports(self) -> tuple[tuple[str, str], ...]:
        """(host, container) of each published port, as written, without protocol and address."""
        rows = (text.partition("/")[0].split(":") for text in self.values("--publish"))
        return tuple((row[-2] if len(row) > 1 else "", row[-1]) for row in rows)

    def with_option(self, name: str, value: str | None = None) -> DockerLine:
        """One more option."""
        return replace(self, options=(*self.options, (name, value)))

    def without(self, name: str) -> DockerLine:
        return replace(self, options=tuple(one for one in self.options if one[0] != name))

    def without_env(self, name: str) -> DockerLine:
        kept = tuple(
            (flag, value)
            for flag, value in self.options
            if not (flag == "--env" and value is not None and value.partition("=")[0] == name)
        )
        return replace(self, options=kept)

    def with_chips(self, chips: Sequence[int]) -> DockerLine:
        """The nodes of these chips in place of those that are mapped."""
        nodes = iter(chips)

        def mapped(name: str, value: str | None) -> str | None:
            found = _CHIP.search(value or "") if name == "--device" else None
            return value if not found or value is None else f"/dev/davinci{next(nodes)}"

        return replace(self, options=tuple((name, mapped(name, value)) for name, value in self.options))

    def with_command(self, *command: str) -> DockerLine:
        return replace(self, command=command)

    def text(self, *, literal: bool = False) -> str:
        """The command for a shell, one option a line; what the shell is to expand stays open to it, unless literal."""
        word = shlex.quote if literal else shell_word
        lines = ["docker run"]
        lines += [name if value is None else f"{name} {word(value)}" for name, value in self.options]
        lines.append(" ".join(map(word, (self.image, *self.command))) if self.image else "")
        return " \\\n  ".join(filter(None, lines))


def read_docker_line(words: Sequence[str]) -> DockerLine:
    """The words after `docker run`."""
    options: list[tuple[str, str | None]] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        for name, glued in _spelled(word):
            if name in _SWITCHES:
                options.append((_LONG.get(name, name), glued))
            else:
                value = glued if glued is not None else (rest.pop(0) if rest else None)
                options.append((_LONG.get(name, name), value))
    rest = rest[1:] if rest[:1] == ["--"] else rest
    return DockerLine(tuple(options), rest[0] if rest else "", tuple(rest[1:]))


def _spelled(word: str) -> Iterator[tuple[str, str | None]]:
    """`--name=value`, `-itd`, `-e X=1`, `-p8:8`: each option with a value that is glued to it."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        yield name, value if equals else None
        return
    letters = word[1:]
    while letters:
        name, letters = f"-{letters[0]}", letters[1:]
        if name in _SWITCHES:
            yield name, None
            continue
        yield name, letters.removeprefix("=") or None
        return
