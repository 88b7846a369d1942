"""Runs msmodelslim's command line; executed by the Python of its own environment, never imported.

    python run_msmodelslim.py [--float32] quant --model_path …

It mends two things on the way. torchvision's compiled part fits only the torch that it was built with, and without it
its import fails for operators that nobody calls: they are declared. And with --float32 the Qwen3.5 adapter makes its
layers in float32, not in the bfloat16 that is written into it.
"""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

MOST_OPERATORS = 64


def bring_torchvision() -> None:
    """Imports torchvision, declaring each operator that it asks for and does not have."""
    torch: Any = importlib.import_module("torch")
    for _ in range(MOST_OPERATORS):
        try:
            importlib.import_module("torchvision")
            return
        except ImportError:
            # Models without pictures do not need it; the others say so themselves.
            return
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if not missing:
                raise
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
            torch.library.define(f"torchvision::{missing[1]}", "(Tensor x) -> Tensor")


def keep_float32() -> None:
    """Layers that the Qwen3.5 adapter makes get the checkpoint's float32."""
    torch: Any = importlib.import_module("torch")
    module: Any = importlib.import_module("msmodelslim.model.qwen3_5_moe.model_adapter")
    original = module.default_dtype

    def float32(dtype: object) -> object:
        del dtype
        return original(torch.float32)

    module.default_dtype = float32


def main() -> None:
    arguments = sys.argv[1:]
    bring_torchvision()
    if arguments[:1] == ["--float32"]:
        arguments = arguments[1:]
        keep_float32()
    sys.argv = ["msmodelslim", *arguments]
    importlib.import_module("msmodelslim.cli.__main__").main()


if __name__ == "__main__":
    main()
