"""The rules themselves: one entry each, with its source. To add knowledge, add an entry.

Sources: `#N` is issue or pull request N of vllm-project/vllm-ascend; "run" was seen with vLLM 0.20.2 itself.
"""

from __future__ import annotations

import posixpath
import re

from pipeline.ascend.rules.case import Case
from pipeline.ascend.rules.rule import Rule, Severity
from pipeline.ascend.serve import settings

GIB = 1 << 30
_SPLIT_FLAGS = ("--limit-mm-per-prompt", "--mm-encoder-tp-mode", "--enable-expert-parallel", "-ep")
_SPECULATIVE_FLAGS = ("--speculative-config", "-sc", "--speculative-model")
_BASH_NAMES = frozenset({"BASHOPTS", "BASH_ENV", "ENV", "EUID", "IFS", "PATH", "PPID", "SHELLOPTS", "UID"})
_SECRET = re.compile(r"(^|_)(TOKEN|PASSWORD|PASSWD|SECRET|API_KEY|ACCESS_KEY|CREDENTIALS?)(_|$)")


def _if(applies: object, detail: object = "") -> str | None:
    return str(detail) if applies else None


def _too_many_sizes(case: Case) -> str | None:
    sizes = case.profile.capture_sizes
    return _if(
        case.ranks > 1 and case.graphs and len(sizes) > 2, f"{len(sizes)} capture sizes at TP {case.ranks}"
    )


def _idle_sizes(case: Case) -> str | None:
    idle = [size for size in case.profile.capture_sizes if size > case.profile.max_num_seqs]
    return _if(case.graphs and idle, ", ".join(map(str, idle)))


def _eager_batches(case: Case) -> str | None:
    largest = max(case.profile.capture_sizes, default=0)
    wide = case.profile.max_num_seqs
    return _if(case.graphs and 0 < largest < wide, f"{largest + 1} to {wide}" if largest + 1 < wide else wide)


def _other_split(case: Case) -> str | None:
    named = re.findall(r"(?i)(?<![a-z])tp[-_]?(\d+)", case.profile.weights or "")
    wrong = [number for number in named if int(number) != case.ranks]
    return _if(
        case.sharded and wrong, f"{case.profile.weights} is split for {', '.join(wrong)}, not {case.ranks}"
    )


def _mask(case: Case) -> str | None:
    size = case.profile.max_model_len**2 * 2
    return _if(case.before("0.21.0rc1") and size >= GIB, f"{size / GIB:.1f} GiB, up to two copies")


def _too_few_tokens(case: Case) -> str | None:
    tokens, profile = case.profile.max_num_batched_tokens, case.profile
    if tokens is None:
        return None
    if tokens < profile.max_num_seqs:
        return f"max_num_batched_tokens {tokens} is below max_num_seqs {profile.max_num_seqs}"
    short = not profile.chunked_prefill and tokens < profile.max_model_len
    return _if(
        short,
        f"max_num_batched_tokens {tokens} is below max_model_len without chunked prefill",
    )


def _bfloat16(case: Case) -> str | None:
    flags = ("--dtype", "--mamba-ssm-cache-dtype", "--mamba-cache-dtype", "--kv-cache-dtype", "--lora-dtype")
    wrong = [f"{flag} {value}" for flag in flags if (value := case.value(flag)) in {"bfloat16", "bf16"}]
    return _if(wrong, ", ".join(wrong))


def _secret(case: Case) -> str | None:
    names = [name for name in case.env if _SECRET.search(name)]
    return _if(names, ", ".join(names)) or case.given("--api-key", "--hf-token")


def _reserved_env(case: Case) -> str | None:
    ours = {setting.name for setting in settings(case.model, case.profile)} | _BASH_NAMES
    names = [name for name in case.env if name in ours or name.startswith("DUOPACK_")]
    return _if(names, ", ".join(names))


def _repeated_args(case: Case) -> str | None:
    ours = [flag for setting in settings(case.model, case.profile) for flag in setting.flags]
    if case.before("0.23.0rc1"):
        ours.append("--additional-config")
    return case.given(*ours)


def _visible_devices(case: Case) -> str | None:
    value = case.env.get("ASCEND_RT_VISIBLE_DEVICES")
    return _if(value is not None, value)


def _mamba_flag(case: Case) -> str | None:
    flags = [flag for flag in case.flags() if flag.startswith("--mamba-")]
    return _if(flags and not case.hybrid, ", ".join(flags))


def _whole_disk(case: Case) -> str | None:
    path = case.profile.media_path
    return _if(path is not None and posixpath.normpath(path).strip("/") == "")


def _allocator(case: Case) -> str | None:
    value = case.env.get("PYTORCH_NPU_ALLOC_CONF", "")
    return _if("expandable_segments:True" in value and "max_split_size_mb" in value, value)


def _moe_types(case: Case) -> str | None:
    kind = case.model.quantization.value
    return _if(case.model.architecture.moe and kind in {"w8a8", "float"}, kind)


