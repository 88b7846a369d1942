"""The published dimensions of models, for a budget where neither files nor a hub can be reached.

data/known-models.json has of each config.json what a plan needs. The dimensions are Qwen's; a test holds the bytes
that follow from them against the sizes of the published checkpoints, to the byte.
"""

from __future__ import annotations

import json
import re
from importlib import resources

from pipeline.weights.shards.config import Config
from pipeline.weights.shards.plans import plan_model
from pipeline.weights.shards.quantization import DYNAMIC, FLOAT, W8A8, W8A8SC, Quantization

_LINEAR = re.compile(r"(.+)\.weight")
_INCLUDED = re.compile(r"\.(self_attn|mlp)\.[\w.]*_proj$")
_MOE_FLOAT = re.compile(r"\.(self_attn\.o_proj|shared_expert\..*)$")
_KINDS = {"float": FLOAT, "w8a8": W8A8, "w8a8-dynamic": DYNAMIC, "w8a8sc": W8A8SC}


def known_config(name: str) -> Config | None:
    """The dimensions of the model whose name this is, or begins with: Qwen3.5-9B-W8A8 has those of Qwen3.5-9B."""
    data = json.loads(
        resources.files("pipeline.weights").joinpath("data", "known-models.json").read_text("utf-8")
    )
    wanted = name.casefold()
    fitting = [one for one in data if wanted == one.casefold() or wanted.startswith(f"{one.casefold()}-")]
    found = max(fitting, key=len, default=None)
    return Config(data[found], f"the published dimensions of {found}") if found else None


def usual_quantization(config: Config, kind: str) -> Quantization:
    """What the recipes for 310P quantize of a model, as its description would say; `kind` is the catalog's word.

    Attention and MLP of the language model; not linear attention, embeddings, head and vision; of a mixture of
    experts neither the shared expert, the router nor o_proj.
    """
    if kind == "float":
        return Quantization(None, FLOAT, config.where)
    moe = "Moe" in config.architecture
    chosen = DYNAMIC if moe else _KINDS[kind]
    types: dict[str, str] = {}
    for name in _sources(config):
        found = _LINEAR.fullmatch(name)
        quantized = found and _INCLUDED.search(found[1]) and "visual" not in name
        types[name] = (
            chosen if quantized and not (moe and _MOE_FLOAT.search(name.removesuffix(".weight"))) else FLOAT
        )
    return Quantization(types, chosen, config.where)


def _sources(config: Config) -> set[str]:
    """Every name of a checkpoint of which the experts are one by one, as a quantizer leaves them."""
    plan = plan_model(config, Quantization(None, FLOAT, config.where), 1, "310p")
    return {piece.source for target in plan.targets for way in target.ways for piece in way}
