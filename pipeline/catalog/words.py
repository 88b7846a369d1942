"""Pydantic's errors in a person's words: which key, what is wrong with it, and how to mend it."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from pipeline.catalog import schema
from pipeline.catalog.document import Document, Entry, KeyPath, Problem
from pipeline.errors import quoted


def shown_path(path: KeyPath) -> str:
    """A key path as people write it: `models.9b.profiles.n9.capture_sizes[1]`; empty for the whole file."""
    shown = ""
    for part in path:
        shown += (
            f"[{part}]" if isinstance(part, int) else f".{quoted(part, 64)}" if shown else quoted(part, 64)
        )
    return shown or "the file"


def close_to(word: str, known: list[str]) -> str:
    """The known word that `word` most likely means, or nothing."""
    plain = word.lower().replace("-", "_").replace(" ", "_")
    lowered = {name.lower().replace("-", "_"): name for name in known}
    found = difflib.get_close_matches(plain, lowered, n=1, cutoff=0.6)
    return lowered[found[0]] if found else ""


def listed(words: list[str]) -> str:
    """Words as an English list: `a, b or c`."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def problems_of(errors: list[ErrorDetails], document: Document) -> list[Problem]:
    """All errors of one validation; a key that is only misspelt is not reported as missing too."""
    misspelt = {meant_path(error) for error in errors}
    told = (error for error in errors if error["type"] != "missing" or tuple(error["loc"]) not in misspelt)
    return [problem for problem in (problem_of(error, document) for error in told) if problem]


def meant_path(error: ErrorDetails) -> KeyPath | None:
    """The key path that an unknown key most likely means."""
    path = tuple(error["loc"])
    if error["type"] != "extra_forbidden" or not (
        meant := close_to(str(path[-1]), list(_fields_at(path[:-1])))
    ):
        return None
    return (*path[:-1], meant)


def problem_of(error: ErrorDetails, document: Document) -> Problem | None:
    """One error of pydantic as a problem with its place; None for an error that only follows from another."""
    path = tuple(part for part in error["loc"] if part != "[key]")
    kind, context = error["type"], error.get("ctx", {})
    entry = document.entry(path)
    is_key = "[key]" in error["loc"]
    if kind == "too_short" and error["input"]:
        return None  # pydantic counts only the sound items, and each unsound one has an error of its own
    if kind == "missing":
        what, mend = f"the key '{path[-1]}' is missing", _purpose(path)
        return Problem(entry.key, f"{shown_path(path[:-1])}: {what}", mend)
    if kind == "extra_forbidden":
        what, mend = _unknown_key(path)
        return Problem(entry.key, f"{shown_path(path)}: {what}", mend)
    what, mend = _wrong_value(kind, error["input"], context, entry, path)
    return Problem(entry.key if is_key else entry.value, f"{shown_path(path)}: {what}", mend)


def _wrong_value(
    kind: str, value: Any, context: Mapping[str, Any], entry: Entry, path: KeyPath
) -> tuple[str, str]:
    shown = _shown(value, entry)
    if kind in {"literal_error", "enum"}:
        allowed = _allowed_values(path)
        return f"{shown} is not allowed", _choice(value, allowed)
    if kind == "string_pattern_mismatch":
        form = schema.FORMS.get(context["pattern"], f"text that matches {context['pattern']}")
        return f"{shown} is not of the right form", f"write {form}"
    if kind == "value_error":
        return str(context["error"]), _purpose(path)
    if kind == "refused":
        return str(context["what"]), str(context["mend"])
    if kind in _BOUNDS:
        return f"{shown} is {_BOUNDS[kind][0]} {context[_BOUNDS[kind][1]]}", _purpose(path)
    if kind in _TOO_MUCH:
        what, mend = _TOO_MUCH[kind]
        return what, _purpose(path) or mend
    return _wrong_type(kind, value, shown, entry, path)


_TOO_MUCH = {
    "too_short": ("it is empty", "give one item at least"),
    "too_long": ("it has too many items", "leave some out"),
    "string_too_long": ("it is too long", "shorten it"),
}

_BOUNDS = {
    "greater_than": ("not above", "gt"),
    "greater_than_equal": ("below", "ge"),
    "less_than": ("not below", "lt"),
    "less_than_equal": ("above", "le"),
}

_WANTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a map",
    "model_type": "a map",
    "model_attributes_type": "a map",
}


