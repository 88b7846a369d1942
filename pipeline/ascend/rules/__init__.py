"""Rules about versions and the chip, held against a command before anything is fetched, built or started.

Each module has the rules of one subject, one entry each with its source; docs/rules.md is made from them. In a
source, `#N` is issue or pull request N of vllm-project/vllm-ascend, and "run" was seen with vLLM 0.20.2 itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pipeline.ascend.rules import container, derived, graphs, hybrid, limits, serving, surroundings, weights
from pipeline.ascend.rules.case import Case, case_of
from pipeline.ascend.rules.container import ContainerCase
from pipeline.ascend.rules.derived import TextCase
from pipeline.ascend.rules.rule import Finding, Rule, Severity

if TYPE_CHECKING:
    from pipeline.catalog.schema import Base, Model, Profile

__all__ = [
    "CONTAINER_RULES",
    "DERIVED_RULES",
    "RULES",
    "Case",
    "Finding",
    "Rule",
    "Severity",
    "errors_first",
    "judge",
    "judge_case",
    "judge_container",
    "judge_text",
]

RULES: tuple[Rule[Case], ...] = (
    *graphs.RULES,
    *weights.RULES,
    *hybrid.RULES,
    *limits.RULES,
    *surroundings.RULES,
    *serving.RULES,
)
CONTAINER_RULES: tuple[Rule[ContainerCase], ...] = container.RULES
DERIVED_RULES: tuple[Rule[TextCase], ...] = derived.RULES


def judge(model: Model, profile: Profile, base: Base) -> tuple[Finding, ...]:
    """What the rules say of serving this model with this profile on this base; errors first."""
    return judge_case(case_of(model, profile, base))


def judge_case(case: Case) -> tuple[Finding, ...]:
    """What the rules say of a command; errors first."""
    return errors_first(found for rule in RULES if (found := rule.judge(case, case.base.vllm_ascend)))


def judge_container(case: ContainerCase, vllm_ascend: str) -> tuple[Finding, ...]:
    """What the rules say of a `docker run`; errors first."""
    return errors_first(found for rule in CONTAINER_RULES if (found := rule.judge(case, vllm_ascend)))


def judge_text(text: str, vllm_ascend: str) -> tuple[Finding, ...]:
    """What the rules say of a script or Dockerfile that makes an image; errors first."""
    case = TextCase.of(text)
    return errors_first(found for rule in DERIVED_RULES if (found := rule.judge(case, vllm_ascend)))


def errors_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: list(Severity).index(finding.severity)))
