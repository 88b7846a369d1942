"""Lengths, memory, and what 310P cannot do."""

from __future__ import annotations

from pipeline.ascend.rules.case import DEFAULT_SEQS, Case
from pipeline.ascend.rules.rule import Bases, Rule, Severity, when

GIB = 1 << 30
CHIP = 43_693 << 20
"""Bytes of the smaller chip of a 300I Duo."""
COMPRESSED_MASK = "0.21.0rc1"
"""The first vllm-ascend whose attention mask does not grow with max_model_len."""
LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_SPECULATIVE = ("--speculative-config", "-sc", "--speculative-model")
_UNABLE = ("--enable-lora", "--lora-modules", "--kv-transfer-config")
LENGTH, SEQS, TOKENS = "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens"


def mask_bytes(length: int) -> int:
    """Bytes of one full float16 attention mask."""
    return length * length * 2


def _mask(case: Case) -> str | None:
    size = mask_bytes(case.max_model_len)
    return when(GIB <= size < CHIP, f"{size / GIB:.1f} GiB, up to two copies")


def _too_few_tokens(case: Case) -> str | None:
    tokens = case.line.number(TOKENS)
    if tokens is None:
        return None
    if tokens < case.max_num_seqs:
        return f"max_num_batched_tokens {tokens} is below max_num_seqs {case.max_num_seqs}"
    return when(
        not case.chunked_prefill and tokens < case.max_model_len,
        f"max_num_batched_tokens {tokens} is below max_model_len without chunked prefill",
    )


def _too_long(case: Case) -> str | None:
    return when(
        case.max_model_len > case.model.max_positions,
        f"{case.max_model_len} is above the model's own {case.model.max_positions}",
    )


def _long_unallowed(case: Case) -> str | None:
    allowed = case.env.get(LONG) == "1" or not case.written
    return None if allowed else _too_long(case)


def _utilization(case: Case) -> str | None:
    text = case.line.value("--gpu-memory-utilization")
    share = case.line.fraction("--gpu-memory-utilization")
    return when(text is not None and (share is None or not 0 < share <= 1), text)


def _numbers(case: Case) -> str | None:
    flags = ("--tensor-parallel-size", LENGTH, SEQS, TOKENS, "--port")
    values = {flag: case.line.value(flag) for flag in flags}
    wrong = [
        f"{flag} {value}"
        for flag, value in values.items()
        if value not in {None, "auto", "-1"} and not case.line.number(flag)
    ]
    return when(wrong, ", ".join(wrong))


def _tp(case: Case) -> str | None:
    return when(case.ranks not in {1, 2, 4, 8}, case.ranks)


def _many(case: Case) -> str | None:
    return when(case.written and not case.line.has(SEQS), DEFAULT_SEQS)


RULES: tuple[Rule[Case], ...] = (
    Rule(
        "attention-mask",
        Severity.WARNING,
        LENGTH,
        _mask,
        "this base keeps a full attention mask of max_model_len squared on each chip: {}",
        "lower max_model_len or gpu_memory_utilization if the chip runs out of memory",
        "vllm-ascend's attention mask before 0.21.0rc1",
        Bases(before=COMPRESSED_MASK),
    ),
    Rule(
        "attention-mask-chip",
        Severity.ERROR,
        LENGTH,
        lambda case: when(
            mask_bytes(case.max_model_len) >= CHIP,
            f"{mask_bytes(case.max_model_len) / GIB:.0f} GiB for {case.max_model_len} tokens",
        ),
        "this base keeps a full attention mask of max_model_len squared, {}: more than a chip has",
        "give a max_model_len that is needed, for example 16384",
        "vllm-ascend's attention mask before 0.21.0rc1",
        Bases(before=COMPRESSED_MASK),
        fix=lambda case: case.line.with_option(LENGTH, "16384"),
    ),
    Rule(
        "model-len-limit",
        Severity.WARNING,
        LENGTH,
        _too_long,
        "max_model_len {}: answers may be nonsense beyond it; vLLM starts only with VLLM_ALLOW_LONG_MAX_MODEL_LEN=1",
        "lower max_model_len, or configure rope scaling",
        "vLLM's check of max_model_len, run",
    ),
    Rule(
        "model-len-unallowed",
        Severity.ERROR,
        f"{LENGTH}, {LONG}",
        _long_unallowed,
        "max_model_len {} and VLLM_ALLOW_LONG_MAX_MODEL_LEN is not set: vLLM refuses to start",
        f"lower max_model_len, or set {LONG}=1",
        "vLLM's check of max_model_len, run",
        fix=lambda case: case.line.with_option(LENGTH, str(case.model.max_positions)),
    ),
    Rule(
        "batched-tokens",
        Severity.ERROR,
        f"{TOKENS}, {SEQS}, {LENGTH}",
        _too_few_tokens,
        "{}: vLLM refuses to start",
        "raise max_num_batched_tokens, or leave it out",
        "vLLM's scheduler config, run",
        fix=lambda case: case.line.without(TOKENS),
    ),
    Rule(
        "seqs-default",
        Severity.WARNING,
        SEQS,
        _many,
        "max_num_seqs is not given, and vLLM takes {}: far above what is captured, and each costs memory",
        "give the number of requests that come at once, for example the largest capture size",
        "vLLM's engine arguments",
        fix=lambda case: case.line.with_option(SEQS, str(max(case.capture_sizes, default=8))),
    ),
    Rule(
        "number-form",
        Severity.ERROR,
        f"--tensor-parallel-size, {LENGTH}, {SEQS}, {TOKENS}, --port",
        _numbers,
        "{}: not a number above zero, and vLLM refuses to start",
        "write plain digits",
        "vLLM's argument parser",
    ),
    Rule(
        "tensor-parallel",
        Severity.ERROR,
        "--tensor-parallel-size (tensor_parallel)",
        _tp,
        "TP {} does not divide the attention heads of Qwen3 and Qwen3.5: vLLM refuses to start",
        "use 1, 2, 4 or 8 chips",
        "the models' configs; vLLM's check of attention heads",
    ),
    Rule(
        "utilization",
        Severity.ERROR,
        "--gpu-memory-utilization",
        _utilization,
        "gpu_memory_utilization is {}: vLLM takes a share of the chip's memory above 0 and at most 1",
        "write for example 0.8",
        "vLLM's cache config",
    ),
    Rule(
        "speculative-unsupported",
        Severity.ERROR,
        ", ".join(_SPECULATIVE),
        lambda case: case.given(*_SPECULATIVE),
        "{}: the first request ends with 'SpecDecoding is not supported for 310P currently'",
        "remove it, or use a base from 0.23.0rc1 on",
        "#7394",
        Bases(before="0.21.0rc1"),
        fix=lambda case: case.line.without(*_SPECULATIVE),
    ),
    Rule(
        "speculative-young",
        Severity.WARNING,
        ", ".join(_SPECULATIVE),
        lambda case: case.given(*_SPECULATIVE),
        "speculative decoding is young on 310P: wrong text has been reported",
        "compare answers with and without it",
        "#10309, #10640, #16979",
        Bases(since="0.21.0rc1"),
    ),
    Rule(
        "no-lora-no-transfer",
        Severity.ERROR,
        ", ".join(_UNABLE),
        lambda case: case.given(*_UNABLE),
        "310P has neither LoRA nor a split of prefill and decode, and {} asks for one",
        "remove it",
        "vllm-ascend's 310P support page",
        fix=lambda case: case.line.without(*_UNABLE),
    ),
)
