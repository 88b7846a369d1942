"""Repairs of quantized weights that need nothing but the weights themselves; each leaves a file old or new."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from pipeline.files import disk_errors, require_space, write_atomically
from pipeline.weights.check import DESCRIPTION, INDEX_SUFFIX, SHARD, read_json
from pipeline.weights.quant.checks import FLOAT_DTYPES, READABLE, REPAIR, check_quantized
from pipeline.weights.quant.rewriting import rewrite, scale_by_bits
from pipeline.weights.safetensors import Tensor, read_header
from pipeline.weights.shards.check import Finding
from pipeline.weights.shards.quantization import FLOAT

MODE: Final = 0o644


def repair(directory: Path, note: Callable[[str], None]) -> tuple[Finding, ...]:
    """Repairs what can be repaired, and gives what is left.

    Raises DuopackError when the directory cannot be written to, or the disk has no room for a file's new form.
    """
    found = {one.id for one in check_quantized(directory) if one.mend == REPAIR}
    # Modes first: what follows must be able to read; the total last: it counts what the others wrote.
    steps: Sequence[tuple[str, Callable[[Path, Callable[[str], None]], None]]] = (
        ("file-mode", _modes),
        ("deq-scale-dtype", _deq_scales),
        ("entry-missing", _entries),
        ("quantization-config", _config),
    )
    for id_, step in steps:
        if id_ in found:
            step(directory, note)
    if found & {"index-total", "deq-scale-dtype"}:
        _index_total(directory, note)
    return check_quantized(directory)


def _modes(directory: Path, note: Callable[[str], None]) -> None:
    changed = [
        path for path in directory.iterdir() if path.is_file() and path.stat().st_mode & READABLE != READABLE
    ]
    for path in changed:
        with disk_errors(path):
            path.chmod(path.stat().st_mode & 0o777 | MODE)
    note(f"made {len(changed)} files readable for all")


def _deq_scales(directory: Path, note: Callable[[str], None]) -> None:
    for path in _weight_files(directory):
        wrong = [name for name, one in read_header(path).tensors.items() if _is_float_scale(name, one)]
        if wrong:
            require_space(directory, path.stat().st_size * 2, purpose=f"writing {path.name} anew")
            rewrite(path, path, dict.fromkeys(wrong, scale_by_bits()))
            note(f"{path.name}: {len(wrong)} deq_scale as int64, by bits")


def _entries(directory: Path, note: Callable[[str], None]) -> None:
    description = read_json(directory / DESCRIPTION)
    missing = [
        name
        for path in _weight_files(directory)
        for name, one in read_header(path).tensors.items()
        if name not in description and name.endswith(".weight") and one.dtype in FLOAT_DTYPES
    ]
    types = description | dict.fromkeys(missing, FLOAT)
    _write_json(directory / DESCRIPTION, types, indent=4)
    note(f"{DESCRIPTION}: {len(missing)} FLOAT entries added")


def _config(directory: Path, note: Callable[[str], None]) -> None:
    config = read_json(directory / "config.json")
    config.pop("quantization_config", None)
    if isinstance(config.get("text_config"), dict):
        config["text_config"].pop("quantization_config", None)
    _write_json(directory / "config.json", config, indent=2)
    note("config.json: quantization_config removed")


def _index_total(directory: Path, note: Callable[[str], None]) -> None:
    total = sum(read_header(path).data_size for path in _weight_files(directory))
    for path in directory.iterdir():
        if path.name.endswith(INDEX_SUFFIX):
            index = read_json(path)
            index["metadata"] = dict(index.get("metadata") or {}) | {"total_size": total}
            _write_json(path, index, indent=2)
            note(f"{path.name}: total_size is {total}")


def _weight_files(directory: Path) -> list[Path]:
    return sorted(
        path
        for path in directory.iterdir()
        if path.name.endswith(".safetensors") and not SHARD.fullmatch(path.name)
    )


def _is_float_scale(name: str, tensor: Tensor) -> bool:
    return name.endswith(".deq_scale") and tensor.dtype == "F32"


def _write_json(path: Path, value: dict[str, Any], *, indent: int) -> None:
    write_atomically(path, json.dumps(value, indent=indent).encode())
