"""Captured graphs."""

from __future__ import annotations

from pipeline.ascend.rules.case import Case
from pipeline.ascend.rules.rule import Rule, Severity, when


def _too_many_sizes(case: Case) -> str | None:
    sizes = case.profile.capture_sizes
    return when(
        case.ranks > 1 and case.graphs and len(sizes) > 2, f"{len(sizes)} capture sizes at TP {case.ranks}"
    )


def _idle_sizes(case: Case) -> str | None:
    idle = [size for size in case.profile.capture_sizes if size > case.profile.max_num_seqs]
    return when(case.graphs and idle, ", ".join(map(str, idle)))


def _eager_batches(case: Case) -> str | None:
    largest = max(case.profile.capture_sizes, default=0)
    wide = case.profile.max_num_seqs
    return when(
        case.graphs and 0 < largest < wide, f"{largest + 1} to {wide}" if largest + 1 < wide else wide
    )


RULES = (
    Rule(
        "capture-sizes-tp",
        Severity.ERROR,
        _too_many_sizes,
        "{}: a rank runs out of events for its collectives, and the server fails in all_reduce",
        "keep at most two capture_sizes, for example the smallest and the most usual batch",
        "vllm-ascend's notes on 310P graph mode",
    ),
    Rule(
        "capture-sizes-none",
        Severity.ERROR,
        lambda case: when(case.graphs and not case.profile.capture_sizes),
        "no capture sizes are given, and vLLM would capture dozens by itself",
        "give capture_sizes, or cudagraph_mode: NONE",
        "vllm-ascend's notes on 310P graph mode",
    ),
    Rule(
        "capture-sizes-idle",
        Severity.WARNING,
        _idle_sizes,
        "capture sizes {} are larger than max_num_seqs: they cost memory and are never used",
        "drop them, or raise max_num_seqs",
        "vLLM's scheduler: a batch has at most max_num_seqs sequences",
    ),
    Rule(
        "capture-sizes-eager",
        Severity.NOTE,
        _eager_batches,
        "batches of {} are larger than the largest capture size and run without a graph",
        "raise the last of capture_sizes if such batches are usual",
        "vLLM's design of CUDA graphs: a batch above the largest capture size runs eagerly",
    ),
    Rule(
        "graph-precision",
        Severity.WARNING,
        lambda case: when(case.before("0.21.0rc1") and case.profile.cudagraph_mode == "FULL_DECODE_ONLY"),
        "this base lacks two precision fixes for graph mode: answers may be garbled",
        "look at the answers; if they are garbled use cudagraph_mode: NONE, or a base from 0.21.0rc1 on",
        "#9727, #9720",
    ),
    Rule(
        "launch-blocking",
        Severity.ERROR,
        lambda case: when(case.graphs and case.env.get("ASCEND_LAUNCH_BLOCKING") == "1"),
        "ASCEND_LAUNCH_BLOCKING=1 cannot be used with graphs",
        "remove it from env, or use cudagraph_mode: NONE",
        "vllm-ascend's notes on graph mode",
    ),
)
