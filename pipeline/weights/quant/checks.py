"""What must hold for quantized weights to load and answer on 310P, ours or another's.

The facts are those of vllm-ascend v0.20.2rc1: its quantization methods for 310P look a linear up by the name of its
weight in quant_model_description.json, take one type for all linears that are fused, and copy tensors by value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipeline.errors import DuopackError, quoted
from pipeline.weights.check import DESCRIPTION, INDEX_SUFFIX, SHARD, check_weights, read_json
from pipeline.weights.place import Place
from pipeline.weights.safetensors import Tensor, read_header
from pipeline.weights.shards.check import Finding
from pipeline.weights.shards.quantization import (
    DYNAMIC,
    EXPERT_TYPES,
    LINEAR_TYPES,
    W8A8,
    W8A8S,
    W8A8SC,
)

AGAIN: Final = "quantize the model again with a recipe for 310P, or take weights made for it"
REPAIR: Final = "duopack check --weights DIR --repair"
FUSED: Final = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
    ("in_proj_ba", ("in_proj_b", "in_proj_a")),
)
"""Linears that vLLM makes one of, by the last part of their names."""
EXPERT: Final = re.compile(r"(.*\.experts)\.[0-9]+\.[^.]+")
STATIC_COMPANIONS: Final = ("input_scale", "input_offset", "quant_bias", "deq_scale")
COMPANIONS: Final[Mapping[str, tuple[str, ...]]] = {
    DYNAMIC: ("weight_scale", "weight_offset"),
    W8A8: STATIC_COMPANIONS,
    W8A8S: STATIC_COMPANIONS,
    W8A8SC: (*STATIC_COMPANIONS, "index", "info"),
}
"""The tensors beside a quantized weight without which it does not load."""
FLOAT_DTYPES: Final = ("F32", "F16", "BF16")
READABLE: Final = 0o044
"""By group and others: a server may run as another user than the one who quantized."""


@dataclass(frozen=True)
class Weights:
    """A directory of weights as the checks see it."""

    directory: Place
    types: Mapping[str, Any]
    """The description, which has values besides the types too; empty when there is none."""
    tensors: Mapping[str, tuple[Place, Tensor]]
    """Each tensor's file and place; with ranks, those of rank 0."""
    files: tuple[Place, ...]
    """Everything that a server reads, side files too."""
    split: bool
    """Whether there is a file set per rank: then fused linears have names that the description does not."""


def check_quantized(directory: Place) -> tuple[Finding, ...]:
    """What is wrong with a directory of quantized weights; errors first.

    Raises DuopackError when a file is broken or missing, or when the weights are not quantized at all.
    """
    weights = _read(directory)
    findings = [finding for check in CHECKS for finding in check(weights)]
    order = ("error", "warning", "note")
    return tuple(sorted(findings, key=lambda one: order.index(one.severity)))


def _read(directory: Place) -> Weights:
    files = tuple(
        sorted((path for path in directory.iterdir() if path.is_file()), key=lambda path: path.name)
    )
    names = {path.name for path in files}
    ranks = {int(match[1]) for name in names if (match := SHARD.fullmatch(name))}
    headers = {path.name: read_header(path) for path in files if path.name.endswith(".safetensors")}
    tensors = {
        name: (directory / file, tensor)
        for file, header in headers.items()
        if not (match := SHARD.fullmatch(file)) or match[1] == "0"
        for name, tensor in header.tensors.items()
    }
    if DESCRIPTION in names:
        load_format = "sharded_state" if ranks else "auto"
        check_weights(
            directory,
            load_format=load_format,
            tensor_parallel=max(ranks, default=0) + 1,
            allow=("index-total",),
            files=names,
        )
        types = read_json(directory / DESCRIPTION)
    elif any(tensor.dtype == "I8" and name.endswith("weight") for name, (_, tensor) in tensors.items()):
        types = {}
    else:
        raise DuopackError(
            f"these weights are not quantized: there is no {DESCRIPTION}, and no int8 weight",
            where=str(directory),
            mend="name a directory of quantized weights; float weights are judged by 'duopack check KEY'",
        )
    return Weights(directory, types, tensors, files, bool(ranks))


def _description(weights: Weights) -> Iterator[Finding]:
    if not weights.types:
        sentence = f"the weights are int8, but there is no {DESCRIPTION}"
        yield _finding("description-missing", sentence, "takes the model for a float one and stops", weights)


def _types(weights: Weights) -> Iterator[Finding]:
    for module, type_ in _modules(weights):
        expert = EXPERT.fullmatch(module)
        known, kind = (EXPERT_TYPES, "experts") if expert else (LINEAR_TYPES, "linears")
        if type_ not in known:
            sentence = f"{quoted(module)} is {quoted(str(type_))}; for {kind} 310P knows {', '.join(known)}"
            yield _finding("type-unknown", sentence, "stops at start: no method for this type", weights)


def _entries(weights: Weights) -> Iterator[Finding]:
    """Every two-dimensional weight has an entry; of a split model only what is not fused keeps its name."""
    for name, (_, tensor) in weights.tensors.items():
        if weights.split or not weights.types or not name.endswith(".weight") or name in weights.types:
            continue
        if len(tensor.shape) == 2 or tensor.dtype == "I8":
            mend = REPAIR if tensor.dtype in FLOAT_DTYPES else AGAIN
            yield _finding(
                "entry-missing",
                f"the description has no entry for {quoted(name)}",
                "looks it up and stops: KeyError",
                weights,
                mend,
            )


