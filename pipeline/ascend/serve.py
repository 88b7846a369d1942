"""The `vllm serve` command of a profile as values: settings, and the words that are made from them.

The start script is rendered from these values and `arguments` evaluates them here, so the command that is
checked at build time and the command that runs are one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Literal

from pipeline.ascend.versions import version_key

if TYPE_CHECKING:
    from pipeline.catalog.schema import Base, Model, Profile

MODELS_ROOT = "/models"
MAX_TOKENS = 1_048_576
RANKS = ("1", "2", "4", "8")

Form = Literal["text", "host", "name", "integer", "fraction", "choice", "switch", "sizes"]


@dataclass(frozen=True)
class Setting:
    """A setting of a start script: an environment variable with a default.

    `flags` are the options that it governs. A guarded one is refused among the script's own arguments,
    since checks or the health check would not see it there.
    """

    name: str
    default: str
    form: Form
    meaning: str
    flags: tuple[str, ...]
    optional: bool = False
    choices: tuple[str, ...] = ()
    low: int = 1
    high: int = MAX_TOKENS
    guarded: bool = False


@dataclass(frozen=True)
class Ref:
    """The value of a setting, inside a word."""

    name: str


Word = str | Ref | tuple[str | Ref, ...]


@dataclass(frozen=True)
class When:
    """A condition on a setting: it has the value `equals`, or is not empty when `equals` is None."""

    name: str
    equals: str | None = None


@dataclass(frozen=True)
class Part:
    """Words that belong together, given when the condition holds; `otherwise` is given when it does not."""

    words: tuple[Word, ...]
    when: When | None = None
    otherwise: tuple[Word, ...] = ()
    why: str = ""


def weights_path(model: Model, profile: Profile) -> str:
    """The directory in the image that the profile loads."""
    return "/".join(part for part in (MODELS_ROOT, model.directory, profile.weights) if part)


def settings(model: Model, profile: Profile) -> tuple[Setting, ...]:
    """Every setting of the profile's script, in the order in which it is documented."""
    batched = profile.max_num_batched_tokens
    return (
        Setting(
            "MODEL_PATH",
            weights_path(model, profile),
            "text",
            "directory of the weights",
            ("--model",),
            guarded=True,
        ),
        Setting(
            "SERVED_MODEL_NAME",
            profile.served_name,
            "text",
            "model name that clients send",
            ("--served-model-name",),
        ),
        Setting("HOST", "0.0.0.0", "host", "address to listen on", ("--host",), guarded=True),
        Setting(
            "PORT", str(profile.port), "integer", "port to listen on", ("--port",), high=65535, guarded=True
        ),
        Setting(
            "TP",
            str(profile.tensor_parallel),
            "integer",
            "chips to use, one rank each",
            ("--tensor-parallel-size", "-tp"),
            choices=RANKS,
            high=8,
            guarded=True,
        ),
        Setting(
            "DTYPE",
            "float16",
            "choice",
            "type of activations; 310P has no bfloat16",
            ("--dtype",),
            choices=("float16", "half"),
        ),
        Setting(
            "QUANTIZATION",
            "" if model.quantization.value == "float" else "ascend",
            "name",
            "ascend for weights made by msmodelslim",
            ("--quantization", "-q"),
            optional=True,
        ),
        Setting(
            "LOAD_FORMAT",
            profile.load_format,
            "choice",
            "sharded_state for weights split per rank",
            ("--load-format",),
            choices=("auto", "safetensors", "sharded_state", "dummy"),
            guarded=True,
        ),
        Setting(
            "MAX_MODEL_LEN",
            str(profile.max_model_len),
            "integer",
            "tokens of prompt and answer together",
            ("--max-model-len",),
        ),
        Setting(
            "MAX_NUM_SEQS",
            str(profile.max_num_seqs),
            "integer",
            "sequences served at once",
            ("--max-num-seqs",),
        ),
        Setting(
            "MAX_NUM_BATCHED_TOKENS",
            "" if batched is None else str(batched),
            "integer",
            "tokens in one step",
            ("--max-num-batched-tokens",),
            optional=True,
        ),
        Setting(
            "GPU_MEMORY_UTILIZATION",
            f"{Decimal(str(profile.gpu_memory_utilization)):f}",  # never 1e-05
            "fraction",
            "share of a chip's memory, above 0, at most 1",
            ("--gpu-memory-utilization",),
        ),
        Setting(
            "CUDAGRAPH_MODE",
            profile.cudagraph_mode,
            "choice",
            "which steps run as a captured graph",
            ("--compilation-config", "-cc", "--enforce-eager", "--no-enforce-eager"),
            choices=("FULL_DECODE_ONLY", "PIECEWISE", "NONE"),
        ),
        Setting(
            "CAPTURE_SIZES",
            ",".join(map(str, profile.capture_sizes)),
            "sizes",
            "batch sizes that get a graph, e.g. 1,4",
            ("--cudagraph-capture-sizes", "--max-cudagraph-capture-size"),
            optional=True,
        ),
        Setting(
            "PREFIX_CACHING",
            _switch(profile.prefix_caching),
            "switch",
            "keep the KV cache of shared prefixes: 1 or 0",
            ("--enable-prefix-caching", "--no-enable-prefix-caching"),
        ),
        Setting(
            "CHUNKED_PREFILL",
            _switch(profile.chunked_prefill),
            "switch",
            "cut long prompts into steps: 1 or 0",
            ("--enable-chunked-prefill", "--no-enable-chunked-prefill"),
        ),
        Setting(
            "REASONING_PARSER",
            profile.reasoning_parser or "",
            "name",
            "parser that splits off the reasoning",
            ("--reasoning-parser",),
            optional=True,
        ),
        Setting(
            "TOOL_CALL_PARSER",
            profile.tool_call_parser or "",
            "name",
            "parser of tool calls; set, it turns them on",
            ("--tool-call-parser", "--enable-auto-tool-choice", "--no-enable-auto-tool-choice"),
            optional=True,
        ),
        Setting(
            "MEDIA_PATH",
            profile.media_path or "",
            "text",
            "directory from which requests may read files",
            ("--allowed-local-media-path",),
            optional=True,
        ),
        Setting(
            "TRUST_REMOTE_CODE",
            _switch(profile.trust_remote_code),
            "switch",
            "run Python code that comes with the weights: 1 or 0",
            ("--trust-remote-code", "--no-trust-remote-code"),
        ),
    )


