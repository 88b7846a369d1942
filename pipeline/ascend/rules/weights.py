"""Weights: how they are split, and in which types."""

from __future__ import annotations

import re

from pipeline.ascend.rules.case import Case
from pipeline.ascend.rules.rule import Rule, Severity, when

_SPLIT_FLAGS = ("--limit-mm-per-prompt", "--mm-encoder-tp-mode", "--enable-expert-parallel", "-ep")


def _other_split(case: Case) -> str | None:
    named = re.findall(r"(?i)(?<![a-z])tp[-_]?(\d+)", case.profile.weights or "")
    wrong = sorted({number for number in named if int(number) != case.ranks})
    return when(
        case.sharded and wrong, f"{case.profile.weights} is split for {', '.join(wrong)}, not {case.ranks}"
    )


def _bfloat16(case: Case) -> str | None:
    flags = ("--dtype", "--mamba-ssm-cache-dtype", "--mamba-cache-dtype", "--kv-cache-dtype", "--lora-dtype")
    wrong = [f"{flag} {value}" for flag in flags if (value := case.value(flag)) in {"bfloat16", "bf16"}]
    return when(wrong, ", ".join(wrong))


def _moe_types(case: Case) -> str | None:
    kind = case.model.quantization.value
    return when(case.model.architecture.moe and kind in {"w8a8", "float"}, kind)


RULES = (
    Rule(
        "w8a8sc-sharded",
        Severity.ERROR,
        lambda case: when(case.model.quantization.value == "w8a8sc" and not case.sharded),
        "W8A8SC weights exist only split per rank, and the usual loader fails with KeyError …deq_scale",
        "set load_format: sharded_state and weights: to the directory of the split",
        "#11368, #11406",
    ),
    Rule(
        "sharded-other-tp",
        Severity.ERROR,
        _other_split,
        "the directory {}: vLLM would load it and answer garbage",
        "make weights and tensor_parallel agree",
        "vLLM's sharded_state loader, which does not check the split",
    ),
    Rule(
        "sharded-options",
        Severity.WARNING,
        lambda case: case.given(*_SPLIT_FLAGS) if case.sharded else None,
        "{} changes which tensors a rank has: the split must have been made with the same option",
        "remove it, or split the weights with it",
        "vLLM's sharded_state loader, run",
    ),
    Rule(
        "moe-sharded-sc",
        Severity.ERROR,
        lambda case: when(case.model.architecture.moe and case.model.quantization.value == "w8a8sc"),
        "mixture-of-experts models have no W8A8SC on 310P",
        "use w8a8-dynamic weights",
        "vllm-ascend's quantization methods for 310P",
    ),
    Rule(
        "moe-dynamic",
        Severity.WARNING,
        _moe_types,
        "on 310P the experts of a mixture-of-experts model must be W8A8_DYNAMIC, and the catalog says {}",
        "use w8a8-dynamic weights, or make sure that the experts are W8A8_DYNAMIC",
        "vllm-ascend's quantization methods for 310P",
    ),
    Rule(
        "bfloat16",
        Severity.ERROR,
        _bfloat16,
        "310P has no bfloat16, and args give {}",
        "remove it: the script gives float16",
        "vllm-ascend's 310P support page",
    ),
)
