"""`duopack-shards.json`, beside the shards: what they were made from, for whom, and what they are.

It has no clock, host or path: the same source and options give the same bytes. A start script reads
`tensor_parallel`; keys lie on lines of their own, so that a shell can.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from pipeline.errors import DuopackError, quoted
from pipeline.files import FileRecord, check_relative_path
from pipeline.weights.check import read_json
from pipeline.weights.place import Place
from pipeline.weights.shards.layers import Platform

RECORD: Final = "duopack-shards.json"
FORMAT: Final = 1
VLLM: Final = {"0.20.2": "0.20.2rc1"}
"""vLLM versions whose tensors the plans describe, each with the vllm-ascend that was run with it."""


@dataclass(frozen=True)
class Options:
    """How vLLM must be started for these shards: any other choice changes the set or the shapes of its tensors."""

    dtype: str = "float16"
    load_format: str = "sharded_state"
    enable_expert_parallel: bool = False
    enable_lora: bool = False
    mm_encoder_tp_mode: str = "weights"
    """`data` would leave the vision tower whole; text models do not mind."""
    vision: bool = False
    """Whether there is a vision tower: a limit of 0 for both images and videos would drop it."""


@dataclass(frozen=True)
class ShardRecord:
    """The content of the record; files are sorted by path, and sizes are in bytes."""

    duopack: str
    architecture: str
    tensor_parallel: int
    platform: Platform
    vllm: str
    vllm_ascend: str | None
    quantization: str
    options: Options
    part_size: int
    source: tuple[FileRecord, ...]
    files: tuple[FileRecord, ...] = ()

    def same_inputs(self, other: ShardRecord) -> bool:
        """Whether both describe the same source, options and tool, and so the same files."""
        return replace(self, files=()) == replace(other, files=())

    def encode(self) -> bytes:
        return (json.dumps({"format": FORMAT} | asdict(self), indent=1, ensure_ascii=False) + "\n").encode()


def read_record(directory: Place) -> ShardRecord | None:
    """The record in a directory, None when there is none.

    Raises DuopackError when it is damaged or of another version.
    """
    path = directory / RECORD
    if not path.is_file():
        return None
    values = read_json(path)
    if values.pop("format", None) != FORMAT:
        raise _damaged(path, f"its format is not {FORMAT}")
    try:
        return _decode(values, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, f"it does not say what it should ({quoted(str(error))})") from None


def _decode(values: dict[str, Any], path: Place) -> ShardRecord:
    record = ShardRecord(
        **values
        | {
            "options": Options(**values["options"]),
            "source": _files(values["source"], path),
            "files": _files(values["files"], path),
        }
    )
    texts = (record.duopack, record.architecture, record.vllm, record.quantization)
    if not all(isinstance(text, str) for text in texts) or record.platform not in {"310p", "cpu"}:
        raise ValueError("a text is missing")
    if type(record.tensor_parallel) is not int or record.tensor_parallel < 1:
        raise ValueError("tensor_parallel is no number")
    return record


def _files(entries: Any, path: Place) -> tuple[FileRecord, ...]:
    records = tuple(FileRecord(**entry) for entry in entries)
    for one in records:
        check_relative_path(one.path, where=str(path))
        if type(one.size) is not int or not isinstance(one.sha256, str):
            raise ValueError(f"the entry of {one.path} is no file")
    return records


def _damaged(path: Place, what: str) -> DuopackError:
    return DuopackError(what, where=str(path), mend="split the model again")
