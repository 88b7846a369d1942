"""Captured graphs."""

from __future__ import annotations

from pipeline.ascend.rules.case import Case
from pipeline.ascend.rules.rule import Bases, Rule, Severity, when
from pipeline.ascend.serve_line import ServeLine

MODES = ("FULL_DECODE_ONLY", "PIECEWISE", "NONE")
NOTES = "vllm-ascend's notes on 310P graph mode"
SIZES = "cudagraph_capture_sizes in --compilation-config (capture_sizes)"
MODE = "cudagraph_mode in --compilation-config"


def _too_many_sizes(case: Case) -> str | None:
    sizes = case.capture_sizes
    return when(
        case.ranks > 1 and case.graphs and len(sizes) > 2, f"{len(sizes)} capture sizes at TP {case.ranks}"
    )


def _idle_sizes(case: Case) -> str | None:
    idle = [size for size in case.capture_sizes if size > case.max_num_seqs]
    return when(case.graphs and idle, ", ".join(map(str, idle)))


def _eager_batches(case: Case) -> str | None:
    largest, wide = max(case.capture_sizes, default=0), case.max_num_seqs
    return when(
        case.graphs and 0 < largest < wide, f"{largest + 1} to {wide}" if largest + 1 < wide else wide
    )


def _downgraded(case: Case) -> str | None:
    mode = case.graph_mode
    return when(mode in {"FULL_AND_PIECEWISE", "FULL"}, mode)


def _sized(case: Case, sizes: tuple[int, ...]) -> ServeLine:
    config = {**case.line.config("--compilation-config"), "cudagraph_capture_sizes": list(sizes)}
    return case.line.without("--cudagraph-capture-sizes").with_config("--compilation-config", config)


def _two_sizes(case: Case) -> ServeLine:
    fitting = [size for size in case.capture_sizes if size <= case.max_num_seqs] or case.capture_sizes
    return _sized(case, tuple(sorted({min(fitting), max(fitting)})))


def _few_sizes(case: Case) -> ServeLine:
    largest = min(case.max_num_seqs, 16)
    return _sized(case, tuple(sorted({1, largest})))


def _moded(case: Case) -> ServeLine:
    config = {**case.line.config("--compilation-config"), "cudagraph_mode": "FULL_DECODE_ONLY"}
    return case.line.with_config("--compilation-config", config)


RULES: tuple[Rule[Case], ...] = (
    Rule(
        "capture-sizes-tp",
        Severity.ERROR,
        f"{SIZES}, --tensor-parallel-size",
        _too_many_sizes,
        "{}: a rank runs out of events for its collectives, and the server fails in all_reduce",
        "keep at most two capture sizes, for example the smallest and the most usual batch",
        NOTES,
        fix=_two_sizes,
    ),
    Rule(
        "capture-sizes-none",
        Severity.ERROR,
        SIZES,
        lambda case: when(case.graphs and not case.capture_sizes),
        "no capture sizes are given, and vLLM would capture dozens by itself",
        "give one or two capture sizes, or turn graphs off (cudagraph_mode NONE, --enforce-eager)",
        NOTES,
        fix=_few_sizes,
    ),
    Rule(
        "capture-sizes-idle",
        Severity.WARNING,
        f"{SIZES}, --max-num-seqs",
        _idle_sizes,
        "capture sizes {} are larger than max_num_seqs: they cost memory and are never used",
        "drop them, or raise max_num_seqs",
        "vLLM's scheduler: a batch has at most max_num_seqs sequences",
    ),
    Rule(
        "capture-sizes-eager",
        Severity.NOTE,
        f"{SIZES}, --max-num-seqs",
        _eager_batches,
        "batches of {} are larger than the largest capture size and run without a graph",
        "raise the last capture size if such batches are usual",
        "vLLM's design of CUDA graphs: a batch above the largest capture size runs eagerly",
    ),
    Rule(
        "graph-mode",
        Severity.WARNING,
        MODE,
        lambda case: when(case.graphs and case.graph_mode is None),
        "no graph mode is given: vLLM's own is FULL_AND_PIECEWISE, which 310P does not have and replaces",
        'say it: {"cudagraph_mode": "FULL_DECODE_ONLY"}',
        NOTES,
        fix=_moded,
    ),
    Rule(
        "graph-mode-downgraded",
        Severity.WARNING,
        MODE,
        _downgraded,
        "310P does not have the graph mode {} and replaces it by another",
        "use FULL_DECODE_ONLY, which is recommended, or PIECEWISE",
        NOTES,
        fix=_moded,
    ),
    Rule(
        "graph-precision",
        Severity.WARNING,
        MODE,
        lambda case: when(case.graph_mode == "FULL_DECODE_ONLY"),
        "this base lacks two precision fixes for graph mode: answers may be garbled",
        "look at the answers; if they are garbled turn graphs off, or use a base from 0.21.0rc1 on",
        "#9727, #9720",
        Bases(before="0.21.0rc1"),
    ),
    Rule(
        "launch-blocking",
        Severity.ERROR,
        f"ASCEND_LAUNCH_BLOCKING, {MODE}",
        lambda case: when(case.graphs and case.env.get("ASCEND_LAUNCH_BLOCKING") == "1"),
        "ASCEND_LAUNCH_BLOCKING=1 cannot be used with graphs",
        "remove it, or turn graphs off",
        "vllm-ascend's notes on graph mode",
        fix=lambda case: case.line.without_env("ASCEND_LAUNCH_BLOCKING"),
    ),
)
