"""Models with linear attention (Qwen3.5): their state cache."""

from __future__ import annotations

from pipeline.ascend.rules.case import Case
from pipeline.ascend.rules.rule import Rule, Severity, when


def _mamba_flag(case: Case) -> str | None:
    flags = [flag for flag in case.flags() if flag.startswith("--mamba-")]
    return when(flags and not case.hybrid, ", ".join(flags))


RULES = (
    Rule(
        "mamba-on-transformer",
        Severity.ERROR,
        _mamba_flag,
        "{} on a plain Transformer: the server starts, says it is healthy, and dies at the first request",
        "remove it from args",
        "run: AttributeError get_mamba_state_copy_func",
    ),
    Rule(
        "mamba-cache-mode",
        Severity.ERROR,
        lambda case: when(case.hybrid and case.value("--mamba-cache-mode") == "all"),
        "310P knows only align for a hybrid model's prefix cache: all raises NotImplementedError",
        "remove --mamba-cache-mode from args: the script gives align where it is needed",
        "vllm-ascend's model runner",
    ),
    Rule(
        "hybrid-prefix-chunked",
        Severity.ERROR,
        lambda case: when(case.hybrid and case.profile.prefix_caching and not case.profile.chunked_prefill),
        "a hybrid model's prefix cache needs chunked prefill: vLLM refuses to start",
        "set chunked_prefill: true, or prefix_caching: false",
        "vLLM's config for hybrid models, run",
    ),
    Rule(
        "qwen3.5-base",
        Severity.WARNING,
        lambda case: when(case.hybrid and case.before("0.23.0rc1"), case.base.vllm_ascend),
        "Qwen3.5 on the 300I Duo is supported upstream from vllm-ascend 0.23.0rc1 on, and this base has {}",
        "run the smoke test before you rely on it, or use a newer base",
        "vllm-ascend's support statement",
    ),
)
