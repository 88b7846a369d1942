"""How each linear is quantized, from msmodelslim's quant_model_description.json.

The file maps every tensor of the checkpoint to its type, FLOAT too, and has a few other keys whose values are
not all strings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from pipeline.errors import DuopackError, quoted
from pipeline.weights.check import DESCRIPTION, read_json
from pipeline.weights.place import Place

FLOAT, W8A8, DYNAMIC, W8A8S, W8A8SC = "FLOAT", "W8A8", "W8A8_DYNAMIC", "W8A8S", "W8A8SC"
LINEAR_TYPES = (FLOAT, W8A8, DYNAMIC, W8A8S, W8A8SC)
EXPERT_TYPES = (FLOAT, DYNAMIC)
"""What vllm-ascend's classes for 310P know."""


@dataclass(frozen=True)
class Quantization:
    """The type of each tensor by its name in the checkpoint; `types` is None for a float checkpoint."""

    types: dict[str, str] | None
    name: str
    """The whole model's type in msmodelslim's words: `model_quant_type`, or FLOAT."""
    where: str

    def linear(self, members: Iterable[str]) -> str:
        """The type of a linear, or of all linears that vLLM fuses into one; `members` are their modules.

        Raises DuopackError when a member has no entry, members differ, or 310P does not know the type.
        """
        return self._common(members, LINEAR_TYPES, "linear")

    def experts(self, members: Iterable[str]) -> str:
        """The same for the experts of one layer."""
        return self._common(members, EXPERT_TYPES, "MoE")

    def unquantized(self, module: str) -> None:
        """Refuses a module that vllm-ascend does not quantize: embeddings and the output head."""
        if self.types and (found := self.types.get(f"{module}.weight", FLOAT)) != FLOAT:
            self._refuse(
                f"{module} is {quoted(found)}, but embeddings and the output head are not quantized on 310P"
            )

    @property
    def norm_bias(self) -> bool:
        """Whether vllm-ascend gives every RMSNorm a bias: it does when any name has `norm.bias` in it."""
        return any("norm.bias" in name for name in self.types or ())

    def _common(self, members: Iterable[str], known: tuple[str, ...], kind: str) -> str:
        if self.types is None:
            return FLOAT
        found = ""
        for member in members:
            type_ = self.types.get(f"{member}.weight", "")
            if not type_:
                self._refuse(f"it has no entry for {quoted(member)}.weight, which vllm-ascend looks up")
            if type_ not in known:
                self._refuse(
                    f"{quoted(member)} is {quoted(type_)}; for {kind} layers 310P knows only {', '.join(known)}"
                )
            if found and type_ != found:
                self._refuse(
                    f"{quoted(member)} is {type_}, but what it is fused with is {found}: they must be alike"
                )
            found = type_
        return found

    def _refuse(self, what: str) -> NoReturn:
        raise DuopackError(what, where=self.where, mend="quantize the model again with a recipe for 310P")


def read_quantization(directory: Place) -> Quantization:
    """The description beside the weights, or FLOAT when there is none."""
    path = directory / DESCRIPTION
    if not path.is_file():
        return Quantization(None, FLOAT, str(directory))
    values = read_json(path)
    name = values.get("model_quant_type", FLOAT)
    types = {key: value for key, value in values.items() if isinstance(value, str)}
    return Quantization(types, name if isinstance(name, str) else FLOAT, str(path))