def _tensors(weights: Weights) -> Iterator[Finding]:
    """Every quantized module has its weight and what belongs to it, in the right dtypes."""
    if weights.split:
        return
    for module, type_ in _modules(weights):
        if not isinstance(type_, str) or type_ not in COMPANIONS:
            continue
        for suffix in ("weight", *COMPANIONS[type_]):
            if f"{module}.{suffix}" not in weights.tensors:
                sentence = f"{quoted(module)} is {type_}, but the files have no {suffix} for it"
                yield _finding(
                    "tensor-missing", sentence, "stops or leaves the parameter uninitialised", weights
                )
        weight = weights.tensors.get(f"{module}.weight")
        if weight and weight[1].dtype != "I8":
            sentence = f"{quoted(module)} is {type_}, but its weight is {weight[1].dtype}"
            yield _finding(
                "weight-dtype", sentence, "casts the values to int8: the model answers garbage", weights
            )


def _mixed(weights: Weights) -> Iterator[Finding]:
    """Linears that vLLM makes one of, and the experts of a layer, have one type."""
    groups: dict[str, dict[str, str]] = {}
    for module, type_ in _modules(weights):
        if expert := EXPERT.fullmatch(module):
            groups.setdefault(expert[1], {})[module] = str(type_)
            continue
        parent, _, last = module.rpartition(".")
        for fused, members in FUSED:
            if last in members:
                groups.setdefault(f"{parent}.{fused}", {})[module] = str(type_)
    for fused, types in groups.items():
        if len(set(types.values())) > 1:
            shown = {type_: module for module, type_ in types.items()}
            sentence = f"{quoted(fused)} is mixed: " + ", ".join(
                f"{quoted(module)} is {quoted(type_)}" for type_, module in shown.items()
            )
            yield _finding("mixed-group", sentence, "stops: all that is fused must have one type", weights)


def _deq_scales(weights: Weights) -> Iterator[Finding]:
    for name, (path, tensor) in weights.tensors.items():
        if not name.endswith(".deq_scale") or tensor.dtype == "I64":
            continue
        repairable = tensor.dtype == "F32" and not weights.split
        yield Finding(
            "deq-scale-dtype",
            "error",
            f"{quoted(name)} is {tensor.dtype}, not I64 with the bits of a float32",
            "copies it by value: every scale becomes 0, and the model answers '!!!!'",
            REPAIR if repairable else AGAIN,
            str(path),
        )


def _deq_values(weights: Weights) -> Iterator[Finding]:
    """int64 scales that somebody converted by value: all below 1, so all 0."""
    seen = set()
    for name, (path, tensor) in weights.tensors.items():
        if not name.endswith(".deq_scale") or tensor.dtype != "I64" or not tensor.size or path.name in seen:
            continue
        seen.add(path.name)
        with path.open("rb") as file:
            file.seek(tensor.begin)
            data = file.read(min(tensor.size, 1 << 20))
        if not any(data):
            sentence = f"{quoted(name)} is all zeros: it was converted by value, not by bits"
            effect = "multiplies every output by 0: the model answers '!!!!'"
            yield Finding("deq-scale-zero", "error", sentence, effect, AGAIN, str(path))


def _biases(weights: Weights) -> Iterator[Finding]:
    for module, type_ in _modules(weights):
        if type_ == DYNAMIC and f"{module}.bias" in weights.tensors:
            sentence = f"{quoted(module)} is {DYNAMIC} and has a bias"
            effect = "stops: 'Bias dtype should be INT32'"
            yield _finding(
                "dynamic-bias", sentence, effect, weights, "exclude it in the recipe, so that it stays float"
            )


def _config(weights: Weights) -> Iterator[Finding]:
    config = read_json(weights.directory / "config.json")
    text = config.get("text_config")
    if "quantization_config" not in config and not (isinstance(text, dict) and "quantization_config" in text):
        return
    yield Finding(
        "quantization-config",
        "error",
        "config.json has a quantization_config",
        "follows it instead of the description and stops, or loads the weights as something else",
        REPAIR if weights.types else AGAIN,
        str(weights.directory / "config.json"),
    )


def _index_total(weights: Weights) -> Iterator[Finding]:
    if weights.split:
        return
    total = sum(tensor.size for _, tensor in weights.tensors.values())
    for path in weights.files:
        if not path.name.endswith(INDEX_SUFFIX):
            continue
        metadata = read_json(path).get("metadata")
        said = metadata.get("total_size") if isinstance(metadata, dict) else None
        if said is not None and said != total:
            sentence = f"its total_size is {quoted(str(said))}, but the tensors have {total} bytes"
            effect = "does not look at it; other tools do"
            yield Finding("index-total", "warning", sentence, effect, REPAIR, str(path))


def _modes(weights: Weights) -> Iterator[Finding]:
    for path in weights.files:
        mode = getattr(path.stat(), "st_mode", None)
        if mode is not None and mode & READABLE != READABLE:
            sentence = f"its mode is {mode & 0o7777:04o}: only its owner can read it"
            effect = "stops when it runs as another user: Permission denied"
            yield Finding("file-mode", "warning", sentence, effect, REPAIR, str(path))


CHECKS: Final = (
    _description, _types, _entries, _tensors, _mixed, _deq_scales, _deq_values, _biases, _config, _index_total, _modes,
)  # fmt: skip


def _modules(weights: Weights) -> Iterator[tuple[str, object]]:
    """Each module whose weight has an entry, and its type."""
    for name, type_ in weights.types.items():
        if name.endswith(".weight"):
            yield name.removesuffix(".weight"), type_


def _finding(id_: str, sentence: str, effect: str, weights: Weights, mend: str = AGAIN) -> Finding:
    return Finding(id_, "error", sentence, effect, mend, str(weights.directory / DESCRIPTION))