def command(model: Model, profile: Profile, base: Base) -> tuple[Part, ...]:
    """The words after `vllm serve`, as parts."""
    parts = [
        Part((Ref("MODEL_PATH"),)),
        Part(("--served-model-name", Ref("SERVED_MODEL_NAME"))),
        Part(("--host", Ref("HOST"))),
        Part(("--port", Ref("PORT"))),
        Part(("--tensor-parallel-size", Ref("TP"))),
        Part(("--dtype", Ref("DTYPE"))),
        Part(("--load-format", Ref("LOAD_FORMAT"))),
        Part(("--max-model-len", Ref("MAX_MODEL_LEN"))),
        Part(("--max-num-seqs", Ref("MAX_NUM_SEQS"))),
        Part(("--gpu-memory-utilization", Ref("GPU_MEMORY_UTILIZATION"))),
        Part(("--quantization", Ref("QUANTIZATION")), When("QUANTIZATION")),
        Part(("--max-num-batched-tokens", Ref("MAX_NUM_BATCHED_TOKENS")), When("MAX_NUM_BATCHED_TOKENS")),
        Part(
            ("--enforce-eager",),
            When("CUDAGRAPH_MODE", "NONE"),
            otherwise=(
                "--compilation-config",
                (
                    '{"cudagraph_mode": "',
                    Ref("CUDAGRAPH_MODE"),
                    '", "cudagraph_capture_sizes": [',
                    Ref("CAPTURE_SIZES"),
                    "]}",
                ),
            ),
        ),
        *_additional_config(base),
        Part(
            ("--enable-prefix-caching",),
            When("PREFIX_CACHING", "1"),
            otherwise=("--no-enable-prefix-caching",),
            why="Said in both cases: the default differs between versions and models.",
        ),
        Part(
            ("--enable-chunked-prefill",),
            When("CHUNKED_PREFILL", "1"),
            otherwise=("--no-enable-chunked-prefill",),
        ),
        *_state_cache(model),
        Part(("--reasoning-parser", Ref("REASONING_PARSER")), When("REASONING_PARSER")),
        Part(
            ("--enable-auto-tool-choice", "--tool-call-parser", Ref("TOOL_CALL_PARSER")),
            When("TOOL_CALL_PARSER"),
        ),
        Part(
            ("--allowed-local-media-path", Ref("MEDIA_PATH")),
            When("MEDIA_PATH"),
            why="The guide gives / here, which lets every client read every file of the container.",
        ),
        Part(
            ("--trust-remote-code",),
            When("TRUST_REMOTE_CODE", "1"),
            why="The guide gives it always; vLLM has Qwen3 and Qwen3.5 built in and needs no code of theirs.",
        ),
    ]
    if profile.args:
        parts.append(Part(tuple(profile.args), why="From the catalog's args."))
    return tuple(parts)


def arguments(parts: tuple[Part, ...], values: Mapping[str, str]) -> list[str]:
    """The words after `vllm serve` when the settings have these values (switches are 1 or 0)."""
    return [_text(word, values) for part in parts for word in _chosen(part, values)]


def defaults(declared: tuple[Setting, ...]) -> dict[str, str]:
    return {setting.name: setting.default for setting in declared}


def _chosen(part: Part, values: Mapping[str, str]) -> tuple[Word, ...]:
    if part.when is None:
        return part.words
    value = values[part.when.name]
    holds = bool(value) if part.when.equals is None else value == part.when.equals
    return part.words if holds else part.otherwise


def _text(word: Word, values: Mapping[str, str]) -> str:
    pieces = word if isinstance(word, tuple) else (word,)
    return "".join(values[piece.name] if isinstance(piece, Ref) else piece for piece in pieces)


def _switch(on: bool) -> str:
    return "1" if on else "0"


def _additional_config(base: Base) -> tuple[Part, ...]:
    if version_key(base.vllm_ascend) >= version_key("0.23.0rc1"):
        return ()
    config = {"ascend_compilation_config": {"fuse_norm_quant": False, "enable_npugraph_ex": False}}
    why = (
        f"vllm-ascend {base.vllm_ascend} does not know that 310P lacks these two passes; "
        "0.23.0rc1 and later switch them off by themselves."
    )
    return (Part(("--additional-config", json.dumps(config)), why=why),)


def _state_cache(model: Model) -> tuple[Part, ...]:
    if not model.architecture.hybrid:
        return ()
    return (
        Part(
            ("--mamba-ssm-cache-dtype", "float16"),
            why="The linear-attention state; 310P has no bfloat16, and float32 doubles it.",
        ),
        Part(
            ("--mamba-cache-mode", "align"),
            When("PREFIX_CACHING", "1"),
            why="310P knows only align for a hybrid's prefix cache, and align needs chunked prefill.",
        ),
    )
