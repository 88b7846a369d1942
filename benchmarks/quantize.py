"""W8A8_DYNAMIC by the streaming engine, against msmodelslim on the same model and against copying its files.

    python benchmarks/quantize.py [--layers 12] [--repeat 3] [--work DIR] [--no-msmodelslim] [--json]

Makes a random Qwen3.5-shaped checkpoint in bf16 in DIR (default: a temporary directory), 2.1 GiB with 12 layers,
quantizes it both ways in one run and prints seconds, peak memory and ratios; then quantizes sparse file sets with the
widths of Qwen3.5-27B and more and more of its 64 layers, to show that memory does not grow with them. cp and duopack
sync to the disk; each gets the median of its runs. msmodelslim runs in the environment that duopack makes, or in the
one that DUOPACK_MSMODELSLIM names.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import Sample, median, run

from pipeline.demo import model as demo
from pipeline.weights.safetensors_writer import Declared, SafetensorsWriter, lay_out

FILE_SIZE = 5 << 30
PROGRAM = [sys.executable, "-m", "pipeline", "quantize"]


@dataclass(frozen=True)
class Shape:
    """The widths of a Qwen3.5, and how many of its layers are made."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    linear_values: int
    vocabulary: int
    layers: int


SMALL = Shape(2048, 6144, 8, 2, 16, 62080, 12)
LARGE = Shape(5120, 17408, 24, 4, 48, 248320, 64)
"""Qwen3.5-27B."""
HEAD_DIM, LINEAR_KEYS, LINEAR_DIM, CONV = 256, 16, 128, 4


def tensors(shape: Shape) -> Iterator[Declared]:
    """Text model and MTP; the vision tower is the demo's tiny one, since it is only copied."""
    yield from (Declared(one.name, one.dtype, one.shape) for one in demo.vision_specs(shape.hidden))
    yield Declared("lm_head.weight", "BF16", (shape.vocabulary, shape.hidden))
    yield Declared("model.language_model.embed_tokens.weight", "BF16", (shape.vocabulary, shape.hidden))
    yield Declared("model.language_model.norm.weight", "BF16", (shape.hidden,))
    for number in range(shape.layers):
        layer = f"model.language_model.layers.{number}"
        yield from attention(layer, shape) if (number + 1) % 4 == 0 else linear_attention(layer, shape)
        yield from mlp_and_norms(layer, shape)
    yield from attention("mtp.layers.0", shape)
    yield from mlp_and_norms("mtp.layers.0", shape)
    yield Declared("mtp.fc.weight", "BF16", (shape.hidden, 2 * shape.hidden))
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield Declared(f"mtp.{name}.weight", "BF16", (shape.hidden,))


