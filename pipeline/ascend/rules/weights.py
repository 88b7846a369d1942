"""Weights: how they are split, and in which types."""

from __future__ import annotations

import re

from pipeline.ascend.rules.case import Case
from pipeline.ascend.rules.rule import Rule, Severity, when

_SPLIT_FLAGS = ("--limit-mm-per-prompt", "--mm-encoder-tp-mode", "--enable-expert-parallel", "-ep")
_DTYPES = ("--dtype", "--mamba-ssm-cache-dtype", "--mamba-cache-dtype", "--kv-cache-dtype", "--lora-dtype")
_OTHER_CHIPS = re.compile(r"(?i)(?<![a-z0-9])(a2|a3|910b?\d*|800i?)(?![a-z0-9])")
_HALF = {"float16", "half"}


def _path(case: Case) -> str:
    return (case.profile.weights or "") if case.profile else case.line.model


def _split_for(case: Case) -> set[int]:
    return {int(number) for number in re.findall(r"(?i)(?<![a-z0-9])tp[-_]?(\d{1,2})(?!\d)", _path(case))}


def _other_split(case: Case) -> str | None:
    wrong = sorted(str(number) for number in _split_for(case) if number != case.ranks)
    return when(case.sharded and wrong, f"{_path(case)} is split for {', '.join(wrong)}, not {case.ranks}")


def _unsharded(case: Case) -> str | None:
    known = case.quantization == "w8a8sc" or (case.written and _split_for(case))
    return when(known and not case.sharded, "W8A8SC" if case.quantization == "w8a8sc" else "split")


def _bfloat16(case: Case) -> str | None:
    wrong = [
        f"{flag} {value}" for flag in _DTYPES if (value := case.line.value(flag)) in {"bfloat16", "bf16"}
    ]
    return when(wrong, ", ".join(wrong))


def _dtype(case: Case) -> str | None:
    value = case.line.value("--dtype")
    return when(value not in {*_HALF, "bfloat16"}, f"--dtype {value}" if value else "no --dtype")


def _moe_types(case: Case) -> str | None:
    return when(case.moe and case.quantization in {"w8a8", "float"}, case.quantization)


def _quantization(case: Case) -> str | None:
    value = case.line.value("--quantization")
    if value is None:
        return None
    if value != "ascend":
        return f"--quantization {value}: weights for 310P are made by msmodelslim, and only ascend reads them"
    return when(
        case.quantization == "float", "--quantization ascend on float weights, which have no description"
    )


def _for_other_chips(case: Case) -> str | None:
    found = _OTHER_CHIPS.search(case.line.model)
    return found[1] if found and case.quantization != "float" else None


RULES: tuple[Rule[Case], ...] = (
    Rule(
        "w8a8sc-sharded",
        Severity.ERROR,
        "--load-format (load_format), the weights",
        _unsharded,
        "{} weights exist only per rank, and the usual loader fails with KeyError …deq_scale",
        "load them with sharded_state, from the directory of the split",
        "#11368, #11406",
        fix=lambda case: case.line.with_option("--load-format", "sharded_state"),
    ),
    Rule(
        "sharded-other-tp",
        Severity.ERROR,
        "--tensor-parallel-size, the directory of the weights",
        _other_split,
        "the directory {}: vLLM would load it and answer garbage",
        "make the directory and the tensor-parallel size agree",
        "vLLM's sharded_state loader, which does not check the split",
        fix=lambda case: case.line.with_option("--tensor-parallel-size", str(min(_split_for(case)))),
    ),
    Rule(
        "sharded-options",
        Severity.WARNING,
        ", ".join(_SPLIT_FLAGS),
        lambda case: case.given(*_SPLIT_FLAGS) if case.sharded else None,
        "{} changes which tensors a rank has: the split must have been made with the same option",
        "remove it, or split the weights with it",
        "vLLM's sharded_state loader, run",
    ),
    Rule(
        "moe-sharded-sc",
        Severity.ERROR,
        "the weights' quantization",
        lambda case: when(case.moe and case.quantization == "w8a8sc"),
        "mixture-of-experts models have no W8A8SC on 310P",
        "use w8a8-dynamic weights",
        "vllm-ascend's quantization methods for 310P",
    ),
    Rule(
        "moe-dynamic",
        Severity.WARNING,
        "the weights' quantization",
        _moe_types,
        "on 310P the experts of a mixture-of-experts model must be W8A8_DYNAMIC, and these are {}",
        "use w8a8-dynamic weights, or make sure that the experts are W8A8_DYNAMIC",
        "vllm-ascend's quantization methods for 310P",
    ),
    Rule(
        "moe-expert-parallel",
        Severity.WARNING,
        "--enable-expert-parallel",
        lambda case: case.given("--enable-expert-parallel", "-ep") if case.moe else None,
        "{}: on 310P the experts communicate by all-gather only, and nobody has reported it with expert parallelism",
        "remove it",
        "vllm-ascend's MoE communication for 310P",
        fix=lambda case: case.line.without("--enable-expert-parallel", "-ep"),
    ),
    Rule(
        "other-chips",
        Severity.ERROR,
        "the directory of the weights",
        _for_other_chips,
        "the directory's name says {}: quantized weights for A2 and A3 are other files, and give garbage on 310P",
        "take the weights made for 310P",
        "upstream's model pages, which keep the two apart",
    ),
    Rule(
        "quantization-option",
        Severity.ERROR,
        "--quantization",
        _quantization,
        "{}: the server ends at start with 'Quantization Config Not Found' or an unknown method",
        "leave --quantization out: it is found from quant_model_description.json",
        "vllm-ascend's quantization config",
        fix=lambda case: case.line.without("--quantization"),
    ),
    Rule(
        "bfloat16",
        Severity.ERROR,
        ", ".join(_DTYPES),
        _bfloat16,
        "310P has no bfloat16, and the command has {}",
        "use float16 (a start script of duopack gives it)",
        "vllm-ascend's 310P support page",
        fix=lambda case: case.line.without(
            *(flag for flag in _DTYPES if case.line.value(flag) in {"bfloat16", "bf16"})
        ).with_option("--dtype", "float16"),
    ),
    Rule(
        "dtype",
        Severity.ERROR,
        "--dtype",
        _dtype,
        "{}: it must be float16; the checkpoint's own type is bfloat16, which 310P does not have",
        "give --dtype float16",
        "vllm-ascend's 310P support page",
        fix=lambda case: case.line.with_option("--dtype", "float16"),
    ),
)
