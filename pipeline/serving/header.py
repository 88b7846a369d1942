"""What a server says of itself at its start: version, model, and the options that were given."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_VERSION = re.compile(r"(?:█ +version |vLLM API server version |LLM engine \(v)(\d[\w.+-]{0,40})")
_MODEL = re.compile(r"█ +model +(\S.*)")
_OPTIONS = "non-default args: {"


@dataclass(frozen=True)
class Header:
    """`options` is None where the log does not have them; else by vLLM's names: `max_model_len`."""

    version: str | None = None
    model: str | None = None
    options: Mapping[str, Any] | None = field(default=None)

    def option(self, path: str) -> Any:
        """The value of an option or of a key in one that holds JSON (`compilation_config.cudagraph_mode`)."""
        value: Any = self.options or {}
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


def version_in(text: str) -> str | None:
    """vLLM's version, of the banner or the engine's first line."""
    match = _VERSION.search(text)
    return match[1].rstrip(").,") if match else None


def model_in(text: str) -> str | None:
    """The model's path, of the banner."""
    match = _MODEL.search(text)
    return match[1].strip() if match else None


def options_in(text: str) -> dict[str, Any] | None:
    """The options of the line `non-default args: {…}`; what is no plain value in it stays text."""
    at = text.find(_OPTIONS)
    if at < 0:
        return None
    value = _value(text[at + len(_OPTIONS) - 1 :])
    return value if isinstance(value, dict) else {}


def _value(text: str) -> Any:
    """A Python literal; a dict with something else in it (enums, objects) as far as it can be read."""
    text = text.strip()
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    if not text.startswith("{"):
        # An enum such as <CUDAGraphMode.FULL_DECODE_ONLY: (2, 0)> stands for its name.
        enum = re.match(r"<\w+\.(\w+)", text)
        return enum[1] if enum else text
    items = {}
    for item in _parts(text[1:-1] if text.endswith("}") else text[1:], ","):
        key, *rest = _parts(item, ":")
        if rest:
            items[key.strip().strip("'\"")] = _value(":".join(rest))
    return items


def _parts(text: str, separator: str) -> list[str]:
    """The text cut at separators that stand outside of brackets and quotes."""
    parts, start, quote, stack = [], 0, "", []
    position = 0
    while position < len(text):
        char = text[position]
        if quote:
            position += char == "\\"
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "{[(<":
            stack.append(char)
        elif char in "}])>" and stack:
            stack.pop()
        elif char == separator and not stack:
            parts.append(text[start:position])
            start = position + 1
        position += 1
    return [part for part in [*parts, text[start:]] if part.strip()]