def attention(layer: str, shape: Shape) -> Iterator[Declared]:
    rows = {"q": 2 * shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
    for name, heads in rows.items():
        yield Declared(f"{layer}.self_attn.{name}_proj.weight", "BF16", (heads * HEAD_DIM, shape.hidden))
    yield Declared(f"{layer}.self_attn.o_proj.weight", "BF16", (shape.hidden, shape.heads * HEAD_DIM))
    for name in ("q_norm", "k_norm"):
        yield Declared(f"{layer}.self_attn.{name}.weight", "BF16", (HEAD_DIM,))


def linear_attention(layer: str, shape: Shape) -> Iterator[Declared]:
    base, values = f"{layer}.linear_attn", shape.linear_values * LINEAR_DIM
    channels = 2 * LINEAR_KEYS * LINEAR_DIM + values
    yield Declared(f"{base}.in_proj_qkv.weight", "BF16", (channels, shape.hidden))
    yield Declared(f"{base}.in_proj_z.weight", "BF16", (values, shape.hidden))
    for name in ("in_proj_a", "in_proj_b"):
        yield Declared(f"{base}.{name}.weight", "BF16", (shape.linear_values, shape.hidden))
    yield Declared(f"{base}.conv1d.weight", "BF16", (channels, 1, CONV))
    yield Declared(f"{base}.A_log", "F32", (shape.linear_values,))
    yield Declared(f"{base}.dt_bias", "BF16", (shape.linear_values,))
    yield Declared(f"{base}.norm.weight", "F32", (LINEAR_DIM,))
    yield Declared(f"{base}.out_proj.weight", "BF16", (shape.hidden, values))


def mlp_and_norms(layer: str, shape: Shape) -> Iterator[Declared]:
    for name in ("gate_proj", "up_proj"):
        yield Declared(f"{layer}.mlp.{name}.weight", "BF16", (shape.intermediate, shape.hidden))
    yield Declared(f"{layer}.mlp.down_proj.weight", "BF16", (shape.hidden, shape.intermediate))
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Declared(f"{layer}.{name}.weight", "BF16", (shape.hidden,))


def make_checkpoint(directory: Path, shape: Shape, *, sparse: bool) -> int:
    """Files with an index and all side files; bytes of data. A sparse one takes no room, and is all zeros."""
    demo.make_model(directory)
    for path in directory.glob("model.safetensors*"):
        path.unlink()
    config = json.loads((directory / "config.json").read_text())
    config["text_config"] |= {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": shape.vocabulary,
        "linear_num_value_heads": shape.linear_values,
        "linear_num_key_heads": LINEAR_KEYS,
        "layer_types": [
            "linear_attention" if (number + 1) % 4 else "full_attention" for number in range(shape.layers)
        ],
    }
    config["vision_config"]["out_hidden_size"] = shape.hidden
    (directory / "config.json").write_text(json.dumps(config))
    files: list[list[Declared]] = [[]]
    for one in tensors(shape):
        if sum(each.size for each in files[-1]) + one.size > FILE_SIZE:
            files.append([])
        files[-1].append(one)
    weight_map = {}
    for number, content in enumerate(files, 1):
        name = f"model.safetensors-{number:05}-of-{len(files):05}.safetensors"
        write_sparse(directory / name, content) if sparse else write_random(directory / name, content, number)
        weight_map |= {one.name: name for one in content}
    total = sum(one.size for content in files for one in content)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    directory.chmod(0o755)
    return total


def write_random(path: Path, content: Sequence[Declared], seed: int) -> None:
    source = np.random.default_rng(seed)
    layout = lay_out(content)
    with SafetensorsWriter(path, layout) as writer:
        for one in layout.tensors:
            left = one.size
            while left:
                values = source.standard_normal(min(left // 2, 1 << 22), "<f4") * np.float32(0.02)
                bits = (values.view("<u4") >> 16).astype("<u2") if one.dtype == "BF16" else values
                data = bits.tobytes()[:left]
                writer.write(data)
                left -= len(data)


def write_sparse(path: Path, content: Sequence[Declared]) -> None:
    layout = lay_out(content)
    with path.open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.size)


def copy(source: Path, target: Path) -> Sample:
    """cp and a sync of what it wrote."""
    script = 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} +'
    return counted(["sh", "-c", script, str(source), str(target)])


def quantize(source: Path, target: Path, engine: str) -> Sample:
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [*PROGRAM, str(source), str(target), "--engine", engine, "--device", "cpu", "--quiet"]
    return counted(command)


def counted(command: Sequence[str]) -> Sample:
    """A run with the processor seconds that it took: on a machine with other work they tell more than the clock."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    sample = run(command, env=os.environ, cwd=Path(__file__).parents[1])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return replace(sample, steps={"cpu": cpu})


def repeated(work: Path, times: int, contender: Callable[[Path], Sample]) -> Sample:
    """The median of several runs, each into a new place that is removed before the next."""
    samples = []
    for _ in range(times):
        (work / "out").mkdir()
        samples.append(contender(work / "out" / "result"))
        shutil.rmtree(work / "out")
    return Sample(
        median([one.seconds for one in samples]),
        memory=max(one.memory or 0 for one in samples),
        steps={"cpu": median([one.steps["cpu"] for one in samples])},
    )


def measure(work: Path, options: argparse.Namespace) -> dict[str, object]:
    shape = Shape(**asdict(SMALL) | {"layers": options.layers})
    source = work / "source"
    size = make_checkpoint(source, shape, sparse=False)
    runs = {
        "cp": repeated(work, options.repeat, lambda target: copy(source, target)),
        "streaming": repeated(work, options.repeat, lambda target: quantize(source, target, "streaming")),
    }
    same = None
    if not options.no_msmodelslim:
        runs["msmodelslim"] = quantize(source, work / "theirs" / "result", "msmodelslim")
        quantize(source, work / "ours" / "result", "streaming")
        same = weights(work / "theirs" / "result") == weights(work / "ours" / "result")
        shutil.rmtree(work / "theirs")
        shutil.rmtree(work / "ours")
    shutil.rmtree(source)
    ours = runs["streaming"]
    theirs = runs.get("msmodelslim")
    return {
        "bytes": size,
        "runs": {
            name: {"seconds": one.seconds, "cpu": one.steps["cpu"], "peak": one.memory}
            for name, one in runs.items()
        },
        "times_cp": round(ours.seconds / runs["cp"].seconds, 2),
        "faster_than_msmodelslim": round(theirs.seconds / ours.seconds, 1) if theirs else None,
        "memory_of_msmodelslim": round((ours.memory or 0) / theirs.memory, 2)
        if theirs and theirs.memory
        else None,
        "same_bytes_as_msmodelslim": same,
        "27B": list(grow(work, options.large)),
    }


def grow(work: Path, layers: Sequence[int]) -> Iterator[dict[str, object]]:
    """Seconds and memory for more and more layers of a 27B-shaped model."""
    for count in layers:
        source = work / f"large-{count}"
        size = make_checkpoint(source, Shape(**asdict(LARGE) | {"layers": count}), sparse=True)
        sample = quantize(source, work / "large" / "result", "streaming")
        yield {"layers": count, "bytes": size, "seconds": sample.seconds, "peak": sample.memory}
        shutil.rmtree(source)
        shutil.rmtree(work / "large")


def weights(directory: Path) -> dict[str, bytes]:
    """Digests of all that msmodelslim writes itself."""
    import hashlib

    found = {}
    for path in sorted(directory.glob("quant_model_*")):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").digest()
    return found


def as_text(result: dict[str, object]) -> str:
    lines = [f"{int(result['bytes']) / 2**30:.2f} GiB of bf16 weights"]  # type: ignore[call-overload]
    for name, one in result["runs"].items():  # type: ignore[attr-defined]
        lines.append(
            f"{name:12} {one['seconds']:8.2f} s  cpu {one['cpu']:6.2f} s  peak {(one['peak'] or 0) / 2**20:7.0f} MiB"
        )
    lines.append(f"streaming takes {result['times_cp']} × the time of cp")
    if result["faster_than_msmodelslim"]:
        lines.append(
            f"streaming is {result['faster_than_msmodelslim']} × as fast as msmodelslim, with "
            f"{result['memory_of_msmodelslim']} × its memory; same bytes: {result['same_bytes_as_msmodelslim']}"
        )
    return "\n".join([*lines, *(_grown(one) for one in result["27B"])])  # type: ignore[attr-defined]


def _grown(one: dict[str, float]) -> str:
    return (
        f"27B widths, {one['layers']:2} layers, {one['bytes'] / 2**30:5.1f} GiB: {one['seconds']:6.1f} s, "
        f"peak {one['peak'] / 2**20:5.0f} MiB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=SMALL.layers)
    parser.add_argument("--large", type=int, nargs="*", default=[4, 16], help="layers of 27B to try, of 64")
    parser.add_argument(
        "--repeat", type=int, default=3, help="runs of cp and of streaming; the median counts"
    )
    parser.add_argument("--work", type=Path)
    parser.add_argument("--no-msmodelslim", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work, prefix="duopack-bench-") as name:
        result = measure(Path(name), options)
    print(json.dumps(result, indent=1) if options.json else as_text(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
