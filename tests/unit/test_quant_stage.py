"""Quantizing a directory: atomic, resumable, recorded, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.memory import PEAK

from pipeline.demo.model import Variant, make_model, make_qwen3
from pipeline.errors import DuopackError, UsageError
from pipeline.files import FileRecord, sha256_file
from pipeline.reports.progress import open_progress
from pipeline.stages.quantize.record import RECORD, read_record
from pipeline.stages.quantize.stage import Quantized, quantize
from pipeline.weights.quant import streaming
from pipeline.weights.quant.checks import check_quantized
from pipeline.weights.quant.modules import NotCoveredError
from pipeline.weights.quant.recipe import Recipe
from pipeline.weights.safetensors import read_header

QUIET = open_progress(quiet=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make_model(tmp_path / "source", seed=1)
    return tmp_path / "source"


@pytest.fixture
def many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output files of 400 kB, so that a tiny model has a dozen."""
    monkeypatch.setattr(Recipe, "part_bytes", 400_000)


def run(source: Path, target: Path, **options: object) -> Quantized:
    return quantize(source, target, QUIET, **{"recipe": "w8a8-dynamic"} | options)  # type: ignore[arg-type]


def snapshot(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.relative_to(directory).as_posix(): (path.read_bytes(), path.stat().st_mode)
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_result_is_whole_readable_and_recorded(source: Path, tmp_path: Path) -> None:
    before = snapshot(source)
    made = run(source, tmp_path / "made")
    assert made.new
    assert snapshot(source) == before
    names = {path.name for path in made.directory.iterdir()}
    side = {name for name in before if "safetensors" not in name}
    assert {"chat_template.jinja", "config.json", "tokenizer.json"} < side < names
    assert all((made.directory / name).read_bytes() == before[name][0] for name in side)
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in made.directory.iterdir())
    record = read_record(made.directory)
    assert record == made.record
    assert {one.path for one in record.files} == names - {RECORD}
    for one in record.files:
        path = made.directory / one.path
        assert (path.stat().st_size, sha256_file(path)) == (one.size, one.sha256)
    assert check_quantized(made.directory) == ()
    assert made.size_before == sum(
        len(data) for name, (data, _) in before.items() if name.endswith("safetensors")
    )
    assert made.size < made.size_before


def test_summary_counts_by_group(source: Path, tmp_path: Path) -> None:
    groups = {group.name: group for group in run(source, tmp_path / "made").record.groups}
    assert (groups["MLP"].quantized, groups["MLP"].left_float) == (12, 0)
    assert (groups["attention"].quantized, groups["linear attention"].quantized) == (4, 0)
    assert groups["MTP"].quantized == 7
    assert groups["vision"].error is None
    error = groups["MLP"].error
    assert error is not None
    assert 0.003 < error < 0.006
    assert ".mlp." in (groups["MLP"].worst or "")


def test_a_second_run_reads_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(source, tmp_path / "made")
    monkeypatch.setattr(streaming.Stream, "write", _must_not_be_called)
    again = run(source, tmp_path / "made")
    assert not again.new
    assert again.record == first.record


def _must_not_be_called(*_: object) -> None:
    raise AssertionError("the result is there already")


@pytest.mark.parametrize("what", ["weights", "side file", "lost file", "flag"])
def test_what_has_changed_is_made_again(what: str, source: Path, tmp_path: Path) -> None:
    first = run(source, tmp_path / "made")
    options: dict[str, object] = {}
    if what == "weights":
        make_model(source, seed=2)
    elif what == "side file":
        (source / "generation_config.json").write_text("{}")
    elif what == "lost file":
        (first.directory / "tokenizer.json").unlink()
    else:
        options["allow_nonfinite"] = True
    again = run(source, tmp_path / "made", **options)
    assert again.new
    assert (again.directory / "tokenizer.json").exists()
    assert (again.record == first.record) is (what == "lost file")
    assert not list(tmp_path.glob(".made.old")) + list(tmp_path.glob(".made.partial"))


def test_record_does_not_tell_where_or_when(source: Path, tmp_path: Path) -> None:
    first = run(source, tmp_path / "a").record
    shutil.copytree(source, tmp_path / "elsewhere")
    assert run(tmp_path / "elsewhere", tmp_path / "b").record == first
    assert str(tmp_path).encode() not in (tmp_path / "b" / RECORD).read_bytes()


