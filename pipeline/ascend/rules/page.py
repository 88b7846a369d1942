"""The rules as a page for people; docs/rules.md is this text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.ascend.rules import CONTAINER_RULES, DERIVED_RULES, RULES
from pipeline.ascend.rules.rule import Rule

_HEAD = """\
# Rules

What is known of versions and of the 310P, as data: `pipeline/ascend/rules/`. This page is made from it by
`duopack rules`; a test holds the two together.

`duopack check` and every build judge the catalog's profiles by them. `duopack check --script FILE` and `--command '…'`
judge a `vllm serve` or `docker run` line that somebody wrote, and what a script or Dockerfile does to an image; `--fix`
prints the corrected line. An error cannot work and stops a build; a warning may go wrong; a note could be better. In a
source, `#N` is issue or pull request N of vllm-project/vllm-ascend, and "run" was seen with vLLM 0.20.2 itself. "…"
stands for what was found.

Beside these, every option is held against the parser of the vLLM version in question: an unknown option, a missing
or a wrong value, and JSON that is none.
"""


def rules_page() -> str:
    """The whole page, in Markdown."""
    return "\n".join(
        [
            _HEAD,
            *_section("The serve command", RULES),
            *_section("The container", CONTAINER_RULES),
            *_section("A derived image", DERIVED_RULES),
        ]
    )


def as_rows() -> list[dict[str, Any]]:
    """The same as values."""
    rules: tuple[Rule[Any], ...] = (*RULES, *CONTAINER_RULES, *DERIVED_RULES)
    return [
        {
            "id": rule.id,
            "severity": rule.severity.value,
            "looks_at": rule.looks_at,
            "bases": str(rule.bases),
            "consequence": rule.consequence.replace("{}", "…"),
            "mend": rule.mend,
            "fixed": rule.fix is not None,
            "source": rule.source,
        }
        for rule in rules
    ]


def _section(title: str, rules: Sequence[Rule[Any]]) -> Iterator[str]:
    yield f"## {title}\n"
    for rule in rules:
        yield f"### {rule.id}\n"
        bases = "" if str(rule.bases) == "all" else f", vllm-ascend {rule.bases}"
        yield f"{rule.severity.value.capitalize()}{bases}. Looks at {rule.looks_at}.\n"
        yield f"- What follows: {rule.consequence.replace('{}', '…')}."
        yield f"- To mend: {rule.mend}.{' `--fix` does it.' if rule.fix else ''}"
        yield f"- Source: {rule.source}.\n"
