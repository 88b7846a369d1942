"""What works on a directory of weights."""

from __future__ import annotations

from pathlib import Path

from pipeline.arguments.common import Add


def add_commands(add: Add) -> None:
    quantize = add("quantize", "quantize a directory of float weights for 310P into another directory")
    quantize.add_argument("src", metavar="SRC", type=Path, help="float weights, as from the hub; only read")
    quantize.add_argument("dst", metavar="DST", type=Path, help="where the quantized weights go")
    quantize.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        default="w8a8-dynamic",
        help="w8a8-dynamic (default), w8a8-static, w8a8sc, or a YAML file for msmodelslim",
    )
    quantize.add_argument(
        "--engine",
        choices=("auto", "streaming", "msmodelslim", "w8a8sc"),
        default="auto",
        help="auto (default): streaming where it covers the recipe, else msmodelslim",
    )
    quantize.add_argument(
        "--device",
        choices=("auto", "cpu", "npu"),
        default="auto",
        help="for msmodelslim: npu is the base image with the chips; auto: npu where docker and chips are",
    )
    quantize.add_argument("--tp", metavar="N", type=int, default=2, help="for w8a8sc: the ranks (default: 2)")
    quantize.add_argument(
        "--allow-nonfinite", action="store_true", help="take weights with infinite values or NaN all the same"
    )

    shard = add("shard", "split a directory of weights, one file set per tensor-parallel rank")
    shard.add_argument("src", metavar="SRC", type=Path, help="float or quantized weights; only read")
    shard.add_argument("dst", metavar="DST", type=Path, help="where the ranks' files and the side files go")
    shard.add_argument("--tp", metavar="N", type=int, required=True, help="the number of ranks: 1, 2, 4 or 8")
    shard.add_argument(
        "--platform",
        choices=("310p", "cpu"),
        default="310p",
        help="whose key set: vllm-ascend's on 310P (default), or plain vLLM's",
    )
    shard.add_argument("--vllm", metavar="VERSION", default="0.20.2", help="the server's version (0.20.2)")
