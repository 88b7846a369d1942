"""The directory that comes out: whole or not there, the same every time, and known by its record."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.memory import PEAK
from support.tiny_checkpoints import qwen3, qwen3_5, write_tensors

import pipeline.stages.shard as stage
import pipeline.weights.shards.writer as writer
from pipeline.commands import shard as command
from pipeline.errors import DuopackError
from pipeline.files import FileRecord, sha256_file
from pipeline.reports.progress import open_progress
from pipeline.stages.shard import Sharded, shard, shard_directory
from pipeline.weights.shards.check import check_shards
from pipeline.weights.shards.record import RECORD, read_record

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = qwen3().write(tmp_path / "source")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def split(source: Path, destination: Path, **options) -> Sharded:
    return shard(source, destination, open_progress(quiet=True), **{"ranks": 2} | options)


def content(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): sha256_file(path)
        for path in directory.rglob("*")
        if path.is_file()
    }


def visible(directory: Path) -> list[str]:
    """What lies beside a destination, without the lock, which stays."""
    return sorted(path.name for path in directory.iterdir() if not path.name.endswith(".lock"))


def test_the_result_holds_the_ranks_the_side_files_and_the_record(source, tmp_path):
    made = split(source, tmp_path / "out" / "tp2")
    assert visible(made.directory) == [
        "chat_template.jinja",
        "config.json",
        RECORD,
        "model-rank-0-part-0.safetensors",
        "model-rank-1-part-0.safetensors",
        "tokenizer_config.json",
    ]
    assert made.new
    assert check_shards(made.directory, hash_files=True) == ()
    assert visible(tmp_path / "out") == ["tp2"]


def test_the_record_says_what_it_is_and_what_it_was_made_from(source, tmp_path):
    made = split(source, tmp_path / "tp2", ranks=4, part_size=20_000)
    record = read_record(made.directory)
    assert record == made.record
    assert (record.tensor_parallel, record.platform, record.quantization) == (4, "310p", "FLOAT")
    assert (record.vllm, record.vllm_ascend) == ("0.20.2", "0.20.2rc1")
    assert record.architecture == "Qwen3ForCausalLM"
    assert {one.path: one.sha256 for one in record.source} == content(source)
    found = content(made.directory)
    del found[RECORD]
    assert {one.path: one.sha256 for one in record.files} == found
    assert all(one.size == (made.directory / one.path).stat().st_size for one in record.files)
    assert len([one for one in record.files if one.path.startswith("model-rank-3-part-")]) > 1


def test_a_shell_finds_the_tp_on_a_line_of_its_own(source, tmp_path):
    lines = (split(source, tmp_path / "tp2").directory / RECORD).read_text().splitlines()
    assert ' "tensor_parallel": 2,' in lines


def test_plain_vllm_has_no_vllm_ascend(source, tmp_path):
    assert split(source, tmp_path / "tp2", platform="cpu").record.vllm_ascend is None


def test_two_runs_anywhere_give_the_same_bytes_without_a_trace_of_place_or_time(source, tmp_path):
    first = split(source, tmp_path / "here")
    copy = tmp_path / "elsewhere" / "copy"
    copy.mkdir(parents=True)
    for path in source.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
        os.utime(copy / path.name, (1, 1))
    second = split(copy, tmp_path / "there")
    assert content(first.directory) == content(second.directory)
    text = (first.directory / RECORD).read_text()
    assert str(tmp_path) not in text
    assert os.uname().nodename not in text


def test_a_finished_result_stays_as_it_is(source, tmp_path):
    made = split(source, tmp_path / "tp2")
    before = [(path.name, path.stat().st_mtime_ns, path.stat().st_ino) for path in made.directory.iterdir()]
    again = split(source, tmp_path / "tp2")
    assert not again.new
    assert again.record == made.record
    assert [
        (path.name, path.stat().st_mtime_ns, path.stat().st_ino) for path in made.directory.iterdir()
    ] == before


def test_known_digests_are_believed_and_not_computed_again(source, tmp_path, monkeypatch):
    files = [
        FileRecord(name, (source / name).stat().st_size, digest) for name, digest in content(source).items()
    ]
    computed = split(source, tmp_path / "a")
    monkeypatch.setattr(stage.Digests, "_one", lambda *_: pytest.fail("hashed"))
    assert split(source, tmp_path / "b", files=files).record == computed.record
    assert not split(source, tmp_path / "b", files=files).new


def test_a_side_file_that_is_not_what_the_lock_says_is_refused(source, tmp_path):
    files = [
        FileRecord(name, (source / name).stat().st_size, digest) for name, digest in content(source).items()
    ]
    (source / "chat_template.jinja").write_text("{{ message  }}")
    with pytest.raises(DuopackError, match=r"'chat_template\.jinja' changed"):
        split(source, tmp_path / "out" / "tp2", files=files)
    assert visible(tmp_path / "out") == []


def test_files_beyond_the_lock_s_do_not_count(source, tmp_path):
    files = [
        FileRecord(name, (source / name).stat().st_size, digest) for name, digest in content(source).items()
    ]
    write_tensors(source / "more.safetensors", {"x": ("F16", np.zeros(1, "<f2"))})
    (source / "notes.txt").write_text("mine")
    made = split(source, tmp_path / "tp2", files=files)
    assert not (made.directory / "notes.txt").exists()


@pytest.mark.parametrize("change", ["tp", "platform", "source", "part"])
def test_another_source_or_option_replaces_the_result_as_a_whole(source, tmp_path, change):
    split(source, tmp_path / "out" / "tp")
    if change == "source":
        (source / "chat_template.jinja").write_text("{{ other }}")
    options = {
        "tp": {"ranks": 4},
        "platform": {"platform": "cpu"},
        "part": {"part_size": 20_000},
        "source": {},
    }
    made = split(source, tmp_path / "out" / "tp", **options[change])
    assert made.new
    assert check_shards(made.directory, hash_files=True) == ()
    assert {one.path for one in made.record.files} | {RECORD} == set(content(made.directory))
    assert visible(tmp_path / "out") == ["tp"]


@pytest.mark.parametrize("damage", ["shorter", "gone", "record"])
def test_a_damaged_result_is_made_again(source, tmp_path, damage):
    made = split(source, tmp_path / "tp2")
    path = made.directory / "model-rank-1-part-0.safetensors"
    if damage == "shorter":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "gone":
        path.unlink()
    else:
        for one in made.directory.iterdir():
            if one.name != RECORD:
                one.unlink()
        (made.directory / RECORD).write_text("{")
    again = split(source, tmp_path / "tp2")
    assert again.new
    assert check_shards(again.directory, hash_files=True) == ()


def test_no_debris_no_other_weights_and_no_index_come_along(source, tmp_path):
    tensors = qwen3().tensors
    names = sorted(tensors)
    (source / "model.safetensors").unlink()
    parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for name, part in parts.items():
        write_tensors(source / name, {tensor: tensors[tensor] for tensor in part})
    index = {"metadata": {}, "weight_map": {tensor: name for name, part in parts.items() for tensor in part}}
    size = sum(values.nbytes for _, values in tensors.values())
    (source / "model.safetensors.index.json").write_text(
        json.dumps(index | {"metadata": {"total_size": size}})
    )
    for name in (".gitattributes", ".msc", "pytorch_model.bin", "model.gguf", ".DS_Store"):
        (source / name).write_text("x")
    (source / ".cache").mkdir()
    (source / ".cache" / "x").write_text("x")
    (source / "assets").mkdir()
    (source / "assets" / "tool.json").write_text("{}")
    made = split(source, tmp_path / "tp2")
    side = {one.path for one in made.record.files if not one.path.startswith("model-rank-")}
    assert side == {"assets/tool.json", "chat_template.jinja", "config.json", "tokenizer_config.json"}


def test_side_files_that_only_their_owner_may_read_become_readable(source, tmp_path):
    (source / "config.json").chmod(0o600)
    made = split(source, tmp_path / "tp2")
    assert {path.stat().st_mode & 0o777 for path in made.directory.iterdir()} == {0o644}


def test_the_heads_for_speculative_decoding_are_left_out(tmp_path):
    made = split(qwen3_5().write(tmp_path / "source"), tmp_path / "tp2")
    assert made.record.options.vision
    assert b"mtp." not in (made.directory / "model-rank-0-part-0.safetensors").read_bytes()


def test_a_source_that_changes_meanwhile_is_refused_and_leaves_the_old_result(source, tmp_path, monkeypatch):
    old = content(split(source, tmp_path / "out" / "tp").directory)
    real = writer._SharingOut.target

    def touching(self, one):
        os.utime(source / "model.safetensors", ns=(2, time.time_ns()))
        real(self, one)

    monkeypatch.setattr(writer._SharingOut, "target", touching)
    with pytest.raises(DuopackError, match=r"'model\.safetensors' changed while it was being read"):
        split(source, tmp_path / "out" / "tp", ranks=4)
    assert content(tmp_path / "out" / "tp") == old
    assert visible(tmp_path / "out") == ["tp"]


def test_a_disk_that_runs_full_leaves_the_old_result(source, tmp_path):
    old = content(split(source, tmp_path / "out" / "tp").directory)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with pytest.raises(DuopackError, match="cannot write"):
            split(source, tmp_path / "out" / "tp", ranks=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert content(tmp_path / "out" / "tp") == old
    assert visible(tmp_path / "out") == ["tp"]


def test_too_little_space_is_found_before_anything_is_written(source, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "SLACK", 1 << 62)
    with pytest.raises(DuopackError, match="short"):
        split(source, tmp_path / "out" / "tp")
    assert visible(tmp_path / "out") == []


KILLED = """
import os, signal, sys
from pathlib import Path
import pipeline.stages.made_directory as made_directory
import pipeline.stages.shard as stage
import pipeline.weights.shards.writer as writer
from pipeline.reports.progress import open_progress

