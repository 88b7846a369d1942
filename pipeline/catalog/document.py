"""YAML as plain data, with the line and column of every key and value.

Safe for a file that nobody has checked: only YAML's plain types are built, duplicate keys are refused, and
aliases may not unfold into more values than a catalog can need.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from pipeline.errors import UsageError, quoted

MAX_BYTES = 256 << 10
"""Some hundred models; PyYAML needs seconds for a megabyte, and a hostile file shall not cost more."""
MAX_VALUES = 100_000

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, order=True)
class Position:
    """A place in the file; both count from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Entry:
    """Where a key path stands: its key, its value, and the value as it was written when it is a scalar."""

    key: Position
    value: Position
    written: str | None = None


@dataclass(frozen=True, order=True)
class Problem:
    """One thing that is wrong in the file."""

    position: Position
    what: str
    mend: str = ""

    def line(self, path: str) -> str:
        mend = f" ({self.mend})" if self.mend else ""
        return f"{path}:{self.position.line}:{self.position.column}: {self.what}{mend}"


class CatalogError(UsageError):
    """Everything that is wrong in a catalog, in the order of its lines; shown at once, 20 at most."""

    SHOWN = 20

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        first = self.problems[0]
        if len(self.problems) == 1:
            where = f"{path}:{first.position.line}:{first.position.column}"
            super().__init__(first.what, where=where, mend=first.mend)
            return
        lines = [problem.line(str(path)) for problem in self.problems[: self.SHOWN]]
        if rest := len(self.problems) - self.SHOWN:
            lines += [f"and {rest} more"] if rest > 0 else []
        super().__init__(
            f"{len(self.problems)} errors\n" + "\n".join(f"  {line}" for line in lines), where=str(path)
        )


@dataclass(frozen=True)
class Document:
    """A file's data and where each part of it stands."""

    path: Path
    data: Any
    entries: Mapping[KeyPath, Entry] = field(repr=False)

    def entry(self, path: KeyPath) -> Entry:
        """The entry of a key path, or of the nearest part above it that is in the file."""
        while path not in self.entries and path:
            path = path[:-1]
        return self.entries[path]


