"""Sharding to TP ranks, against `cp` of the same files and against vLLM's own saver, in one run.

    python benchmarks/shard.py [--gib 8] [--tp 2] [--work DIR] [--vllm VENV] [--json]

Makes a random Qwen3 checkpoint in bf16 in DIR (default: a temporary directory) and prints seconds, peak memory and
ratios. `duopack` is the command on a plain directory, which hashes the source too; `duopack (locked)` is the stage in
a build, where the lock has the source's digests. Without a VENV of vLLM for CPU (or DUOPACK_VLLM) its part is left
out. cp and duopack sync to the disk; each gets the median of its runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipeline.files import FileRecord, sha256_file
from pipeline.weights.safetensors_writer import Declared, SafetensorsWriter, lay_out

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY = 2048, 6144, 16, 8, 128, 32768
FILE_SIZE = 2 << 30

VLLM_SAVE = """
import sys, time
from vllm import LLM, _custom_ops

# In every process, as each imports this script: oneDNN packs linear weights elsewhere and leaves empty ones
# behind, which vLLM's saver then passes over.
_custom_ops._supports_onednn = False

if __name__ == "__main__":
    source, target, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3])
    llm = LLM(source, tensor_parallel_size=ranks, dtype="float16", max_model_len=256, enforce_eager=True,
              skip_tokenizer_init=True)
    llm.llm_engine.engine_core.save_sharded_state(path=target)
"""

LOCKED = """
import json, sys
from pathlib import Path
from pipeline.files import FileRecord
from pipeline.reports.progress import open_progress
from pipeline.stages.shard import shard

source, target, ranks, files = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), json.load(open(sys.argv[4]))
files = [FileRecord(**one) for one in files]
shard(source, target, open_progress(quiet=True), ranks=ranks, platform="cpu", files=files)
"""


@dataclass(frozen=True)
class Run:
    """Wall-clock seconds, and the peak resident memory of the process and its children, in bytes."""

    name: str
    seconds: float
    peak: int


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--vllm", type=Path, default=os.environ.get("DUOPACK_VLLM"))
    parser.add_argument("--repeat", type=int, default=3, help="runs of cp and of duopack; the median counts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work, prefix="duopack-bench-") as name:
        result = measure(Path(name), options)
    print(json.dumps(result, indent=1) if options.json else as_text(result))
    return 0


def measure(work: Path, options: argparse.Namespace) -> dict[str, object]:
    source = work / "source"
    size = make_checkpoint(source, options.gib)
    locked = work / "locked.json"
    records = [FileRecord(one.name, one.stat().st_size, sha256_file(one)) for one in source.iterdir()]
    locked.write_text(json.dumps([asdict(one) for one in records]))
    runs = [
        repeated(work, options.repeat, lambda target: copy(source, target)),
        repeated(work, options.repeat, lambda target: ours(source, target, options.tp)),
        repeated(work, options.repeat, lambda target: ours_locked(source, target, options.tp, locked)),
    ]
    same = None
    if options.vllm:
        runs.append(theirs(Path(options.vllm), source, work / "vllm", options.tp))
        ours(source, work / "ours", options.tp)
        same = shard_digests(work / "vllm") == shard_digests(work / "ours")
    cp, plain, stage = (run.seconds for run in runs[:3])
    return {
        "bytes": size,
        "tp": options.tp,
        "runs": [asdict(run) for run in runs],
        "times_cp": {"duopack": round(plain / cp, 2), "duopack (locked)": round(stage / cp, 2)},
        "faster_than_vllm": round(runs[3].seconds / plain, 1) if options.vllm else None,
        "same_bytes_as_vllm": same,
    }


def repeated(work: Path, times: int, run: Callable[[Path], Run]) -> Run:
    """The median of several runs, each into a new place that is removed before the next."""
    runs = []
    for _ in range(times):
        runs.append(run(work / "out" / "result"))
        shutil.rmtree(work / "out")
    return sorted(runs, key=lambda one: one.seconds)[times // 2]


def copy(source: Path, target: Path) -> Run:
    target.parent.mkdir()
    return timed("cp", ["sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', str(source), str(target)])


def ours(source: Path, target: Path, ranks: int) -> Run:
    command = [sys.executable, "-m", "pipeline", "shard", str(source), str(target), "--tp", str(ranks)]
    return timed("duopack", [*command, "--platform", "cpu", "--quiet"])


def ours_locked(source: Path, target: Path, ranks: int, locked: Path) -> Run:
    command = [sys.executable, "-c", LOCKED, str(source), str(target), str(ranks), str(locked)]
    return timed("duopack (locked)", command)


def theirs(venv: Path, source: Path, target: Path, ranks: int) -> Run:
    target.mkdir()
    script = target.with_name("save_with_vllm.py")
    script.write_text(VLLM_SAVE)
    bind = "|".join(str(number % (os.cpu_count() or 1)) for number in range(ranks))
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    command = [str(venv / "bin" / "python"), str(script), str(source), str(target), str(ranks)]
    return timed("vLLM", command, environment)


def timed(name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> Run:
    """Runs a command to its end; memory is that of its whole process group, looked at five times a second."""
    started, peak = time.monotonic(), 0
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            env=os.environ | (environment or {}),
            cwd=Path(__file__).parents[1],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        while process.poll() is None:
            peak = max(peak, sum(resident(process.pid)))
            time.sleep(0.05)
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"{name} failed:\n{log.read().decode(errors='replace')[-4000:]}")
    return Run(name, round(time.monotonic() - started, 2), peak)


def resident(session: int) -> Iterator[int]:
    """Bytes of private and shared memory of each process of a session, without mapped files."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if os.getsid(int(status.parent.name)) == session:
                fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
                yield sum(int(fields[key].split()[0]) << 10 for key in ("RssAnon", "RssShmem"))
        except (OSError, KeyError):
            continue


