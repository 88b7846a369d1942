"""A directory of shards held against its plan: every difference, and what vLLM would do with it.

vLLM's loader (`sharded_state`) goes by name alone: it narrows a parameter to a shorter tensor, casts a dtype,
and reads only the files of its own rank, all without an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pipeline.errors import DuopackError, quoted
from pipeline.weights.check import DESCRIPTION, SHARD
from pipeline.weights.place import Place
from pipeline.weights.safetensors import Tensor, read_header
from pipeline.weights.shards.config import read_config
from pipeline.weights.shards.layers import Platform
from pipeline.weights.shards.plan import Plan, Target
from pipeline.weights.shards.plans import plan_model
from pipeline.weights.shards.quantization import read_quantization
from pipeline.weights.shards.record import RECORD, ShardRecord, read_record

Severity = Literal["error", "warning", "note"]
AGAIN = "split the model again, or download it again"


@dataclass(frozen=True)
class Finding:
    """A difference: what it is, what vLLM would do with it (empty: nothing of note), and how to mend it.

    Error: it fails or answers wrongly. Warning: it loads, but not what was meant. Note: worth knowing.
    """

    id: str
    severity: Severity
    sentence: str
    effect: str
    mend: str = AGAIN
    where: str = ""

    def __str__(self) -> str:
        effect = f"; vLLM {self.effect}" if self.effect else ""
        return f"{self.where}: {self.sentence}{effect}. To mend: {self.mend} [{self.id}]"


def check_shards(
    directory: Place,
    *,
    tensor_parallel: int | None = None,
    platform: Platform | None = None,
    hash_files: bool = False,
) -> tuple[Finding, ...]:
    """What is wrong with a directory of shards, ours or another's; errors first.

    `tensor_parallel` is what it will be served with; absent, what its record or its files say. `platform` is
    likewise the record's, else 310p. With `hash_files` every file's sha256 is held against the record too. Raises
    DuopackError when there is no config.json or no plan for its architecture.
    """
    files = _shards(directory)
    if not files:
        raise DuopackError(
            "there is no model-rank-*-part-*.safetensors",
            where=str(directory),
            mend="name the directory that holds the files of all ranks",
        )
    record, findings = _record(directory)
    split_for = record.tensor_parallel if record else max(_rank(path) for path in files) + 1
    ranks = tensor_parallel or split_for
    findings += _recorded(directory, record, hash_files)
    if ranks != split_for:
        findings.append(_other_split(directory, split_for, ranks))
        return _ordered(findings)
    config, quantization = read_config(directory), read_quantization(directory)
    plan = plan_model(config, quantization, ranks, platform or (record.platform if record else "310p"))
    for rank in range(ranks):
        findings += _check_rank(plan, rank, [path for path in files if _rank(path) == rank], directory)
    findings += _quantized_without_description(directory, findings)
    findings += [_beyond(path, ranks) for path in files if _rank(path) >= ranks]
    return _ordered(findings)


def _shards(directory: Place) -> list[Place]:
    """The files of all ranks, sorted by name; none when there is no such directory."""
    with suppress(FileNotFoundError, NotADirectoryError):
        found = [path for path in directory.iterdir() if SHARD.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.name)
    return []


def report(findings: tuple[Finding, ...], *, most: int = 5) -> tuple[str, ...]:
    """The findings in lines for people, at most so many of one kind: a wrong split has thousands."""
    lines = []
    for id_ in dict.fromkeys(one.id for one in findings):
        same = [one for one in findings if one.id == id_]
        lines += [f"{one.severity}: {one}" for one in same[:most]]
        if len(same) > most:
            lines.append(f"{same[0].severity}: and {len(same) - most} more [{id_}]")
    return tuple(lines)


def _rank(path: Place) -> int:
    match = SHARD.fullmatch(path.name)
    assert match
    return int(match[1])


def _ordered(findings: list[Finding]) -> tuple[Finding, ...]:
    order = ("error", "warning", "note")
    return tuple(sorted(findings, key=lambda one: order.index(one.severity)))


def _record(directory: Place) -> tuple[ShardRecord | None, list[Finding]]:
    try:
        record = read_record(directory)
    except DuopackError as error:
        return None, [
            Finding("record-damaged", "error", error.what, "does not read it", error.mend, error.where)
        ]
    if record:
        return record, []
    sentence = f"there is no {RECORD}: that the shards are for this TP, version and platform is not known"
    mend = "take it as it is, or split the model with duopack"
    return None, [Finding("record-missing", "note", sentence, "does not look for it", mend, str(directory))]


def _recorded(directory: Place, record: ShardRecord | None, hash_files: bool) -> Iterator[Finding]:
    """Each file against the record."""
    for one in record.files if record else ():
        path = directory / one.path
        if not path.is_file():
            yield Finding("file-missing", "error", "it is in the record, but not there", "", AGAIN, str(path))
        elif path.stat().st_size != one.size:
            sentence = f"it has {path.stat().st_size} bytes, but {one.size} by the record"
            yield Finding("file-size", "error", sentence, "", AGAIN, str(path))
        elif hash_files and (found := _sha256(path)) != one.sha256:
            sentence = f"its sha256 is {found}, but {one.sha256} by the record"
            yield Finding("file-changed", "error", sentence, "loads it all the same", AGAIN, str(path))


def _sha256(path: Place) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _other_split(directory: Place, split_for: int, ranks: int) -> Finding:
    effect = (
        "finds no file for the missing ranks and stops"
        if ranks > split_for
        else "loads the first of them into wider parameters, leaves the rest of these as they are, and answers garbage"
    )
    sentence = f"it is split for TP {split_for}, and would be served with TP {ranks}"
    mend = f"serve it with TP {split_for}, or split the model for {ranks}"
    return Finding("other-tp", "error", sentence, effect, mend, str(directory))


def _beyond(path: Place, ranks: int) -> Finding:
    sentence = f"it is of a rank beyond the last, {ranks - 1}"
    effect = "passes over it; the others may be shares of a wider split"
    return Finding("rank-beyond", "error", sentence, effect, AGAIN, str(path))


def _check_rank(plan: Plan, rank: int, files: list[Place], directory: Place) -> Iterator[Finding]:
    if not files:
        sentence, effect = (
            f"rank {rank} of {plan.ranks} has no file",
            "stops: 'Could not find checkpoint files'",
        )
        yield Finding("rank-missing", "error", sentence, effect, AGAIN, str(directory))
        return
    found: dict[str, tuple[Place, Tensor]] = {}
    for path in files:
        try:
            header = read_header(path)
        except DuopackError as error:
            yield Finding("file-broken", "error", error.what, "stops", error.mend, str(path))
            return
        for name, tensor in header.tensors.items():
            if name in found:
                sentence = f"{quoted(name)} is in {found[name][0].name} too"
                yield Finding(
                    "key-twice", "error", sentence, "stops: KeyError at the second", AGAIN, str(path)
                )
            found[name] = (path, tensor)
    yield from _check_keys(plan, found, directory, rank)


def _check_keys(
    plan: Plan, found: Mapping[str, tuple[Place, Tensor]], directory: Place, rank: int
) -> Iterator[Finding]:
    known = {target.name: target for target in plan.targets}
    for name in known.keys() - found.keys():
        sentence = f"rank {rank} lacks {name}"
        yield Finding(
            "key-missing", "error", sentence, "stops: 'Missing keys … in loaded state'", AGAIN, str(directory)
        )
    for name, (path, tensor) in found.items():
        if target := known.get(name):
            yield from _check_tensor(target, tensor, path)
        else:
            sentence = f"{quoted(name)} is no parameter of {plan.architecture} with this config.json"
            yield Finding("key-extra", "error", sentence, "stops: KeyError", AGAIN, str(path))


def _check_tensor(target: Target, tensor: Tensor, path: Place) -> Iterator[Finding]:
    if tensor.dtype != target.dtype:
        yield _other_dtype(target, tensor, path)
    if tensor.shape == target.shape or (target.flexible and _shorter(tensor.shape, target.shape)):
        return
    sentence = f"{target.name} is {list(tensor.shape)}, the parameter {list(target.shape)}"
    if _shorter(tensor.shape, target.shape):
        effect = "narrows the parameter to it without an error and leaves the rest uninitialised"
    elif not tensor.shape:
        effect = "gives every element this one value without an error"
    elif len(tensor.shape) > len(target.shape):
        effect = "stops: IndexError"
    else:
        effect = "stops: the sizes do not match"
    yield Finding(
        "other-shape", "error", sentence, effect, "split the model for this TP and config.json", str(path)
    )


def _other_dtype(target: Target, tensor: Tensor, path: Place) -> Finding:
    sentence = f"{target.name} is {tensor.dtype}, the parameter {target.dtype}"
    if target.dtype == "I64" and tensor.dtype.startswith(("F", "BF")):
        effect = "casts by value without an error: every scale becomes 0, and the model answers '!!!!'"
        return Finding(
            "other-dtype", "error", sentence, effect, "convert it by bits: split it with duopack", str(path)
        )
    if target.dtype.startswith("I") or not tensor.dtype.startswith(("F", "BF")):
        effect = "casts by value without an error: the weights become others"
        return Finding("other-dtype", "error", sentence, effect, AGAIN, str(path))
    return Finding(
        "other-dtype", "warning", sentence, "casts it without an error, and may lose digits", AGAIN, str(path)
    )


def _shorter(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether vLLM's narrowing takes it: as many dimensions, none longer."""
    return len(shape) == len(full) and all(one <= other for one, other in zip(shape, full, strict=True))


def _quantized_without_description(directory: Place, findings: list[Finding]) -> Iterator[Finding]:
    """int8 weights without a description look like a model full of wrong dtypes: one cause, said once."""
    int8 = any(one.id == "other-dtype" and " is I8, " in one.sentence for one in findings)
    if int8 and not (directory / DESCRIPTION).is_file():
        sentence, effect = (
            f"the weights are int8, but {DESCRIPTION} is missing",
            "stops: vllm-ascend reads it first",
        )
        yield Finding("description-missing", "error", sentence, effect, AGAIN, str(directory))
