"""Tiny float models to quantize, hard on the arithmetic, and digests of what the real msmodelslim made of each."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.demo.model import Variant, make_model, make_qwen3
from pipeline.weights.safetensors import read_header

GOLDEN = Path(__file__).parents[1] / "unit" / "data" / "msmodelslim.json"
SMALL_UNIT = 150_000
"""Bytes that stand for a GiB in the case whose output is split into many files."""
SEED = 7


@dataclass(frozen=True)
class Case:
    """A model, and how its values are chosen; `split` makes many output files of it."""

    make: Callable[..., None]
    variant: Variant
    hard: bool = True
    split: bool = False


CASES = {
    "qwen3-bf16": Case(make_qwen3, Variant()),
    "qwen3-f16": Case(make_qwen3, Variant("F16")),
    "qwen3-tied-bf16": Case(make_qwen3, Variant(tied=True), hard=False),
    "qwen3.5-bf16": Case(make_model, Variant()),
    "qwen3.5-f16": Case(make_model, Variant("F16")),
    "qwen3.5-tied-bf16": Case(make_model, Variant(tied=True), hard=False),
    "qwen3.5-tied-without-mtp-f16": Case(make_model, Variant("F16", tied=True, mtp=False)),
    "qwen3.5-moe-bf16": Case(make_model, Variant(experts=4)),
    "qwen3.5-moe-f16": Case(make_model, Variant("F16", experts=4)),
    "qwen3.5-split-bf16": Case(make_model, Variant(), hard=False, split=True),
}


def make_source(name: str, directory: Path) -> Path:
    """The case's float model."""
    case = CASES[name]
    case.make(directory, seed=SEED, variant=case.variant)
    # msmodelslim refuses a directory that others may write to.
    directory.chmod(0o755)
    if case.hard:
        harden(directory, case.variant.dtype)
    return directory


def harden(directory: Path, dtype: str) -> None:
    """Other values for every tensor of `dtype`: rows of tiny numbers, of large ones, of zeros, of ties."""
    source = random.Random(SEED)
    for path in sorted(directory.glob("*.safetensors")):
        data = bytearray(path.read_bytes())
        for tensor in read_header(path).tensors.values():
            if tensor.dtype == dtype:
                width = tensor.shape[-1]
                rows = _rows(source, tensor.size // 2 // width, width, dtype)
                data[tensor.begin : tensor.end] = rows.tobytes()
        path.write_bytes(data)


def _rows(source: random.Random, count: int, width: int, dtype: str) -> np.ndarray:
    """Bits of rows of floats. Only whole numbers from the generator: the same on every machine and version."""
    noise = np.frombuffer(source.randbytes(4 * count * width), "<u4").reshape(count, width)
    kinds = np.frombuffer(source.randbytes(count), "u1")[:, None]
    fraction_bits, highest = (7, 132) if dtype == "BF16" else (10, 20)
    lowest = 101 if dtype == "BF16" else 0
    tops = lowest + 8 + kinds.astype("<i4") % (highest - lowest - 8)
    exponents = np.maximum(tops - ((noise >> 16) % 9).astype("<i4"), lowest if dtype == "BF16" else 0)
    bits = (
        (noise & 1) << 15
        | exponents.astype("<u4") << fraction_bits
        | (noise >> 1) & ((1 << fraction_bits) - 1)
    )
    # Halves of the largest value's 127ths lie between two whole numbers: they round to the even one.
    halves = ((noise & 0xFF) % 255).astype("<f4") * np.exp2(tops - highest - 8.0).astype("<f4")
    halves[:, 0] = 254.0 * np.exp2(tops[:, 0] - highest - 8.0).astype("<f4")
    ties = halves.view("<u4") >> 16 if dtype == "BF16" else halves.astype("<f2").view("<u2")
    bits = np.where(kinds % 5 == 1, ties, bits)
    return np.where(kinds % 7 == 0, 0, bits).astype("<u2")


def digests(directory: Path) -> dict[str, str]:
    """sha256 of all that msmodelslim writes itself: weights, index, description."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.glob("quant_model_*"))
    }


def golden() -> dict[str, dict[str, str]]:
    """Digests by case, of a run of msmodelslim 26.1.0; the e2e test makes them anew."""
    cases: dict[str, dict[str, str]] = json.loads(GOLDEN.read_text())["cases"]
    return cases
