"""Whether a directory of weights is whole: what vLLM would trip over at start, found from headers alone."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from pipeline.errors import DuopackError, quoted
from pipeline.weights.place import Place
from pipeline.weights.safetensors import Header, read_header

DESCRIPTION = "quant_model_description.json"
SHARD = re.compile(r"model-rank-(0|[1-9][0-9]*)-part-(0|[1-9][0-9]*)\.safetensors")
INDEX_SUFFIX = ".safetensors.index.json"
MAX_JSON = 100_000_000
"""Bytes; the index of the largest known model has about 20 MB."""


@dataclass(frozen=True)
class WeightSummary:
    """What the checked weights are."""

    files: tuple[str, ...]
    """The weight files' names, sorted."""
    tensors: int
    size: int
    """Bytes of tensor data, of all ranks together."""
    dtypes: frozenset[str]
    quantized: bool
    """Whether weights are int8, as msmodelslim writes them."""
    ranks: int | None
    """The tensor-parallel size that the weights are split for; None when they are not split."""


def check_weights(
    directory: Place,
    *,
    load_format: str,
    tensor_parallel: int,
    allow: Collection[str] = (),
    files: Collection[str] | None = None,
) -> WeightSummary:
    """Checks one directory that a server loads, and says what is in it.

    `load_format` is the profile's: `auto` for a checkpoint with an index or in one file, `sharded_state` for
    files per rank. `files` names the entries of `directory` that count (all of them if absent): what lies
    beside them does not enter an image. `allow` may hold `index-total`.
    Raises DuopackError at the first finding. Reads headers and JSON only.
    """
    names = {path.name for path in directory.iterdir() if path.is_file()} if files is None else set(files)
    if "config.json" not in names:
        _refuse("config.json is missing", directory, "add it to the file patterns, or take another source")
    read_json(directory / "config.json")
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    if not weights:
        _refuse("there is no *.safetensors file", directory, "check the file patterns and the directory")
    headers = {name: read_header(directory / name) for name in weights}
    if load_format == "sharded_state":
        _check_shards(directory, headers, tensor_parallel)
    else:
        _check_checkpoint(directory, names, headers, allow)
    return _summary(directory, names, headers, tensor_parallel if load_format == "sharded_state" else None)


def read_json(path: Place) -> dict[str, Any]:
    """A JSON object from a file of bounded size; DuopackError when it is not one."""
    mend = "delete the file and download it again"
    if path.stat().st_size > MAX_JSON:
        _refuse(f"it has more than {MAX_JSON} bytes", path, mend)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        _refuse(f"it is not valid JSON ({quoted(str(error))})", path, mend)
    if not isinstance(value, dict):
        _refuse("it is not a JSON object", path, mend)
    return value


def _check_checkpoint(
    directory: Place, names: set[str], headers: dict[str, Header], allow: Collection[str]
) -> None:
    split = [name for name in headers if SHARD.fullmatch(name)]
    if split:
        mend = "set load_format: sharded_state in the profile, or choose the unsplit files by pattern"
        _refuse(f"{split[0]} is split per rank, but the profile loads an unsplit model", directory, mend)
    indexes = sorted(name for name in names if name.endswith(INDEX_SUFFIX))
    if len(indexes) > 1:
        _refuse(
            f"there are {len(indexes)} indexes ({', '.join(indexes)})",
            directory,
            "exclude all but one by pattern",
        )
    if indexes:
        _check_index(directory / indexes[0], headers, allow)
    elif len(headers) > 1:
        mend = f"add the *{INDEX_SUFFIX} file to the file patterns, or leave one weight file"
        _refuse(f"there are {len(headers)} weight files and no index", directory, mend)


