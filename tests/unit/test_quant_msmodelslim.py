"""The msmodelslim engine around a program that stands in for it: what it is given, and how its ends are told."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeline.demo.model import Variant, make_model, make_qwen3
from pipeline.errors import DuopackError, UsageError
from pipeline.reports.progress import open_progress
from pipeline.stages.quantize.environment import VARIABLE, find_environment
from pipeline.stages.quantize.msmodelslim import MsmodelslimEngine
from pipeline.stages.quantize.runner import CpuRunner, failed
from pipeline.stages.quantize.stage import Quantized, quantize
from pipeline.weights.safetensors import read_header

QUIET = open_progress(quiet=True)
STAND_IN = """
import json, os, shutil, sys
from pathlib import Path
from pipeline.reports.progress import open_progress
from pipeline.stages.quantize.stage import quantize

if "-c" in sys.argv:
    print(os.environ.get("FAKE_VERSION", "26.1.0"))
    sys.exit()
at = sys.argv.index("quant")
options = dict(zip(sys.argv[at + 1 :: 2], sys.argv[at + 2 :: 2]))
model, out = Path(options["--model_path"]), Path(options["--save_path"])
seen = {"arguments": sys.argv[1:], "mode": oct(model.stat().st_mode & 0o777),
        "config": json.loads((model / "config.json").read_text()), "names": sorted(os.listdir(model)),
        "index": json.loads((model / "model.safetensors.index.json").read_text())}
Path(os.environ["FAKE_SEEN"]).write_text(json.dumps(seen))
end = os.environ.get("FAKE_END")
print('INFO - Run processor AscendV1Saver for "model.layers.0"', flush=True)
if end == "fail":
    print("Traceback\\nRuntimeError: the first\\nOther words\\nmsmodelslim.utils.UnexpectedError: Code: 500")
    sys.exit(1)
if end == "killed":
    os.kill(os.getpid(), 9)
files = Path(os.environ["FAKE_SEEN"]).parent / "plain"
shutil.copytree(model, files, dirs_exist_ok=True)
quantize(files, files.parent / "result", open_progress(quiet=True), recipe=options["--config_path"])
shutil.copytree(files.parent / "result", out)
for path in out.iterdir():
    path.chmod(0o600)
if end == "incomplete":
    next(out.glob("*.safetensors")).unlink()
