"""The plan of a model: by architecture, for a number of ranks, on a platform."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from pipeline.errors import DuopackError, UsageError, quoted
from pipeline.weights.shards import qwen3, qwen3_5
from pipeline.weights.shards.config import Config
from pipeline.weights.shards.layers import Model, Platform
from pipeline.weights.shards.plan import Plan, Target, make_plan
from pipeline.weights.shards.quantization import FLOAT, Quantization


@dataclass(frozen=True)
class Architecture:
    """What a module of this package says of its architecture."""

    targets: Callable[[Model], Iterator[Target]]
    ignored: Callable[[Model], tuple[str, ...]]


ARCHITECTURES: Final[dict[str, Architecture]] = {
    "Qwen3ForCausalLM": Architecture(qwen3.targets, qwen3.ignored),
    "Qwen3MoeForCausalLM": Architecture(qwen3.targets, qwen3.ignored),
    "Qwen3_5ForConditionalGeneration": Architecture(qwen3_5.targets, qwen3_5.ignored),
    "Qwen3_5MoeForConditionalGeneration": Architecture(qwen3_5.targets, qwen3_5.ignored),
}
RANKS: Final = (1, 2, 4, 8)
"""Tensor-parallel sizes that the catalog knows: whole cards of two chips, and one chip."""


def plan_model(config: Config, quantization: Quantization, ranks: int, platform: Platform) -> Plan:
    """Every tensor of every rank, from config.json and the quantizer's description alone.

    Raises UsageError for a TP that is none, and DuopackError for an architecture without a plan, for dimensions
    that the ranks cannot share evenly, and for a quantization that the platform does not know.
    """
    if ranks not in RANKS:
        raise UsageError(
            f"{ranks} is no tensor-parallel size",
            where="--tp",
            mend=f"give {', '.join(map(str, RANKS[:-1]))} or {RANKS[-1]}",
        )
    name = config.architecture
    if name not in ARCHITECTURES:
        raise DuopackError(
            f"there is no plan for the architecture '{quoted(name)}'",
            where=config.where,
            mend=f"serve it unsplit; plans exist for {', '.join(ARCHITECTURES)}",
        )
    config.refuse_if(
        "quantization_config", "the 310P takes weights quantized by msmodelslim, without this key"
    )
    if platform == "cpu" and quantization.name != FLOAT:
        raise DuopackError(
            f"plain vLLM does not load {quoted(quantization.name)} weights of msmodelslim",
            where=quantization.where,
            mend="split for 310p, or take the float model",
        )
    model = Model(config, quantization, ranks, platform)
    architecture = ARCHITECTURES[name]
    return make_plan(name, ranks, architecture.targets(model), architecture.ignored(model))