def _check_index(path: Place, headers: dict[str, Header], allow: Collection[str]) -> None:
    index = read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        _refuse("it has no weight_map of names", path, "delete the file and download it again")
    again = "the index and the weights are of different versions: lock and download the model again"
    missing = sorted(set(weight_map.values()) - set(headers))
    if missing:
        _refuse(f"it names {_some(missing)}, which are not among the model's files", path, again)
    extra = sorted(set(headers) - set(weight_map.values()))
    if extra:
        _refuse(f"it does not name {_some(extra)}, which lie beside it", path, "exclude them by pattern")
    for name, header in headers.items():
        indexed = {tensor for tensor, file in weight_map.items() if file == name}
        absent, unnamed = sorted(indexed - set(header.tensors)), sorted(set(header.tensors) - indexed)
        if absent:
            _refuse(f"it looks for {_some(absent)} in {name}, which does not have them", path, again)
        if unnamed:
            _refuse(f"it does not look for {_some(unnamed)} in {name}, which has them", path, again)
    if "index-total" not in allow:
        _check_total(path, index, sum(header.data_size for header in headers.values()))


def _check_total(path: Place, index: dict[str, Any], actual: int) -> None:
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is not None and total != actual:
        mend = "lock and download the model again; if its source is known to be so, allow: [index-total]"
        _refuse(f"its total_size is {quoted(str(total))}, the tensors have {actual} bytes", path, mend)


def _check_shards(directory: Place, headers: dict[str, Header], ranks: int) -> None:
    parts: dict[int, dict[int, Header]] = {}
    for name, header in headers.items():
        match = SHARD.fullmatch(name)
        if not match:
            _refuse(f"{quoted(name)} is not named as a part of a rank", directory, "exclude it by pattern")
        parts.setdefault(int(match[1]), {})[int(match[2])] = header
    if max(parts) >= ranks:
        mend = "use the profile's own number of ranks: split the model again, or change tensor_parallel"
        _refuse(f"it is split for {max(parts) + 1} ranks, the profile has {ranks}", directory, mend)
    again = "split the model again, or download it again"
    missing = [str(rank) for rank in range(ranks) if rank not in parts]
    if missing:
        _refuse(f"rank {', '.join(missing)} of {ranks} has no weights", directory, again)
    for rank, found in sorted(parts.items()):
        if sorted(found) != list(range(len(found))):
            _refuse(f"rank {rank} has the parts {sorted(found)}: one is missing", directory, again)
    keys = {rank: _keys(rank, found.values(), directory) for rank, found in parts.items()}
    for rank in range(1, ranks):
        if keys[rank] != keys[0]:
            other = sorted(keys[rank] ^ keys[0])
            _refuse(f"rank {rank} and rank 0 do not have the same tensors: {_some(other)}", directory, again)


def _keys(rank: int, parts: Iterable[Header], directory: Place) -> set[str]:
    keys: set[str] = set()
    for header in parts:
        twice = sorted(keys & set(header.tensors))
        if twice:
            _refuse(f"two parts of rank {rank} have {_some(twice)}", directory, "split the model again")
        keys |= set(header.tensors)
    return keys


def _summary(
    directory: Place, names: set[str], headers: dict[str, Header], ranks: int | None
) -> WeightSummary:
    tensors = [(name, tensor) for header in headers.values() for name, tensor in header.tensors.items()]
    quantized = any(tensor.dtype == "I8" and name.endswith("weight") for name, tensor in tensors)
    if quantized and DESCRIPTION not in names:
        mend = "add it to the file patterns: vllm-ascend reads from it how each layer is quantized"
        _refuse(f"the weights are quantized, but {DESCRIPTION} is missing", directory, mend)
    if quantized:
        read_json(directory / DESCRIPTION)
    return WeightSummary(
        files=tuple(sorted(headers)),
        tensors=len(tensors),
        size=sum(tensor.size for _, tensor in tensors),
        dtypes=frozenset(tensor.dtype for _, tensor in tensors),
        quantized=quantized,
        ranks=ranks,
    )


def _some(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(quoted(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _refuse(what: str, where: Place, mend: str) -> NoReturn:
    raise DuopackError(what, where=str(where), mend=mend)