def _wrong_type(kind: str, value: Any, shown: str, entry: Entry, path: KeyPath) -> tuple[str, str]:
    wanted = _WANTED.get(kind, "another value")
    if value is None:
        return f"it has no value, but needs {wanted}", _purpose(path) or f"write {wanted} after it"
    if kind == "string_type" and isinstance(value, bool | int | float):
        read = "true or false" if isinstance(value, bool) else "a number"
        return (
            f"YAML reads {quoted(entry.written or str(value))} as {read}, but this is text",
            f"quote it: '{entry.written}'",
        )
    if isinstance(value, str) and wanted in {"a number", "a whole number", "true or false"}:
        bare = "write it without quotes" if _bare(value) else ""
        return f"{shown} is text, but this is {wanted}", bare or _purpose(path) or f"write {wanted}"
    if isinstance(value, list | dict):
        is_now = "a list" if isinstance(value, list) else "a map"
        return f"it is {is_now}, but must be {wanted}", _shape_hint(wanted, path) or f"write {wanted}"
    return f"{shown} is not {wanted}", _shape_hint(wanted, path) or f"write {wanted}"


def _bare(value: str) -> bool:
    return bool(re.fullmatch(r"-?[0-9]+(\.[0-9]+)?|true|false", value))


def _shape_hint(wanted: str, path: KeyPath) -> str:
    if wanted == "a list":
        return "write '[a, b]', or one '- item' a line"
    if wanted == "a map":
        return "write 'key: value' lines, without '-' before them"
    return _purpose(path)


def _shown(value: Any, entry: Entry) -> str:
    if isinstance(value, str):
        return f"'{quoted(value)}'"
    return quoted(entry.written) if entry.written else quoted(str(value))


def _unknown_key(path: KeyPath) -> tuple[str, str]:
    name = str(path[-1])
    fields = list(_fields_at(path[:-1]))
    if meant := close_to(name, fields):
        return "this key is unknown", f"did you mean '{meant}'?"
    for level, model in _LEVELS.items():
        if name in model.model_fields:
            return "this key is unknown here", f"it belongs to {level}"
    return "this key is unknown", f"known here are {', '.join(fields)}" if fields else ""


_LEVELS: dict[str, type[BaseModel]] = {
    "a profile: models.KEY.profiles.NAME": schema.Profile,
    "a model: models.KEY": schema.Model,
    "a base: bases.KEY": schema.Base,
    "a model's files: models.KEY.files": schema.Files,
    "a source: models.KEY.sources": schema.Source,
    "publish": schema.Publish,
    "the top of the file": schema.Catalog,
}


def _choice(value: Any, allowed: list[str]) -> str:
    if isinstance(value, str) and value in allowed:
        return f"write {value} without quotes"
    if meant := close_to(str(value), allowed) if isinstance(value, str) else "":
        return f"did you mean '{meant}'? It may be {listed(allowed)}"
    return f"it may be {listed(allowed)}" if allowed else ""


def _purpose(path: KeyPath) -> str:
    """What a field is for, from the schema: the best advice for a value that is missing or out of range."""
    fields = _fields_at(path[:-1])
    info = fields.get(str(path[-1])) if path else None
    return f"it is: {info.description}" if info and info.description else ""


def _fields_at(path: KeyPath) -> Mapping[str, Any]:
    kind = _type_at(path)
    return kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {}


def _allowed_values(path: KeyPath) -> list[str]:
    kind = _type_at(path)
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    return list(kind) if isinstance(kind, type) and issubclass(kind, StrEnum) else []


def _type_at(path: KeyPath) -> Any:
    """The type that the schema gives a key path."""
    kind: Any = schema.Catalog
    for part in path:
        kind = _inner(kind, part)
    return _bare_type(kind)


def _inner(kind: Any, part: str | int) -> Any:
    kind = _bare_type(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        info = kind.model_fields.get(str(part))
        return info.annotation if info else None
    if get_origin(kind) is dict:
        return get_args(kind)[1]
    return get_args(kind)[0] if get_origin(kind) is tuple else None


def _bare_type(kind: Any) -> Any:
    if get_origin(kind) is Annotated:
        return _bare_type(get_args(kind)[0])
    if get_origin(kind) in {Union, types.UnionType}:
        return _bare_type(next(arm for arm in get_args(kind) if arm is not type(None)))
    return kind