source, destination, moment = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def after(function, number):
    count = 0
    def run(*arguments, **keywords):
        nonlocal count
        count += 1
        if count > number:
            die()
        return function(*arguments, **keywords)
    return run

moments = {
    0: lambda: setattr(writer._SharingOut, "target", after(writer._SharingOut.target, 3)),
    1: lambda: setattr(writer, "lay_out", after(writer.lay_out, 1)),
    2: lambda: setattr(stage, "copy_side_file", after(stage.copy_side_file, 1)),
    3: lambda: setattr(stage, "write_atomically", die),
    4: lambda: setattr(Path, "rename", after(Path.rename, 0)),
    5: lambda: setattr(Path, "rename", after(Path.rename, 1)),
    6: lambda: setattr(made_directory, "sync_directory", die),
}
moments[moment]()
stage.shard(source, destination, open_progress(quiet=True), ranks=4, part_size=20_000)
"""


@pytest.mark.parametrize("moment", range(7))
def test_killed_at_any_point_there_is_the_old_result_or_none_and_the_next_run_finishes(
    source, tmp_path, moment
):
    out = tmp_path / "out" / "tp"
    old = content(split(source, out).directory)
    arguments = [sys.executable, "-c", KILLED, str(source), str(out), str(moment)]
    killed = subprocess.run(arguments, cwd=ROOT, capture_output=True, check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    if out.exists() and content(out) != old:
        # Only after both renames: the new result, whole.
        assert moment == 6
        assert check_shards(out, hash_files=True) == ()
    made = split(source, out, ranks=4, part_size=20_000)
    assert check_shards(made.directory, hash_files=True) == ()
    assert made.record.tensor_parallel == 4
    assert visible(tmp_path / "out") == ["tp"]


def test_an_interrupt_leaves_nothing(source, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "copy_side_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        split(source, tmp_path / "out" / "tp")
    assert visible(tmp_path / "out") == []


def test_memory_does_not_grow_with_the_model(tmp_path):
    """88 MiB of weights: what is allocated stays within a few blocks per rank."""
    checkpoint = qwen3(hidden_size=512, vocab_size=32768, intermediate_size=8192, num_hidden_layers=1)
    source = checkpoint.write(tmp_path / "source")
    script = (
        f"{PEAK}\n"
        "import sys; from pathlib import Path; from pipeline.stages.shard import shard;"
        "from pipeline.reports.progress import open_progress;"
        "import pipeline.weights.shards.writer;"
        "base = peak();"
        "shard(Path(sys.argv[1]), Path(sys.argv[2]), open_progress(quiet=True), ranks=2);"
        "print(peak() - base)"
    )
    command_line = [sys.executable, "-c", script, str(source), str(tmp_path / "out")]
    done = subprocess.run(command_line, cwd=ROOT, capture_output=True, check=True, timeout=60)
    assert (source / "model.safetensors").stat().st_size > 85 << 20
    assert int(done.stdout) < 60 << 10


def test_the_directory_follows_the_convention():
    assert str(shard_directory("Qwen3-8B", 2)) == "Qwen3-8B/TP2/Qwen3-8B-tp2"


class Options:
    quiet, json, tp, platform, vllm = True, False, 2, "310p", "0.20.2"

    def __init__(self, src: Path, dst: Path, **changes: object) -> None:
        self.src, self.dst = src, dst
        self.__dict__ |= changes


def test_the_command_tells_people_how_to_serve_the_result(source, tmp_path, capsys):
    assert command.run(Options(source, tmp_path / "tp2")) == 0
    text = capsys.readouterr().out
    assert "--load-format sharded_state --tensor-parallel-size 2 --dtype float16" in text
    assert "--quantization" not in text


def test_the_command_gives_machines_the_record(source, tmp_path, capsys):
    assert command.run(Options(source, tmp_path / "tp2", json=True, tp=4)) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["record"]["tensor_parallel"] == 4
    assert value["new"] is True
    shards = [one for one in value["record"]["files"] if one["path"] == "model-rank-3-part-0.safetensors"]
    path = tmp_path / "tp2" / "model-rank-3-part-0.safetensors"
    assert shards[0]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
