"""A chip's memory as a sum: what a server on 310P puts where, and whether all of it fits.

How vllm-ascend shares a 310P out: of `utilization` × memory it takes weights and activations, and gives half of what
is left to the KV cache. The other half, and what is above the utilization, must hold everything else: the attention
mask, captured graphs, buffers of the ranks' traffic, the runtime. vLLM does not check that: it ends with an OOM
later. Numbers marked as estimates are this module's own, the others follow from the model and the options.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeline.ascend.rules.limits import CHIP, COMPRESSED_MASK, mask_bytes
from pipeline.ascend.versions import version_key

MIB, GIB = 1 << 20, 1 << 30
MASK_COPIES = 2
"""Up to two per rank were seen."""
COMPRESSED_LENGTH = 2048
KV_SHARE = 0.5
DEFAULT_BATCHED = 2048
"""vLLM's own tokens per step with chunked prefill, for a server on a chip of less than 70 GiB."""
HCCL_BUFFER = 512 * MIB
"""HCCL_BUFFSIZE of the start scripts; a communication domain takes it twice, to send and to receive."""
RUNTIME = 1 * GIB
"""Estimate: CANN's context and kernels, torch_npu, workspaces."""
GRAPH_BASE, GRAPH_EACH = 256 * MIB, 64 * MIB
"""Estimate: graphs in all, and per captured size."""
STEP = 1024
"""Lengths that are advised are multiples of it."""


@dataclass(frozen=True)
class Options:
    """What of the serve command the memory depends on. `state_bytes` is of one element of the recurrent state."""

    ranks: int
    max_model_len: int
    max_num_seqs: int
    utilization: float
    max_num_batched_tokens: int | None = None
    chunked_prefill: bool = True
    capture_sizes: tuple[int, ...] = ()
    state_bytes: int = 2
    chip: int = CHIP


@dataclass(frozen=True)
class Demand:
    """What one rank of a model asks for, in bytes; per token and per sequence where said."""

    weights: int
    kv_per_token: int
    conv_state: int
    recurrent_elements: int
    hidden: int
    inner: int
    vocabulary: int


@dataclass(frozen=True)
class Part:
    """One piece of the memory in bytes, and whether it is an estimate."""

    name: str
    size: int
    estimate: bool = False


@dataclass(frozen=True)
class Budget:
    """The sum for one chip, in bytes, and what comes of it."""

    options: Options
    parts: tuple[Part, ...]
    """Weights, activations, KV cache (with states), masks, graphs, traffic, runtime; they may exceed the chip."""
    kv_cache: int
    kv_per_token: int
    state_per_sequence: int
    kv_tokens: int
    """Tokens that the KV cache holds beside the states of max_num_seqs sequences."""
    full_sequences: float
    """Sequences of max_model_len that it holds, each with its state."""
    spare: int
    """Bytes of the chip that nothing takes; below zero: an OOM."""
    problems: tuple[str, ...]
    advice: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.problems


def make_budget(demand: Demand, options: Options, vllm_ascend: str) -> Budget:
    """The budget of one rank on a base; with advice when it does not fit. Pure arithmetic."""
    budget = _sum(demand, options, vllm_ascend)
    if budget.fits:
        return budget
    return replace(budget, advice=tuple(_advice(demand, options, vllm_ascend)))


def _sum(demand: Demand, options: Options, vllm_ascend: str) -> Budget:
    usable = int(options.chip * options.utilization)
    activations = _activations(demand, options)
    left = usable - demand.weights - activations
    cache = max(0, int(left * KV_SHARE))
    state = demand.conv_state + demand.recurrent_elements * options.state_bytes
    one_sequence = options.max_model_len * demand.kv_per_token + state
    parts = (
        Part("weights", demand.weights),
        Part("activations", activations, estimate=True),
        Part("KV cache and states", cache),
        Part("attention masks", _masks(options, vllm_ascend)),
        Part("captured graphs", _graphs(options), estimate=True),
        Part("traffic between chips", 2 * HCCL_BUFFER if options.ranks > 1 else 0),
        Part("runtime", RUNTIME, estimate=True),
    )
    spare = options.chip - sum(part.size for part in parts)
    tokens = max(0, cache - options.max_num_seqs * state) // max(1, demand.kv_per_token)
    return Budget(
        options,
        parts,
        kv_cache=cache,
        kv_per_token=demand.kv_per_token,
        state_per_sequence=state,
        kv_tokens=tokens,
        full_sequences=cache / one_sequence if one_sequence else 0.0,
        spare=spare,
        problems=tuple(_problems(options, left, cache, one_sequence, options.max_num_seqs * state, spare)),
    )


def _problems(
    options: Options, left: int, cache: int, one_sequence: int, states: int, spare: int
) -> list[str]:
    problems = []
    if left <= 0:
        problems.append(
            f"weights and activations are {_gib(-left)} more than {options.utilization:.2f} of the chip"
        )
    elif cache < one_sequence:
        problems.append(
            f"the KV cache gets {_gib(cache)}, and one sequence of {options.max_model_len} tokens needs "
            f"{_gib(one_sequence)}: vLLM refuses to start"
        )
    elif cache < states:
        problems.append(
            f"the KV cache gets {_gib(cache)}, and the states of {options.max_num_seqs} sequences alone need "
            f"{_gib(states)}"
        )
    if spare < 0:
        problems.append(
            f"all together is {_gib(-spare)} more than the chip has: out of memory after the start"
        )
    return problems


def _advice(demand: Demand, options: Options, vllm_ascend: str) -> list[str]:
    """Each change that alone is enough."""

    def fits(changed: Options) -> bool:
        return _sum(demand, changed, vllm_ascend).fits

    def largest(values: range, made: Callable[[int], Options]) -> int | None:
        return next((value for value in values if fits(made(value))), None)

    advice = []
    lengths = range(options.max_model_len // STEP * STEP, STEP - 1, -STEP)
    length = largest(lengths, lambda value: replace(options, max_model_len=value))
    if length and length < options.max_model_len:
        advice.append(f"--max-model-len {length}")
    hundredths = range(95, 29, -1)
    share = largest(hundredths, lambda value: replace(options, utilization=value / 100))
    if share:
        advice.append(f"--gpu-memory-utilization {share / 100:.2f}")
    seqs = largest(range(options.max_num_seqs - 1, 0, -1), lambda value: replace(options, max_num_seqs=value))
    if seqs:
        advice.append(f"--max-num-seqs {seqs}")
    return advice


def _activations(demand: Demand, options: Options) -> int:
    """Estimate: a few hidden states and one MLP's gate and up per token in float16, and logits in float32."""
    tokens = options.max_num_batched_tokens or (
        DEFAULT_BATCHED if options.chunked_prefill else max(DEFAULT_BATCHED, options.max_model_len)
    )
    return tokens * 2 * (6 * demand.hidden + 2 * demand.inner) + options.max_num_seqs * demand.vocabulary * 8


def _masks(options: Options, vllm_ascend: str) -> int:
    compressed = version_key(vllm_ascend) >= version_key(COMPRESSED_MASK)
    return MASK_COPIES * mask_bytes(COMPRESSED_LENGTH if compressed else options.max_model_len)


def _graphs(options: Options) -> int:
    return GRAPH_BASE + GRAPH_EACH * len(options.capture_sizes) if options.capture_sizes else 0


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