def test_known_digests_go_into_the_record(source: Path, tmp_path: Path) -> None:
    files = [
        FileRecord(path.name, path.stat().st_size, sha256_file(path))
        for path in source.iterdir()
        if path.name != "generation_config.json"
    ]
    made = run(source, tmp_path / "made", files=files)
    assert made.record.source == tuple(sorted(files))
    assert not (made.directory / "generation_config.json").exists()
    wrong = [FileRecord(one.path, one.size, "0" * 64) if one.path == "config.json" else one for one in files]
    with pytest.raises(DuopackError, match="changed"):
        run(source, tmp_path / "other", files=wrong)
    assert not (tmp_path / "other").exists()


@pytest.mark.usefixtures("many_files")
def test_takes_up_a_run_that_was_interrupted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(source, tmp_path / "whole")
    written = _interrupt_after(3, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "made")
    assert not (tmp_path / "made").exists()
    monkeypatch.undo()
    monkeypatch.setattr(Recipe, "part_bytes", 400_000)
    later = _interrupt_after(1000, monkeypatch)
    made = run(source, tmp_path / "made")
    assert len(written) == 3
    assert not set(written) & set(later)
    assert made.record == whole.record
    assert snapshot(made.directory) == snapshot(whole.directory)


def _interrupt_after(count: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ctrl-C after so many files; the names of those that were written."""
    written: list[str] = []
    original = streaming.Stream.write

    def write(self: streaming.Stream, part: object, directory: Path) -> object:
        if len(written) == count:
            raise KeyboardInterrupt
        result = original(self, part, directory)  # type: ignore[arg-type]
        written.append(part.name)  # type: ignore[attr-defined]
        return result

    monkeypatch.setattr(streaming.Stream, "write", write)
    return written


@pytest.mark.usefixtures("many_files")
def test_does_not_take_up_what_another_source_left(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _interrupt_after(3, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "made")
    monkeypatch.undo()
    monkeypatch.setattr(Recipe, "part_bytes", 400_000)
    make_model(source, seed=2)
    made = run(source, tmp_path / "made")
    assert snapshot(made.directory) == snapshot(run(source, tmp_path / "whole").directory)


KILLED = """
import os, signal, sys
from pathlib import Path
from pipeline.reports.progress import open_progress
from pipeline.stages.quantize.stage import quantize
from pipeline.weights import safetensors_writer as writer
from pipeline.weights.quant.recipe import Recipe

Recipe.part_bytes = 400_000
left, original = int(sys.argv[3]), writer.SafetensorsWriter.advance

def advance(self, count):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    original(self, count)

writer.SafetensorsWriter.advance = advance
quantize(Path(sys.argv[1]), Path(sys.argv[2]), open_progress(quiet=True), recipe="w8a8-dynamic")
"""


def test_killed_anywhere_and_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recipe, "part_bytes", 400_000)
    whole = snapshot(run(source, tmp_path / "whole").directory)
    for moment in (1, 30, 60, 20):
        command = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "made"), str(moment)]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        assert not (tmp_path / "made").exists()
    assert snapshot(run(source, tmp_path / "made").directory) == whole
    assert {path.name for path in tmp_path.glob(".made.*")} == {".made.lock", ".made.stamp"}


@pytest.mark.usefixtures("many_files")
def test_a_full_disk_keeps_whole_files_and_is_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = os.write, 0

    def full(handle: int, data: object) -> int:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(handle, data)  # type: ignore[arg-type]

    monkeypatch.setattr("pipeline.weights.safetensors_writer.os.write", full)
    with pytest.raises(DuopackError, match="No space left"):
        run(source, tmp_path / "made")
    assert not (tmp_path / "made").exists()
    monkeypatch.setattr("pipeline.weights.safetensors_writer.os.write", original)
    assert run(source, tmp_path / "made").new


def test_too_small_a_disk_is_found_first(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.files.shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1 << 20))
    with pytest.raises(DuopackError, match="short"):
        run(source, tmp_path / "made")
    assert not (tmp_path / ".made.partial").exists()


@pytest.mark.usefixtures("many_files")
def test_any_other_failure_leaves_nothing(source: Path, tmp_path: Path) -> None:
    _set_value(source, "lm_head.weight", b"\x80\x7f")
    with pytest.raises(DuopackError, match=r"lm_head\.weight"):
        run(source, tmp_path / "made")
    assert {path.name for path in tmp_path.iterdir()} == {"source", ".made.lock"}


def _set_value(source: Path, name: str, bits: bytes, index: int = 777) -> None:
    """One bf16 value of a tensor."""
    for path in source.glob("*.safetensors"):
        tensor = read_header(path).tensors.get(name)
        if tensor:
            data = bytearray(path.read_bytes())
            data[tensor.begin + 2 * index : tensor.begin + 2 * index + 2] = bits
            path.write_bytes(data)


@pytest.mark.parametrize("bits", [b"\x80\x7f", b"\x80\xff", b"\xc0\x7f", b"\x81\xff"])
@pytest.mark.parametrize(
    "name", ["model.language_model.layers.1.mlp.up_proj.weight", "model.language_model.norm.weight"]
)
def test_infinite_values_and_nan_are_named_unless_allowed(
    name: str, bits: bytes, source: Path, tmp_path: Path
) -> None:
    _set_value(source, name, bits, index=100)
    with pytest.raises(DuopackError, match="infinite or no number") as caught:
        run(source, tmp_path / "made")
    assert name in str(caught.value)
    assert "--allow-nonfinite" in caught.value.mend
    assert run(source, tmp_path / "made", allow_nonfinite=True).new


def test_a_value_beyond_the_config_dtype_is_named(tmp_path: Path) -> None:
    """bf16 weights under a float16 config are cast as torch does; here what becomes infinite is refused."""
    make_qwen3(tmp_path / "source", seed=1)
    _change_json(tmp_path / "source/config.json", lambda config: config.update(dtype="float16"))
    _set_value(tmp_path / "source", "model.norm.weight", b"\x80\x47", index=3)
    with pytest.raises(DuopackError, match=r"model\.norm\.weight.* as F16"):
        run(tmp_path / "source", tmp_path / "made")


def test_rows_of_zeros_are_mentioned(source: Path, tmp_path: Path) -> None:
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    for column in range(128):
        _set_value(source, name, b"\0\0", index=column)
    made = run(source, tmp_path / "made")
    assert made.record.notes == (f"1 rows of 1 weights are all zeros, first in {name}: they stay so",)


def _change_json(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def _cut(source: Path) -> None:
    path = next(source.glob("*00001*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])


def _lie(source: Path) -> None:
    path = next(source.glob("*00001*.safetensors"))
    data = path.read_bytes()
    at = data.index(b'"data_offsets":[0,') + len(b'"data_offsets":[')
    path.write_bytes(data[:at] + b"8" + data[at + 1 :])


def _missing_file(source: Path) -> None:
    next(source.glob("*00002*.safetensors")).unlink()


def _missing_tensor(source: Path) -> None:
    _rename_tensor(source, b"layers.1.mlp.up_proj.weight", b"layers.1.mlp.op_proj.weight")


def _rename_tensor(source: Path, old: bytes, new: bytes) -> None:
    for path in [*source.glob("*.safetensors"), *source.glob("*.index.json")]:
        path.write_bytes(path.read_bytes().replace(old, new))


def _odd_dtype(source: Path) -> None:
    # The same width: only the dtype's name is other.
    for path in source.glob("*.safetensors"):
        old = b'"model.language_model.layers.0.linear_attn.A_log":{"dtype":"F32"'
        path.write_bytes(path.read_bytes().replace(old, old.replace(b"F32", b"I32")))


def _no_architecture(source: Path) -> None:
    _change_json(source / "config.json", lambda config: config.pop("architectures"))


def _quantized_already(source: Path) -> None:
    _change_json(source / "config.json", lambda config: config.update(quantization_config={"bits": 8}))


def _symlink(source: Path) -> None:
    (source / "link").symlink_to("config.json")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_cut, "cut off"),
        (_lie, "offsets"),
        (_missing_file, "00002"),
        (_missing_tensor, r"layers\.1\.mlp\.up_proj"),
        (_odd_dtype, "A_log.*I32"),
        (_no_architecture, "architectures"),
        (_quantized_already, "quantized already"),
        (_symlink, "symbolic link"),
    ],
)
def test_a_bad_source_is_refused_before_anything_is_written(
    spoil: Callable[[Path], None], why: str, source: Path, tmp_path: Path
) -> None:
    spoil(source)
    with pytest.raises(DuopackError, match=why) as caught:
        run(source, tmp_path / "made")
    assert caught.value.mend
    assert {path.name for path in tmp_path.iterdir()} <= {"source", ".made.lock"}


def test_what_the_streaming_engine_does_not_know_is_for_msmodelslim(source: Path, tmp_path: Path) -> None:
    _rename_tensor(source, b"model.visual.pos_embed.weight", b"model.visual.new_embed.weight")
    with pytest.raises(DuopackError, match="pos_embed"):
        run(source, tmp_path / "made")
    make_qwen3(tmp_path / "other")
    _change_json(
        tmp_path / "other/config.json", lambda config: config.update(architectures=["NewForCausalLM"])
    )
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(Path("pipeline/recipes/qwen3-w8a8-dynamic.yaml").read_text())
    with pytest.raises(NotCoveredError, match="NewForCausalLM"):
        run(tmp_path / "other", tmp_path / "made", recipe=str(recipe))


def test_a_linear_with_a_bias_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "all.yaml"
    text = Path("pipeline/recipes/qwen3.5-w8a8-dynamic.yaml").read_text()
    recipe.write_text(text.replace('"*visual*"', '"nothing"'))
    with pytest.raises(DuopackError, match=r"visual.*has a bias.*dynamic-bias"):
        run(source, tmp_path / "made", recipe=str(recipe))


@pytest.mark.parametrize("place", ["source", "source/inside", "."])
def test_places_that_lie_in_each_other(place: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="lie in each other"):
        run(source, tmp_path / place)


def test_a_directory_of_others_is_not_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made/thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="no finished result"):
        run(source, tmp_path / "made")
    assert (tmp_path / "made/thesis.txt").read_text() == "mine"


def test_engine_and_recipe_must_be_known(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no engine 'gpu'"):
        run(source, tmp_path / "made", engine="gpu")
    with pytest.raises(UsageError, match="neither a recipe nor a file"):
        run(source, tmp_path / "made", recipe="w4a4")


def test_a_source_that_changes_meanwhile(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = streaming.Stream.write

    def write(self: streaming.Stream, part: object, directory: Path) -> object:
        time.sleep(0.01)
        next(source.glob("*00001*.safetensors")).touch()
        return original(self, part, directory)  # type: ignore[arg-type]

    monkeypatch.setattr(streaming.Stream, "write", write)
    with pytest.raises(DuopackError, match="changed while it was being read"):
        run(source, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_memory_is_a_few_blocks(tmp_path: Path) -> None:
    """A sparse model whose largest tensor has 256 MiB: the process stays far below it."""
    make_qwen3(tmp_path / "source", variant=Variant(tied=True))
    name, shape = "model.embed_tokens.weight", [1 << 20, 128]
    _grow(tmp_path / "source", name, shape)
    _change_json(tmp_path / "source/config.json", lambda config: config.update(vocab_size=shape[0]))
    script = (
        f"{PEAK}\n"
        "import sys; from pipeline.cli import main; code = main(sys.argv[1:]); "
        "print(peak(), file=sys.stderr); sys.exit(code)"
    )
    command = [
        sys.executable,
        "-c",
        script,
        "quantize",
        str(tmp_path / "source"),
        str(tmp_path / "made"),
        "--quiet",
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stderr.split()[-1]) < 150 << 10


def _grow(source: Path, name: str, shape: list[int]) -> None:
    """Gives a tensor another shape, with a hole for data."""
    size = 2 * shape[0] * shape[1]
    single = source / "grown.safetensors"
    header = json.dumps({name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}).encode()
    with single.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    old = source / index["weight_map"][name]
    tensors, data = read_header(old).tensors, old.read_bytes()
    kept = {key: one for key, one in tensors.items() if key != name}
    entries, body = {}, b""
    for key, one in kept.items():
        entries[key] = {
            "dtype": one.dtype,
            "shape": one.shape,
            "data_offsets": [len(body), len(body) + one.size],
        }
        body += data[one.begin : one.end]
    text = json.dumps(entries).encode()
    old.write_bytes(len(text).to_bytes(8, "little") + text + body)
    index["weight_map"][name] = single.name
    index["metadata"]["total_size"] += size - tensors[name].size
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