RULES = (
    # Graphs
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
        lambda case: _if(case.graphs and not case.profile.capture_sizes),
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
        lambda case: _if(case.before("0.21.0rc1") and case.profile.cudagraph_mode == "FULL_DECODE_ONLY"),
        "this base lacks two precision fixes for graph mode: answers may be garbled",
        "look at the answers; if they are garbled use cudagraph_mode: NONE, or a base from 0.21.0rc1 on",
        "#9727, #9720",
    ),
    Rule(
        "launch-blocking",
        Severity.ERROR,
        lambda case: _if(case.graphs and case.env.get("ASCEND_LAUNCH_BLOCKING") == "1"),
        "ASCEND_LAUNCH_BLOCKING=1 cannot be used with graphs",
        "remove it from env, or use cudagraph_mode: NONE",
        "vllm-ascend's notes on graph mode",
    ),
    # Weights
    Rule(
        "w8a8sc-sharded",
        Severity.ERROR,
        lambda case: _if(case.model.quantization.value == "w8a8sc" and not case.sharded),
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
        lambda case: _if(case.model.architecture.moe and case.model.quantization.value == "w8a8sc"),
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
    # Hybrid models
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
        lambda case: _if(case.hybrid and case.value("--mamba-cache-mode") == "all"),
        "310P knows only align for a hybrid model's prefix cache: all raises NotImplementedError",
        "remove --mamba-cache-mode from args: the script gives align where it is needed",
        "vllm-ascend's model runner",
    ),
    Rule(
        "hybrid-prefix-chunked",
        Severity.ERROR,
        lambda case: _if(case.hybrid and case.profile.prefix_caching and not case.profile.chunked_prefill),
        "a hybrid model's prefix cache needs chunked prefill: vLLM refuses to start",
        "set chunked_prefill: true, or prefix_caching: false",
        "vLLM's config for hybrid models, run",
    ),
    Rule(
        "qwen3.5-base",
        Severity.WARNING,
        lambda case: _if(case.hybrid and case.before("0.23.0rc1"), case.base.vllm_ascend),
        "Qwen3.5 on the 300I Duo is supported upstream from vllm-ascend 0.23.0rc1 on, and this base has {}",
        "run the smoke test before you rely on it, or use a newer base",
        "vllm-ascend's support statement",
    ),
    # Memory and lengths
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
        lambda case: _if(
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
    # Decoding and features that 310P lacks
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
    # Environment
    Rule(
        "hccl-expansion",
        Severity.WARNING,
        lambda case: _if(
            case.env.get("HCCL_OP_EXPANSION_MODE", "HOST") not in {"HOST", "AI_CPU"},
            case.env.get("HCCL_OP_EXPANSION_MODE"),
        ),
        "the 300I Duo does not support HCCL_OP_EXPANSION_MODE={}: it silently becomes HOST",
        "remove it from env",
        "CANN's page on HCCL_OP_EXPANSION_MODE",
    ),
    Rule(
        "hccl-ai-cpu-graphs",
        Severity.WARNING,
        lambda case: _if(case.graphs and case.env.get("HCCL_OP_EXPANSION_MODE") == "AI_CPU"),
        "HCCL_OP_EXPANSION_MODE=AI_CPU excludes static graphs and everything but AllReduce",
        "remove it from env",
        "CANN's page on HCCL_OP_EXPANSION_MODE",
    ),
    Rule(
        "allocator",
        Severity.ERROR,
        _allocator,
        "PYTORCH_NPU_ALLOC_CONF={}: expandable_segments and max_split_size_mb exclude each other",
        "keep one of them",
        "torch_npu's allocator",
    ),
    Rule(
        "visible-devices",
        Severity.ERROR,
        _visible_devices,
        "ASCEND_RT_VISIBLE_DEVICES={} in an image fixes chips that the container may not have",
        "remove it from env: chips are chosen when the container is started",
        "CANN: ids inside a container are logical and start at 0",
    ),
    Rule(
        "env-reserved",
        Severity.ERROR,
        _reserved_env,
        "env names {}, which the start script or bash uses itself",
        "use the profile's own key for it, or another name",
        "duopack's start script; bash's own variables",
    ),
    Rule(
        "args-repeat",
        Severity.ERROR,
        _repeated_args,
        "args give {}, which the start script gives already: its checks would not see the second one",
        "use the profile's own key for it",
        "vLLM's argument parser takes the last of two",
    ),
    # Safety
    Rule(
        "media-path-root",
        Severity.ERROR,
        _whole_disk,
        "media_path / lets every client read every file of the container",
        "name one directory that holds media, or leave media_path out",
        "vLLM's security notes on allowed-local-media-path",
    ),
    Rule(
        "secret-in-image",
        Severity.ERROR,
        _secret,
        "{} looks like a secret, and everyone who can pull the image could read it",
        "give it when the container is started",
        "duopack: no secret enters an image",
    ),
)
