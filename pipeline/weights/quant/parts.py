"""The output of W8A8_DYNAMIC before its bytes: which tensors, in which file, and the two JSON files beside them.

Names, order, the split and the JSON's form are those of msmodelslim 26.1.0's ascendv1_saver.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from pipeline.errors import DuopackError, quoted
from pipeline.weights.quant.modules import Parameter
from pipeline.weights.quant.recipe import Selection
from pipeline.weights.safetensors import DTYPE_BITS
from pipeline.weights.safetensors_writer import Declared

TYPE: Final = "W8A8_DYNAMIC"
FLOAT: Final = "FLOAT"
PREFIX: Final = "quant_model_weights"
INDEX: Final = f"{PREFIX}.safetensors.index.json"
Role = Literal["float", "weight", "scale", "offset"]


@dataclass(frozen=True)
class Written:
    """A tensor of the output, and the parameter that it is made of."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Role
    parameter: Parameter

    @property
    def size(self) -> int:
        """Bytes of data."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    @property
    def type(self) -> str:
        """In msmodelslim's words."""
        return FLOAT if self.role == "float" else TYPE

    @property
    def declared(self) -> Declared:
        return Declared(self.name, self.dtype, self.shape)


@dataclass(frozen=True)
class Part:
    """One output file, its tensors in the order in which they are described."""

    name: str
    tensors: tuple[Written, ...]


def plan_output(parameters: Sequence[Parameter], selections: Sequence[Selection]) -> tuple[Written, ...]:
    """Every tensor of the output, in order.

    Raises DuopackError when nothing would be quantized, or a linear with a bias: 310P cannot load that.
    """
    names = {one.name for one in parameters}
    written = []
    for one in parameters:
        if not one.linear or not any(one.module in selection for selection in selections):
            written.append(Written(one.name, one.working, one.slab.shape, "float", one))
            continue
        if f"{one.module}.bias" in names:
            raise DuopackError(
                f"the recipe takes {quoted(one.module)}, which has a bias: vllm-ascend on 310P then stops with "
                "'Bias dtype should be INT32' (dynamic-bias)",
                mend="exclude it in the recipe: it then stays float",
            )
        written.extend(_quantized(one))
    if all(one.role == "float" for one in written):
        raise DuopackError(
            "the recipe matches no linear of this model: nothing would be quantized",
            mend="correct its include and exclude patterns",
        )
    return tuple(written)


def _quantized(one: Parameter) -> Iterator[Written]:
    rows = (one.slab.shape[0], 1)
    yield Written(f"{one.module}.weight", "I8", one.slab.shape, "weight", one)
    yield Written(f"{one.module}.weight_scale", "F32", rows, "scale", one)
    yield Written(f"{one.module}.weight_offset", "F32", rows, "offset", one)


def split(written: Iterable[Written], limit: int) -> tuple[Part, ...]:
    """Files in order, each below `limit` bytes of data unless its only tensor is larger."""
    files: list[list[Written]] = [[]]
    size = 0
    for one in written:
        if size + one.size >= limit and files[-1]:
            files.append([])
            size = 0
        files[-1].append(one)
        size += one.size
    count = len(files)
    return tuple(
        Part(f"{PREFIX}-{number:05}-of-{count:05}.safetensors", tuple(tensors))
        for number, tensors in enumerate(files, 1)
    )


def index_text(parts: Sequence[Part]) -> str:
    """The index: which tensor is in which file."""
    total = sum(one.size for part in parts for one in part.tensors)
    weight_map = {one.name: part.name for part in parts for one in part.tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)


def description_text(written: Iterable[Written]) -> str:
    """quant_model_description.json: the type of each tensor, and of the whole."""
    types: dict[str, object] = {one.name: one.type for one in written}
    whole = {"version": "1.0.0", "model_quant_type": TYPE, "metadata": {}, "group_size": 0, "optional": {}}
    return json.dumps(types | whole, indent=4)