def shard_digests(directory: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in sorted(directory.glob("model-rank-*.safetensors"))}


def make_checkpoint(directory: Path, gib: float) -> int:
    """A Qwen3 of about so many GiB in bf16, in files of 2 GiB with an index."""
    directory.mkdir(parents=True)
    layer = sum(one.size for one in tensors_of_layer(0))
    outside = 2 * VOCABULARY * HIDDEN * 2
    layers = max(1, round((gib * (1 << 30) - outside) / layer))
    tensors = [
        Declared("model.embed_tokens.weight", "BF16", (VOCABULARY, HIDDEN)),
        *(one for number in range(layers) for one in tensors_of_layer(number)),
        Declared("model.norm.weight", "BF16", (HIDDEN,)),
        Declared("lm_head.weight", "BF16", (VOCABULARY, HIDDEN)),
    ]
    # A bf16 is the upper half of a float32.
    noise = np.random.default_rng(1).normal(0, 0.02, 8 << 20).astype("<f4").view("<u2")[1::2].tobytes()
    parts: list[list[Declared]] = [[]]
    for one in tensors:
        if sum(other.size for other in parts[-1]) + one.size > FILE_SIZE:
            parts.append([])
        parts[-1].append(one)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        with SafetensorsWriter(directory / name, lay_out(part, {"format": "pt"})) as writer:
            for one in part:
                for done in range(0, one.size, len(noise)):
                    writer.write(memoryview(noise)[: min(len(noise), one.size - done)])
        weight_map |= {one.name: name for one in part}
    size = sum(one.size for one in tensors)
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config(layers)))
    return size


def tensors_of_layer(number: int) -> list[Declared]:
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "self_attn.q_norm": (HEAD,),
        "self_attn.k_norm": (HEAD,),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    return [Declared(f"model.layers.{number}.{name}.weight", "BF16", shape) for name, shape in shapes.items()]


def config(layers: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    }


def as_text(result: dict[str, object]) -> str:
    runs: list[dict[str, float]] = result["runs"]  # type: ignore[assignment]
    lines = [f"{result['bytes'] / (1 << 30):.2f} GiB bf16 to TP {result['tp']}"]  # type: ignore[operator]
    lines += [
        f"  {run['name']:8} {run['seconds']:8.2f} s  {run['peak'] / (1 << 20):8.0f} MiB" for run in runs
    ]
    lines.append(f"  {result['times_cp']} x cp; {result['faster_than_vllm']} x faster than vLLM")
    lines.append(f"  same bytes as vLLM: {result['same_bytes_as_vllm']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