"""


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    return tmp_path / "seen.json"


@pytest.fixture
def environ(tmp_path: Path, seen: Path) -> dict[str, str]:
    """An environment whose Python runs the stand-in."""
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN)
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    python.chmod(0o755)
    root = str(Path(__file__).parents[2])
    return {
        VARIABLE: str(tmp_path / "venv"),
        "PYTHONPATH": root,
        "FAKE_SEEN": str(seen),
        "PATH": "/usr/bin:/bin",
    }


def run(environ: Mapping[str, str], source: Path, target: Path, **options: object) -> Quantized:
    engine = MsmodelslimEngine(CpuRunner(target.parent / "cache", environ))
    chosen = {"recipe": "w8a8-dynamic", "engine": "msmodelslim", "engines": {engine.name: engine}} | options
    return quantize(source, target, QUIET, **chosen)  # type: ignore[arg-type]


def test_what_it_is_given_and_what_comes_of_it(environ: dict[str, str], seen: Path, tmp_path: Path) -> None:
    make_qwen3(tmp_path / "source", seed=1)
    (tmp_path / "source").chmod(0o777)
    made = run(environ, tmp_path / "source", tmp_path / "made")
    told = json.loads(seen.read_text())
    assert told["mode"] == "0o755"
    assert told["arguments"][0] == "-IB"
    assert told["arguments"][told["arguments"].index("--trust_remote_code") + 1] == "False"
    assert told["arguments"][told["arguments"].index("--model_type") + 1] == "Qwen3-8B"
    assert "--float32" not in told["arguments"]
    ours = quantize(tmp_path / "source", tmp_path / "ours", QUIET, recipe="w8a8-dynamic")
    for path in ours.directory.glob("quant_model_*"):
        assert (made.directory / path.name).read_bytes() == path.read_bytes()
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in made.directory.iterdir())
    assert (made.directory / "chat_template.jinja").exists()
    assert not [path for path in made.directory.iterdir() if path.name.startswith(".")]
    assert (made.record.engine, made.record.engine_version) == ("msmodelslim", "26.1.0")
    assert (tmp_path / "source").stat().st_mode & 0o777 == 0o777


def test_a_single_file_gets_an_index(environ: dict[str, str], seen: Path, tmp_path: Path) -> None:
    make_qwen3(tmp_path / "source", seed=1)
    one = tmp_path / "source/model.safetensors"
    _join(tmp_path / "source", one)
    run(environ, tmp_path / "source", tmp_path / "made")
    assert set(json.loads(seen.read_text())["index"]["weight_map"].values()) == {one.name}


def _join(source: Path, target: Path) -> None:
    entries: dict[str, object] = {}
    body = b""
    for path in sorted(source.glob("model.safetensors-*")):
        data = path.read_bytes()
        for name, tensor in read_header(path).tensors.items():
            offsets = [len(body), len(body) + tensor.size]
            entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
            body += data[tensor.begin : tensor.end]
        path.unlink()
    (source / "model.safetensors.index.json").unlink()
    text = json.dumps(entries).encode()
    target.write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_a_tie_that_it_would_not_see(environ: dict[str, str], seen: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "source", seed=1, variant=Variant(tied=True))
    config = json.loads((tmp_path / "source/config.json").read_text())
    del config["tie_word_embeddings"]
    assert config["text_config"]["tie_word_embeddings"]
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    made = run(environ, tmp_path / "source", tmp_path / "made")
    assert json.loads(seen.read_text())["config"]["tie_word_embeddings"] is True
    assert "tie_word_embeddings" not in json.loads((made.directory / "config.json").read_text())


@pytest.mark.parametrize(
    ("end", "why"),
    [("fail", "RuntimeError: the first"), ("killed", "out of memory"), ("incomplete", "did not write")],
)
def test_bad_ends_are_told_and_leave_nothing(
    end: str, why: str, environ: dict[str, str], tmp_path: Path
) -> None:
    make_qwen3(tmp_path / "source", seed=1)
    with pytest.raises(DuopackError, match=why):
        run(environ | {"FAKE_END": end}, tmp_path / "source", tmp_path / "made")
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / ".made.partial").exists()


def test_calibrating_an_mtp_layer_on_a_cpu_is_refused_at_once(
    environ: dict[str, str], seen: Path, tmp_path: Path
) -> None:
    make_model(tmp_path / "source", seed=1)
    with pytest.raises(DuopackError, match="MTP"):
        run(environ, tmp_path / "source", tmp_path / "made", recipe="w8a8-static")
    assert not seen.exists()


def test_auto_leaves_to_it_what_streaming_does_not_cover(
    environ: dict[str, str], seen: Path, tmp_path: Path
) -> None:
    make_qwen3(tmp_path / "source", seed=1)
    assert run(environ, tmp_path / "source", tmp_path / "a", engine="auto").record.engine == "streaming"
    # The stand-in cannot calibrate: what counts is that it was asked, with float32 weights.
    with pytest.raises(DuopackError):
        run(environ, tmp_path / "source", tmp_path / "b", engine="auto", recipe="w8a8-static")
    told = json.loads(seen.read_text())
    assert told["config"]["dtype"] == "float32"
    assert "--float32" in told["arguments"]


@pytest.mark.parametrize("version", ["26.0.0", ""])
def test_an_environment_with_another_version(
    version: str, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VERSION", version)
    monkeypatch.setenv("PYTHONPATH", environ["PYTHONPATH"])
    with pytest.raises(UsageError, match=r"26\.1\.0"):
        find_environment(tmp_path, environ)


def test_no_environment_at_all(tmp_path: Path) -> None:
    assert find_environment(tmp_path, {}) is None
    with pytest.raises(UsageError, match="no msmodelslim"):
        find_environment(tmp_path, {VARIABLE: str(tmp_path)})


def test_the_first_error_is_the_telling_one() -> None:
    lines = ["INFO", "ValueError: this one", "During handling of the above", "KeyError: not this"]
    assert "ValueError: this one" in failed(1, lines).what
    assert "printed nothing" in failed(1, []).what
    assert "the last words" in failed(3, ["something", "the last words"]).what
