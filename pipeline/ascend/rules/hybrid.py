"""Models with linear attention (Qwen3.5): their state cache."""

from __future__ import annotations

from pipeline.ascend.rules.case import Case
from pipeline.ascend.rules.rule import Bases, Rule, Severity, when

CACHE_MODE, STATE_DTYPE = "--mamba-cache-mode", "--mamba-ssm-cache-dtype"


def _mamba_flag(case: Case) -> str | None:
    flags = [one.flag for one in case.line.options if one.flag.startswith("--mamba-")]
    return when(flags and not case.hybrid, ", ".join(flags))


def _mamba_flags(case: Case) -> tuple[str, ...]:
    return tuple(one.flag for one in case.line.options if one.flag.startswith("--mamba-"))


def _mode_open(case: Case) -> str | None:
    mode = case.line.value(CACHE_MODE)
    return when(case.hybrid and case.prefix_caching and mode in {None, "none"}, mode or "none given")


RULES: tuple[Rule[Case], ...] = (
    Rule(
        "mamba-on-transformer",
        Severity.ERROR,
        "--mamba-…",
        _mamba_flag,
        "{} on a plain Transformer: the server starts, says it is healthy, and dies at the first request",
        "remove it",
        "run: AttributeError get_mamba_state_copy_func",
        fix=lambda case: case.line.without(*_mamba_flags(case)),
    ),
    Rule(
        "mamba-cache-mode",
        Severity.ERROR,
        CACHE_MODE,
        lambda case: when(case.hybrid and case.line.value(CACHE_MODE) == "all"),
        "310P knows only align for a hybrid model's prefix cache: all raises NotImplementedError",
        f"use {CACHE_MODE} align (a start script of duopack gives it where it is needed)",
        "vllm-ascend's model runner",
        fix=lambda case: case.line.with_option(CACHE_MODE, "align"),
    ),
    Rule(
        "mamba-cache-mode-open",
        Severity.WARNING,
        f"{CACHE_MODE}, --enable-prefix-caching",
        _mode_open,
        "a hybrid model's prefix cache with {} as cache mode: vLLM chooses one by itself, and 310P knows only align",
        f"give {CACHE_MODE} align",
        "vllm-ascend's model runner",
        fix=lambda case: case.line.with_option(CACHE_MODE, "align"),
    ),
    Rule(
        "mamba-state-dtype",
        Severity.WARNING,
        STATE_DTYPE,
        lambda case: when(
            case.hybrid and case.line.value(STATE_DTYPE) != "float16",
            case.line.value(STATE_DTYPE) or "not given",
        ),
        f"{STATE_DTYPE} is {{}}: the linear-attention state follows the checkpoint's type, which 310P may not have,"
        " or takes twice the memory",
        f"give {STATE_DTYPE} float16",
        "the deployment guide's and upstream's commands for Qwen3.5 on 310P",
        fix=lambda case: case.line.with_option(STATE_DTYPE, "float16"),
    ),
    Rule(
        "hybrid-prefix-chunked",
        Severity.ERROR,
        "--enable-chunked-prefill, --enable-prefix-caching",
        lambda case: when(case.hybrid and case.prefix_caching and not case.chunked_prefill),
        "a hybrid model's prefix cache needs chunked prefill: vLLM refuses to start",
        "turn chunked prefill on, or prefix caching off",
        "vLLM's config for hybrid models, run",
        fix=lambda case: case.line.without("--no-enable-chunked-prefill").with_option(
            "--enable-chunked-prefill"
        ),
    ),
    Rule(
        "qwen3.5-base",
        Severity.WARNING,
        "the model and the base",
        lambda case: when(case.hybrid, case.base.vllm_ascend),
        "Qwen3.5 on the 300I Duo is supported upstream from vllm-ascend 0.23.0rc1 on, and this base has {}",
        "run the smoke test before you rely on it, or use a newer base",
        "vllm-ascend's support statement",
        Bases(before="0.23.0rc1"),
    ),
)
