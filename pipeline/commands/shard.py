"""`duopack shard`: a model's directory split per tensor-parallel rank."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from pipeline.commands.common import showing
from pipeline.files import human_size
from pipeline.reports.output import print_json, print_text
from pipeline.stages.shard import Sharded, shard


def run(options: argparse.Namespace) -> int:
    with showing(options) as progress:
        made = shard(
            options.src,
            options.dst,
            progress,
            ranks=options.tp,
            platform=options.platform,
            vllm=options.vllm,
        )
    if options.json:
        print_json(_as_json(made))
    else:
        print_text(_as_text(made))
    return 0


def _as_json(made: Sharded) -> dict[str, object]:
    return {
        "directory": str(made.directory),
        "new": made.new,
        "seconds": made.seconds,
        "size": made.size,
        "record": asdict(made.record),
    }


def _as_text(made: Sharded) -> str:
    record = made.record
    done = f"made in {made.seconds:.1f} s" if made.new else "was there already, made from the same source"
    quantization = " --quantization ascend" if record.quantization != "FLOAT" else ""
    return (
        f"{made.directory}: {record.architecture}, {record.quantization}, TP {record.tensor_parallel} "
        f"for {record.platform}, {human_size(made.size)} in {len(record.files)} files, {done}.\n"
        f"Serve it with vLLM {record.vllm}: vllm serve {made.directory} --load-format sharded_state "
        f"--tensor-parallel-size {record.tensor_parallel} --dtype {record.options.dtype}{quantization}"
    )
