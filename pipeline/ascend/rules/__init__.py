"""Rules about versions and the chip, held against a profile before anything is fetched or built.

Each module has the rules of one subject, one entry each with its source. In a source, `#N` is issue or pull
request N of vllm-project/vllm-ascend, and "run" was seen with vLLM 0.20.2 itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.ascend.rules import graphs, hybrid, limits, surroundings, weights
from pipeline.ascend.rules.case import Case
from pipeline.ascend.rules.rule import Finding, Rule, Severity

if TYPE_CHECKING:
    from pipeline.catalog.schema import Base, Model, Profile

__all__ = ["RULES", "Case", "Finding", "Rule", "Severity", "judge"]

RULES = (*graphs.RULES, *weights.RULES, *hybrid.RULES, *limits.RULES, *surroundings.RULES)


def judge(model: Model, profile: Profile, base: Base) -> tuple[Finding, ...]:
    """What the rules say of serving this model with this profile on this base; errors first."""
    case = Case(model, profile, base)
    findings = [finding for rule in RULES if (finding := rule.judge(case))]
    return tuple(sorted(findings, key=lambda finding: list(Severity).index(finding.severity)))
