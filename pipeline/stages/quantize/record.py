"""What is recorded beside quantized weights: from what, by what and how they were made, and every file.

It has no clock, host or path in it: the same inputs give the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from pipeline.errors import DuopackError, quoted
from pipeline.files import FileRecord, check_relative_path
from pipeline.stages.quantize.contract import Group
from pipeline.weights.check import read_json

RECORD: Final = "duopack-quantization.json"
FORMAT: Final = 1


@dataclass(frozen=True)
class QuantizationRecord:
    """The content of the record; files are sorted by path, and sizes are in bytes."""

    duopack: str
    engine: str
    engine_version: str
    recipe: str
    recipe_sha256: str
    allow_nonfinite: bool
    source: tuple[FileRecord, ...]
    groups: tuple[Group, ...] = ()
    notes: tuple[str, ...] = ()
    files: tuple[FileRecord, ...] = ()

    def same_inputs(self, other: QuantizationRecord) -> bool:
        """Whether both are of the same source, recipe and tool, and so of the same result."""
        return self._inputs() == other._inputs()

    def _inputs(self) -> QuantizationRecord:
        return replace(self, groups=(), notes=(), files=())

    def encode(self) -> bytes:
        return (json.dumps({"format": FORMAT} | asdict(self), indent=1, ensure_ascii=False) + "\n").encode()


def read_record(directory: Path) -> QuantizationRecord | None:
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


def _decode(values: dict[str, Any], path: Path) -> QuantizationRecord:
    record = QuantizationRecord(
        **values
        | {
            "source": _files(values["source"], path),
            "groups": tuple(Group(**group) for group in values["groups"]),
            "notes": tuple(values["notes"]),
            "files": _files(values["files"], path),
        }
    )
    texts = (record.duopack, record.engine, record.engine_version, record.recipe, record.recipe_sha256)
    if not all(isinstance(text, str) for text in (*texts, *record.notes)):
        raise ValueError("a text is missing")
    return record


def _files(entries: Any, path: Path) -> tuple[FileRecord, ...]:
    records = tuple(FileRecord(**entry) for entry in entries)
    for one in records:
        check_relative_path(one.path, where=str(path))
        if type(one.size) is not int or not isinstance(one.sha256, str):
            raise ValueError(f"the entry of {one.path} is no file")
    return records


def _damaged(path: Path, what: str) -> DuopackError:
    return DuopackError(what, where=str(path), mend="quantize the model again")