def read_document(path: Path) -> Document:
    """Reads a YAML file. Raises UsageError, or CatalogError where a line is known, when it is not sound."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(
            "there is no such file",
            where=str(path),
            mend="change to the directory that holds models.yaml, or name it with --catalog FILE",
        ) from None
    except OSError as error:
        raise UsageError(
            f"it cannot be read: {error.strerror}", where=str(path), mend="check the path and its mode"
        ) from error
    if len(raw) > MAX_BYTES:
        raise UsageError(
            f"it is larger than {MAX_BYTES >> 10} KiB, which no catalog is",
            where=str(path),
            mend="check that this is the right file",
        )
    return parse_document(raw, path)


def parse_document(raw: bytes, path: Path) -> Document:
    """As `read_document`, on bytes; `path` is for the messages."""
    text = _decode(raw, path)
    loader = yaml.SafeLoader("")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        raise CatalogError(path, [_unreadable_character(error, text)]) from None
    except yaml.MarkedYAMLError as error:
        raise CatalogError(path, [_syntax_problem(error, text)]) from None
    except RecursionError:
        raise _too_deep(path) from None
    finally:
        loader.dispose()
    if node is None:
        raise UsageError(
            "it is empty", where=str(path), mend="write a catalog; docs/catalog.md shows the smallest one"
        )
    builder = _Builder(loader, path)
    try:
        data = builder.value(node, (), _position(node.start_mark))
    except RecursionError:
        raise _too_deep(path) from None
    if builder.problems:
        raise CatalogError(path, builder.problems)
    return Document(path, data, builder.entries)


class _Builder:
    """Turns YAML nodes into data, noting positions. Mends nothing: what is unclear becomes a problem."""

    def __init__(self, loader: yaml.SafeLoader, path: Path) -> None:
        self.loader = loader
        self.path = path
        self.entries: dict[KeyPath, Entry] = {}
        self.problems: list[Problem] = []
        self.built = 0
        self.open: set[int] = set()

    def value(self, node: yaml.Node, path: KeyPath, key: Position) -> Any:
        position = _position(node.start_mark)
        written = node.value if isinstance(node, yaml.ScalarNode) else None
        self.entries[path] = Entry(key, position, written)
        with self._opened(node):
            return self._built(node, path, position)

    @contextmanager
    def _opened(self, node: yaml.Node) -> Iterator[None]:
        """Counts a node, and refuses one that is inside itself: aliases can make both endless."""
        self.built += 1 + (len(node.value) if isinstance(node, yaml.CollectionNode) else 0)
        if id(node) in self.open:
            self._give_up(node, "an alias stands for something that contains it")
        if self.built > MAX_VALUES:
            self._give_up(
                node, f"the file has more than {MAX_VALUES} values, counting what its aliases stand for"
            )
        self.open.add(id(node))
        try:
            yield
        finally:
            self.open.discard(id(node))

    def _give_up(self, node: yaml.Node, what: str) -> NoReturn:
        raise CatalogError(self.path, [Problem(_position(node.start_mark), what, "write the values out")])

    def _built(self, node: yaml.Node, path: KeyPath, position: Position) -> Any:
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            pairs = self._pairs(node)
            return {name: self.value(item, (*path, name), at) for name, (item, at) in pairs.items()}
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [
                self.value(item, (*path, number), _position(item.start_mark))
                for number, item in enumerate(node.value)
            ]
        return self._scalar(node, position)

    def _pairs(self, node: yaml.MappingNode) -> dict[str, tuple[yaml.Node, Position]]:
        own: dict[str, tuple[yaml.Node, Position]] = {}
        merged: dict[str, tuple[yaml.Node, Position]] = {}
        for key, item in node.value:
            position = _position(key.start_mark)
            if key.tag == "tag:yaml.org,2002:merge":
                self._merge(item, merged)
                continue
            if (name := self._key(key, position)) is None:
                continue
            if name in own:
                what = f"the key '{quoted(name)}' is given twice, first in line {own[name][1].line}"
                self.problems.append(Problem(position, what, "keep one of them"))
                continue
            own[name] = (item, position)
        # The first profile is the image's command, so a map's own keys keep their places before merged ones.
        return own | {name: pair for name, pair in merged.items() if name not in own}

    def _merge(self, node: yaml.Node, into: dict[str, tuple[yaml.Node, Position]]) -> None:
        """Adds what '<<' points at; as in YAML, what came first stays."""
        with self._opened(node):
            if isinstance(node, yaml.MappingNode):
                for name, pair in self._pairs(node).items():
                    into.setdefault(name, pair)
            elif isinstance(node, yaml.SequenceNode) and all(
                isinstance(n, yaml.MappingNode) for n in node.value
            ):
                for item in node.value:
                    self._merge(item, into)
            else:
                what = "a merge key ('<<') takes a map or a list of maps"
                self.problems.append(Problem(_position(node.start_mark), what, "write '<<: *name' of a map"))

    def _key(self, node: yaml.Node, position: Position) -> str | None:
        if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str":
            return str(node.value)
        if isinstance(node, yaml.ScalarNode) and node.tag.startswith("tag:yaml.org,2002:"):
            kind = _KINDS.get(node.tag.rpartition(":")[2], "something else")
            what = f"YAML reads the key {quoted(node.value) or 'that is empty'} as {kind}, not as text"
            self.problems.append(Problem(position, what, f"quote it: '{quoted(node.value)}'"))
        else:
            self.problems.append(
                Problem(position, "a key must be plain text", "write a name before the colon")
            )
        return None

    def _scalar(self, node: yaml.Node, position: Position) -> Any:
        tag = node.tag.removeprefix("tag:yaml.org,2002:")
        if not isinstance(node, yaml.ScalarNode) or tag not in {"str", "int", "float", "bool", "null"}:
            shown = quoted(node.value) if isinstance(node, yaml.ScalarNode) else ""
            what = (
                f"YAML reads {shown} as {_KINDS[tag]}"
                if tag in _KINDS
                else f"the tag '{quoted(node.tag)}' is unknown"
            )
            mend = f"quote it: '{shown}'" if tag in _KINDS else "remove the tag"
            self.problems.append(Problem(position, what, mend))
            return None
        if tag in {"int", "float"} and not _PLAIN_NUMBER.fullmatch(node.value):
            # YAML 1.1 reads 010 as eight and 1:30 as ninety: nobody who writes them here means that.
            what = f"'{quoted(node.value)}' is not a plain number"
            self.problems.append(Problem(position, what, "write it in decimal, or quote it if it is text"))
            return None
        return self.loader.construct_object(node)


_PLAIN_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9_]{0,29})(\.[0-9]{0,30})?|[-+]?\.[0-9]{1,30}")

_KINDS = {
    "int": "a number",
    "float": "a number",
    "bool": "true or false",
    "null": "nothing",
    "timestamp": "a date",
    "binary": "binary data",
    "merge": "a merge key",
    "value": "a default value",
}


def _position(mark: Any) -> Position:
    return Position(mark.line + 1, mark.column + 1)


def _decode(raw: bytes, path: Path) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        column = len(before.rpartition(b"\n")[2].decode("utf-8", "replace")) + 1
        problem = Problem(
            Position(before.count(b"\n") + 1, column),
            "the file is not UTF-8 from here on",
            "save it again as UTF-8",
        )
        raise CatalogError(path, [problem]) from None


def _unreadable_character(error: yaml.reader.ReaderError, text: str) -> Problem:
    before = text[: error.position]
    position = Position(before.count("\n") + 1, len(before.rpartition("\n")[2]) + 1)
    return Problem(
        position, f"the control character U+{ord(text[error.position]):04X} may not stand here", "remove it"
    )


def _syntax_problem(error: yaml.MarkedYAMLError, text: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    position = _position(mark) if mark else Position(1, 1)
    lines = text.splitlines()
    tab = _tab_near(lines, position)
    if tab:
        return Problem(
            tab, "a tab stands where YAML wants spaces", "indent with two spaces; set your editor to do so"
        )
    said = quoted(error.problem or "it is not YAML")
    for start, (what, mend) in _SYNTAX.items():
        if said.startswith(start):
            return Problem(position, what, mend)
    after = f" {error.context}" if error.context else ""
    return Problem(
        position, f"this is not YAML: {said}{quoted(after)}", "check the indentation and the quotes around it"
    )


_SYNTAX = {
    "mapping values are not allowed": (
        "a colon stands where no key can be",
        "quote the text if it holds ': ', or check the indentation of this line and the one before",
    ),
    "could not find expected ':'": ("a key has no colon", "write 'key: value'"),
    "expected a single document": (
        "a second document begins with '---'",
        "a catalog is one document: remove the line",
    ),
    "but found another document": (
        "a second document begins with '---'",
        "a catalog is one document: remove the line",
    ),
    "found undefined alias": (
        "an alias names an anchor that does not stand before it",
        "check the name after '*'",
    ),
    "expected ',' or": ("a bracket is not closed before this", "close it, or put a comma between the parts"),
    "expected <block end>": (
        "this line is not indented as its neighbours are",
        "begin the keys of one map in one column",
    ),
    "expected the node content": ("a value is missing here", "write it, or close the bracket"),
    "found unexpected end of stream": ("a quote or bracket is not closed", "close it"),
    "found character '%'": ("a value begins with '%'", "put it in quotes"),
    "found character '@'": ("a value begins with '@'", "put it in quotes"),
    "found character '`'": ("a value begins with a backquote", "put it in quotes"),
}


def _tab_near(lines: list[str], position: Position) -> Position | None:
    """The tab that a YAML error is about: in the indentation of its line, or of the line before."""
    for number in (position.line, position.line - 1):
        if not 1 <= number <= len(lines):
            continue
        line = lines[number - 1]
        indentation = line[: len(line) - len(line.lstrip())]
        if "\t" in indentation:
            return Position(number, indentation.index("\t") + 1)
        if number == position.line and line[position.column - 1 : position.column] == "\t":
            return position
    return None


def _too_deep(path: Path) -> UsageError:
    return UsageError(
        "it is nested deeper than any catalog", where=str(path), mend="check the brackets and the indentation"
    )
