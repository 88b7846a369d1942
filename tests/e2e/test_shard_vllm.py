"""Our shards against the real vLLM 0.20.2 for CPU: the same bytes as its own saver, and the same answers.

DUOPACK_VLLM is the directory of a virtual environment with vLLM; without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.golden import unpack
from support.tiny_checkpoints import Checkpoint, qwen3, qwen3_5, qwen3_moe
from support.vllm_state import PART_SIZE

from pipeline.reports.progress import open_progress
from pipeline.stages.shard import shard

pytestmark = pytest.mark.e2e

VLLM = os.environ.get("DUOPACK_VLLM")
STATE = Path(__file__).parents[1] / "support" / "vllm_state.py"
SETTINGS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_KVCACHE_SPACE": "1"}
PROMPTS = ("The quick brown fox", "1 2 3 4", "Hello", "a b c d e f g")

needs_vllm = pytest.mark.skipif(not VLLM, reason="DUOPACK_VLLM does not name a virtual environment with vLLM")

MODELS: dict[str, Checkpoint] = {
    "qwen3-moe": qwen3_moe(3),
    "qwen3": qwen3(2),
    "qwen3-tied-with-bias-and-one-kv-head": qwen3(
        1, tie_word_embeddings=True, attention_bias=True, num_key_value_heads=1
    ),
    "qwen3.5-tied": qwen3_5(4, tie_word_embeddings=True),
    "qwen3.5-moe": qwen3_5(5, moe=True),
}


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each model SOURCE `<name>`, and what vLLM saved of it in `<name>-vllm` and `<name>-vllm-parts`."""
    root = tmp_path_factory.mktemp("states")
    pairs = []
    for name, checkpoint in MODELS.items():
        checkpoint.write(root / name)
        pairs += [str(root / name), str(root / f"{name}-vllm")]
    command = [f"{VLLM}/bin/python", str(STATE), "2", str(free_port()), *pairs]
    done = subprocess.run(
        command, env=os.environ | SETTINGS, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return root


@needs_vllm
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("suffix", "part_size"), [("", 5 << 30), ("-parts", PART_SIZE)])
def test_shards_are_the_bytes_that_vllm_itself_saves(
    states: Path, tmp_path: Path, name: str, suffix: str, part_size: int
) -> None:
    made = shard(
        states / name,
        tmp_path / "out",
        open_progress(quiet=True),
        ranks=2,
        platform="cpu",
        part_size=part_size,
    )
    theirs = states / f"{name}-vllm{suffix}"
    saved = {path.name: path.read_bytes() for path in theirs.iterdir()}
    ours = {path.name: path.read_bytes() for path in made.directory.glob("model-rank-*")}
    assert sorted(ours) == sorted(saved)
    assert ours == saved
    assert len(saved) == 2 or suffix


@needs_vllm
def test_vllm_answers_the_same_from_our_shards_as_from_the_checkpoint(tmp_path: Path) -> None:
    source = unpack(tmp_path / "golden") / "qwen3-untied-v300-FLOAT"
    made = shard(source, tmp_path / "tp2", open_progress(quiet=True), ranks=2, platform="cpu")
    with serving(source, 1, "auto") as url:
        expected = answers(url)
    with serving(made.directory, 2, "sharded_state") as url:
        assert answers(url) == expected
    assert len({tuple(answer) for answer in expected}) > 1, "a model that always says the same proves nothing"


@contextmanager
def serving(model: Path, ranks: int, load_format: str) -> Iterator[str]:
    port = free_port()
    command = [f"{VLLM}/bin/vllm", "serve", str(model), "--load-format", load_format, "--port", str(port)]
    command += ["--tensor-parallel-size", str(ranks), "--dtype", "float16", "--max-model-len", "256"]
    command += ["--enforce-eager", "--served-model-name", "tiny", "--host", "127.0.0.1"]
    settings = SETTINGS if ranks > 1 else SETTINGS | {"VLLM_CPU_OMP_THREADS_BIND": "0"}
    # A server's workers end with its process group.
    process = subprocess.Popen(
        command,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    log = LogTail(process)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while not healthy(url):
            assert process.poll() is None, log.text()
            assert time.monotonic() < deadline, log.text()
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


class LogTail:
    """The end of a process' output, read so that it never blocks."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._lines: list[str] = []
        assert process.stdout
        self._stream = process.stdout
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._stream:
            self._lines = [*self._lines[-60:], line.decode(errors="replace")]

    def text(self) -> str:
        return "".join(self._lines)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def answers(url: str) -> list[list[int]]:
    """What the model says to each prompt, greedily: 24 token ids."""
    return [complete(url, prompt) for prompt in PROMPTS]


def complete(url: str, prompt: str) -> list[int]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        tokens = json.load(response)["choices"][0]["token_ids"]
    assert len(tokens) == 24
    return [int(token) for token in tokens]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
