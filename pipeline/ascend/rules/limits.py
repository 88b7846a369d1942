"""Lengths, memory, and what 310P cannot do."""

from __future__ import annotations

from pipeline.ascend.rules.case import Case
from pipeline.ascend.rules.rule import Rule, Severity, when

GIB = 1 << 30
_SPECULATIVE_FLAGS = ("--speculative-config", "-sc", "--speculative-model")


def _mask(case: Case) -> str | None:
    size = case.profile.max_model_len**2 * 2
    return when(case.before("0.21.0rc1") and size >= GIB, f"{size / GIB:.1f} GiB, up to two copies")


def _too_few_tokens(case: Case) -> str | None:
    tokens, profile = case.profile.max_num_batched_tokens, case.profile
    if tokens is None:
        return None
    if tokens < profile.max_num_seqs:
        return f"max_num_batched_tokens {tokens} is below max_num_seqs {profile.max_num_seqs}"
    short = not profile.chunked_prefill and tokens < profile.max_model_len
    return when(
        short,
        f"max_num_batched_tokens {tokens} is below max_model_len without chunked prefill",
    )


RULES = (
    Rule(
        "attention-mask",
        Severity.WARNING,
        _mask,
        "this base keeps a full attention mask of max_model_len squared on each chip: {}",
        "lower max_model_len or gpu_memory_utilization if the chip runs out of memory",
        "vllm-ascend's attention mask before 0.21.0rc1",
    ),
    Rule(
        "model-len-limit",
        Severity.WARNING,
        lambda case: when(
            case.profile.max_model_len > case.model.max_positions,
            f"{case.profile.max_model_len} is above the model's own {case.model.max_positions}",
        ),
        "max_model_len {}: answers may be nonsense beyond it; the script sets VLLM_ALLOW_LONG_MAX_MODEL_LEN",
        "lower max_model_len, or configure rope scaling",
        "vLLM's check of max_model_len, run",
    ),
    Rule(
        "batched-tokens",
        Severity.ERROR,
        _too_few_tokens,
        "{}: vLLM refuses to start",
        "raise max_num_batched_tokens, or leave it out",
        "vLLM's scheduler config, run",
    ),
    Rule(
        "speculative-unsupported",
        Severity.ERROR,
        lambda case: case.given(*_SPECULATIVE_FLAGS) if case.before("0.21.0rc1") else None,
        "{}: the first request ends with 'SpecDecoding is not supported for 310P currently'",
        "remove it, or use a base from 0.23.0rc1 on",
        "#7394",
    ),
    Rule(
        "speculative-young",
        Severity.WARNING,
        lambda case: None if case.before("0.21.0rc1") else case.given(*_SPECULATIVE_FLAGS),
        "speculative decoding is young on 310P: wrong text has been reported",
        "compare answers with and without it",
        "#10309, #10640, #16979",
    ),
    Rule(
        "no-lora-no-transfer",
        Severity.ERROR,
        lambda case: case.given("--enable-lora", "--lora-modules", "--kv-transfer-config"),
        "310P has neither LoRA nor a split of prefill and decode, and args give {}",
        "remove it",
        "vllm-ascend's 310P support page",
    ),
)
