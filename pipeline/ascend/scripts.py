"""Renders the shell scripts of an image. What a template prints is one quoted word unless it is `Raw`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from pipeline.ascend.environment import ASCEND_ROOT, JEMALLOC, SET_ENV, VARIABLES
from pipeline.ascend.serve import Ref, Setting, When, Word, command, settings
from pipeline.errors import DuopackError, quoted

if TYPE_CHECKING:
    import jinja2

    from pipeline.catalog.schema import Base, Model, Profile

HEALTH_SECONDS = 8


class Raw(str):
    """Text that is shell source already; everything else becomes one quoted word."""

    __slots__ = ()


def serve_script(name: str, model: Model, profile: Profile, base: Base) -> str:
    """The start script of a profile."""
    ranks = profile.tensor_parallel
    declared = settings(model, profile)
    parts = command(model, profile, base)
    leading = tuple(takewhile(lambda part: not part.when and not part.why, parts))
    return _render(
        "serve.sh.j2",
        script=f"{name}.sh",
        title=model.title,
        note=profile.note,
        chips=Raw("one chip" if ranks == 1 else f"{ranks} chips"),
        settings=declared,
        rows=_rows(declared),
        leading=leading,
        parts=parts[len(leading) :],
        hybrid=model.architecture.hybrid,
        env=profile.env,
        variables=VARIABLES,
        ascend_root=ASCEND_ROOT,
        set_env=SET_ENV,
        jemalloc=JEMALLOC,
        max_positions=model.max_positions,
    )


def healthcheck_script(port: int) -> str:
    """The health check; `port` is the default profile's."""
    return _render("healthcheck.sh.j2", port=port, seconds=HEALTH_SECONDS)


def list_script(lines: Sequence[str]) -> str:
    """A script that prints these lines."""
    return _render("list.sh.j2", lines=[quoted(line) for line in lines])


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pipeline", "templates"),
        autoescape=False,
        finalize=_shell,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="<#",  # bash has its own use for {#
        comment_end_string="#>",
    )
    environment.filters |= {
        "comment": _comment,
        "condition": _condition,
        "list": _list,
        "name": _name,
        "patterns": _patterns,
        "raw": Raw,
        "words": _words,
    }
    environment.globals["assign"] = _assign
    return environment


def _shell(value: object) -> str:
    return value if isinstance(value, Raw) else shlex.quote(str(value))


def _comment(text: object) -> Raw:
    # A comment ends with its line: no line break, and nothing that a terminal obeys, gets into it.
    return Raw(quoted(str(text), limit=1000))


def _name(text: str) -> Raw:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        raise DuopackError(f"'{quoted(text)}' is no name of a shell variable")
    return Raw(text)


def _assign(name: str, default: str, keep_empty: bool = True) -> Raw:
    """`NAME=${NAME-default}`; with `:-` an empty value counts as not given."""
    operator = "-" if keep_empty else ":-"
    return Raw(f"{_name(name)}=${{{_name(name)}{operator}{shlex.quote(default) if default else ''}}}")


def _list(values: Sequence[str]) -> Raw:
    return Raw(" ".join(map(shlex.quote, values)))


def _words(words: Sequence[Word]) -> Raw:
    return Raw(" ".join(map(_word, words)))


def _word(word: Word) -> str:
    pieces = word if isinstance(word, tuple) else (word,)
    return "".join(
        f'"${_name(piece.name)}"' if isinstance(piece, Ref) else shlex.quote(piece) for piece in pieces
    )


def _condition(when: When) -> Raw:
    value = f"${_name(when.name)}"
    return Raw(f"[[ -n {value} ]]" if when.equals is None else f"[[ {value} == {shlex.quote(when.equals)} ]]")


def _patterns(flags: Sequence[str]) -> Raw:
    """Patterns of `case` for options in any spelling: dashes or underscores, glued value or not."""
    spellings = [re.sub(r"(?<=[a-z])-", "[-_]", flag) for flag in flags]
    return Raw(" | ".join(f"{flag} | {flag}=*" for flag in spellings))


def _rows(declared: Sequence[Setting]) -> list[Raw]:
    """The settings as lines of a table for people: name, default, meaning."""
    shown = [quoted(setting.default, limit=60) or "(none)" for setting in declared]
    width = max(map(len, shown))
    return [
        Raw(
            f"{setting.name:<22}  {default:<{width}}  {setting.meaning}"
            + (" (optional)" if setting.optional else "")
        )
        for setting, default in zip(declared, shown, strict=True)
    ]
