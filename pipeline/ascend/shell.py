"""Finds the `docker run` and `vllm serve` commands in a shell text, without running any of it.

Understood are: line continuations, comments, quotes, here-documents, `export X=…` and `X=… command`, variables that
the text itself sets (`$X`, `${X}`, `${X:-default}`), `exec`, `nohup`, `docker exec CONTAINER …` and `bash -c '…'`.
What only a running shell can know stays as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from pipeline.ascend.docker_line import read_docker_line
from pipeline.errors import UsageError

MAX_TEXT = 1 << 20
MAX_DEPTH = 4
_VARIABLE = re.compile(
    r"\$(?:(?P<bare>[A-Za-z_]\w*)|\{(?P<name>[A-Za-z_]\w*)(?::?[-=](?P<default>[^{}]*))?\})"
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PREFIXES = frozenset({"exec", "nohup", "time", "sudo", "env", "command", "then", "do", "else", "!", "{"})
_SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main")
_SHELLS = frozenset({"bash", "sh", "/bin/bash", "/bin/sh"})
TYPOGRAPHIC: Mapping[str, str] = {
    "\u201c": '"',
    "\u201d": '"',
    "\u2018": "'",
    "\u2019": "'",
    "\u2013": "-",
    "\u2014": "--",
    "\u00a0": " ",
    "\u3000": " ",
    "\ufeff": "",
}
"""What web pages and word processors make of plain characters."""


@dataclass(frozen=True)
class Command:
    """`serve` (vLLM's server) or `docker` (`docker run`): the words behind it, its variables, and its first line."""

    kind: str
    words: tuple[str, ...]
    env: Mapping[str, str]
    line: int


def plain(text: str) -> tuple[str, str]:
    """The text with typographic characters made plain, and which ones there were."""
    found = "".join(dict.fromkeys(character for character in text if character in TYPOGRAPHIC))
    return "".join(TYPOGRAPHIC.get(character, character) for character in text), found


def find_commands(text: str, *, where: str) -> tuple[Command, ...]:
    """The commands in order. Raises UsageError for a text that is no shell text: too long, binary, an open quote."""
    if len(text) > MAX_TEXT or "\0" in text:
        raise UsageError("this is no shell script", where=where, mend="give a script, or the command itself")
    return tuple(_Reader(where).read(text, 1, 0))


@dataclass(frozen=True)
class _Piece:
    """Part of a word; `open` when the shell expands variables in it."""

    text: str
    open: bool


_Word = list[_Piece]


@dataclass
class _Reader:
    """Reads one text; what it exports and sets holds for the commands that follow."""

    where: str
    exported: dict[str, str] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)

    def read(self, text: str, first: int, depth: int) -> Iterator[Command]:
        if depth > MAX_DEPTH:
            return
        for line, words, document in _simple_commands(text.replace("\r\n", "\n"), first, self.where):
            yield from self._command([self._expand(word) for word in words], line, depth)
            if document is not None:
                yield from self.read(document, line + 1, depth + 1)

    def _expand(self, word: _Word) -> str:
        return "".join(self._substitute(piece.text) if piece.open else piece.text for piece in word)

    def _substitute(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            name = match["bare"] or match["name"]
            return self.known.get(name, match["default"] if match["default"] is not None else match[0])

        return _VARIABLE.sub(value, text)

    def _command(self, words: list[str], line: int, depth: int) -> Iterator[Command]:
        own: dict[str, str] = {}
        count = 0
        while count < len(words):
            if found := _ASSIGNMENT.fullmatch(words[count]):
                own[found[1]] = found[2]
            elif words[count] not in _PREFIXES:
                break
            count += 1
        words = words[count:]
        if not words:
            self.known |= own
            self.exported |= {name: value for name, value in own.items() if name in self.exported}
        elif words[0] in {"export", "declare", "typeset", "readonly", "local"}:
            self._set(words)
        elif words[0] in _SHELLS and "-c" in words[:-1]:
            yield from self._nested(words[words.index("-c") + 1], own, line, depth)
        elif words[:2] in (["docker", "exec"], ["podman", "exec"]):
            yield from self._command(_inside(words[2:]), line, depth)
        elif words[:2] in (["docker", "run"], ["podman", "run"], ["docker", "create"]):
            yield from self._run(tuple(words[2:]), line, depth)
        elif (serve := _serve_words(words)) is not None:
            yield Command("serve", serve, {**self.exported, **own}, line)

    def _set(self, words: Sequence[str]) -> None:
        exports = words[0] == "export" or any("x" in word for word in words[1:] if word.startswith("-"))
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if equals:
                self.known[name] = value
            if exports and name in self.known:
                self.exported[name] = self.known[name]

    def _run(self, words: tuple[str, ...], line: int, depth: int) -> Iterator[Command]:
        yield Command("docker", words, {}, line)
        docker = read_docker_line(words)
        # What runs inside gets the container's variables, not the host's.
        inside = _Reader(self.where, {**docker.env}, {**docker.env})
        yield from inside._command(list(docker.command), line, depth)

    def _nested(self, text: str, own: Mapping[str, str], line: int, depth: int) -> Iterator[Command]:
        inner = _Reader(self.where, {**self.exported, **own}, {**self.known, **own})
        yield from inner.read(text, line, depth + 1)


def _inside(words: list[str]) -> list[str]:
    """The command of `docker exec`, with the variables given to it before it."""
    position, given = 0, []
    while position < len(words) and words[position].startswith("-"):
        takes = words[position] in {"-e", "--env", "-w", "--workdir", "-u", "--user", "--env-file"}
        if words[position] in {"-e", "--env"}:
            given += words[position + 1 : position + 2]
        position += 2 if takes else 1
    return given + words[position + 1 :]


def _serve_words(words: Sequence[str]) -> tuple[str, ...] | None:
    program = words[0].rpartition("/")[2]
    if program == "vllm" and words[1:2] == ["serve"]:
        return tuple(words[2:])
    if program.startswith("python") and len(words) > 2 and words[1] == "-m" and words[2] in _SERVERS:
        rest = words[3:]
        return tuple(rest[1:] if rest[:1] == ["serve"] else rest)
    return None


def _simple_commands(text: str, first: int, where: str) -> Iterator[tuple[int, list[_Word], str | None]]:
    """Each simple command: its line, its words, and the here-document that follows its line, if any."""
    scanner = _Scanner(text, first, where)
    words: list[_Word] = []
    line = first
    for kind, word, at in scanner.tokens():
        if kind == "word":
            line = line if words else at
            words.append(word)
            continue
        document = scanner.here_document() if kind == "line" else None
        if words or document:
            yield line, words, document
        words = []
    if words:
        yield line, words, None


class _Scanner:
    """Cuts shell text into words and the operators between commands."""

    def __init__(self, text: str, first: int, where: str) -> None:
        self._text, self._at, self._line, self._where = text, 0, first, where
        self._documents: list[str] = []

    def tokens(self) -> Iterator[tuple[str, _Word, int]]:
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == "\n":
                self._at += 1
                yield "line", [], self._line
                self._line += 1
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
                self._line += 1
            elif character in " \t\r":
                self._at += 1
            elif character == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif character in ";&|()":
                self._at += 1
                yield "end", [], self._line
            elif character in "<>":
                self._redirection()
            else:
                line, word = self._line, self._word()
                # `2>&1`: the number is the redirection's.
                if self._text[self._at : self._at + 1] in {"<", ">"} and _is_number(word):
                    continue
                yield "word", word, line

    def here_document(self) -> str | None:
        """The text up to the delimiter that the line just read has named."""
        if not self._documents:
            return None
        delimiter = re.escape(self._documents.pop(0))
        end = re.compile(rf"^\t*{delimiter}$", re.MULTILINE).search(self._text, self._at)
        document = self._text[self._at : end.start() if end else len(self._text)]
        after = end.end() + 1 if end else len(self._text)
        self._line += self._text.count("\n", self._at, after)
        self._at = min(after, len(self._text))
        return document

    def _redirection(self) -> None:
        document = re.compile(r"<<-?[ \t]*['\"]?(\w+)['\"]?").match(self._text, self._at)
        if document:
            self._documents.append(document[1])
            self._at = document.end()
            return
        operator = re.compile(r"[<>]+&?\(?[ \t]*").match(self._text, self._at)
        assert operator
        self._at = operator.end()
        if self._at < len(self._text) and self._text[self._at] not in " \t\n;|&":
            self._word()

    def _word(self) -> _Word:
        pieces: _Word = []
        while self._at < len(self._text) and self._text[self._at] not in " \t\r\n;&|()<>":
            character = self._text[self._at]
            if character == "'":
                pieces.append(_Piece(self._until("'"), open=False))
            elif character == '"':
                pieces += self._double()
            elif character == "\\":
                escaped = self._text[self._at + 1 : self._at + 2]
                self._at += 2
                self._line += escaped == "\n"
                pieces.append(_Piece("" if escaped == "\n" else escaped, open=False))
            elif character == "`" or self._text.startswith("$(", self._at):
                pieces.append(_Piece(self._substitution(), open=False))
            elif self._text.startswith("${", self._at):
                pieces.append(_Piece(self._brace(), open=True))
            else:
                start = self._at
                self._at += 1
                while self._at < len(self._text) and self._text[self._at] not in " \t\r\n;&|()<>'\"\\`$":
                    self._at += 1
                pieces.append(_Piece(self._text[start : self._at], open=True))
        return _joined(pieces)

    def _double(self) -> _Word:
        body = self._until('"', escapes=True)
        parts = re.split(r"(\\[\\\"$`\n])", body)
        return [
            _Piece(part[1].replace("\n", ""), open=False) if number % 2 else _Piece(part, open=True)
            for number, part in enumerate(parts)
            if part
        ]

    def _until(self, quote: str, *, escapes: bool = False) -> str:
        """The text between quotes; the scanner stands at the first of them."""
        begin = end = self._at + 1
        while end < len(self._text) and self._text[end] != quote:
            end += 2 if escapes and self._text[end] == "\\" else 1
        if end >= len(self._text):
            raise UsageError(
                f"line {self._line} has an open quote ({quote})",
                where=self._where,
                mend="close it, or give only the command",
            )
        body = self._text[begin:end]
        self._line += body.count("\n")
        self._at = end + 1
        return body

    def _substitution(self) -> str:
        """`…` or $(…), as it is written: only a shell knows what it gives."""
        if self._text[self._at] == "`":
            return f"`{self._until('`', escapes=True)}`"
        return self._balanced("(", ")")

    def _brace(self) -> str:
        return self._balanced("{", "}")

    def _balanced(self, opening: str, closing: str) -> str:
        begin, depth, end = self._at, 0, self._at
        while end < len(self._text):
            depth += (self._text[end] == opening) - (self._text[end] == closing)
            end += 1
            if self._text[end - 1] == closing and depth == 0:
                break
        self._at = end
        self._line += self._text[begin:end].count("\n")
        return self._text[begin:end]


def _is_number(word: _Word) -> bool:
    return len(word) == 1 and word[0].text.isdigit()


def _joined(pieces: _Word) -> _Word:
    """Neighbours of one kind as one piece, so that `$X` in two pieces is seen whole."""
    joined = [
        _Piece("".join(piece.text for piece in group), open=open_)
        for open_, group in groupby(pieces, key=lambda piece: piece.open)
    ]
    return joined or [_Piece("", open=False)]
