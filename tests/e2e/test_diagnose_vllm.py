"""The real vLLM 0.20.2 for CPU, broken in one way at a time: its log is told of rightly; and measured while it is well.

DUOPACK_VLLM is the directory of a virtual environment with vLLM; without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.demo.model import make_qwen3
from pipeline.reports.progress import open_progress
from pipeline.serving.benchmark import read_benchmark
from pipeline.serving.diagnosis import Diagnosis, State
from pipeline.stages.diagnose import diagnose_log
from pipeline.stages.shard import shard

VLLM = os.environ.get("DUOPACK_VLLM")
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1"}
OPTIONS = ("--max-model-len", "1024", "--max-num-seqs", "4", "--enforce-eager")
READY_SECONDS, END_SECONDS = 240, 90

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not VLLM, reason="DUOPACK_VLLM does not name a virtual environment with vLLM"),
]


@dataclass
class Server:
    """A `vllm serve` in a session of its own, its output in `log`."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> bool:
        """Whether it answers; False when it ended before."""
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
            time.sleep(0.5)
        assert self.process.poll() is not None, "it is neither ready nor did it end"
        return False

    def complete(self, tokens: int = 16) -> int:
        """The status of a completion."""
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": tokens, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def child(self, word: str) -> int:
        """The process below the server whose title has the word."""
        below, rows = {self.process.pid}, _processes()
        for _ in range(4):
            below |= {pid for pid, parent, _ in rows if parent in below}
        return next(pid for pid, _, title in rows if pid in below and word in title)

    def diagnose(self) -> Diagnosis:
        """What its log says once it has ended."""
        self.process.wait(END_SECONDS)
        return diagnose_log(str(self.log))


def _processes() -> list[tuple[int, int, str]]:
    done = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in done.stdout.splitlines()[1:]]
    return [(int(row[0]), int(row[1]), row[2]) for row in rows if len(row) == 3]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def serving(model: Path, log: Path, *options: str, port: int | None = None) -> Iterator[Server]:
    """A server of a model; it and all its processes are ended."""
    port = port or free_port()
    words = [f"{VLLM}/bin/vllm", "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | SETTINGS | {"PATH": f"{VLLM}/bin:{os.environ['PATH']}"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*words, "--served-model-name", "tiny", *options],
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    try:
        yield Server(process, port, log)
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_qwen3(path)
    return path


def test_a_healthy_server_is_measured_twice_and_found_well(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(model, tmp_path / "log", *OPTIONS) as server:
        assert server.wait_ready()
        words = [
            "bench",
            server.url,
            "--concurrency",
            "1,4",
            "--input-tokens",
            "100",
            "--output-tokens",
            "64",
        ]
        own, theirs = tmp_path / "own.json", tmp_path / "vllm.json"
        assert main([*words, "--with", "own", "--quiet", "--out", str(own)]) == 0
        monkeypatch.setenv("PATH", f"{VLLM}/bin:{os.environ['PATH']}")
        assert main([*words, "--with", "vllm", "--quiet", "--out", str(theirs)]) == 0
        time.sleep(11)  # the engine writes its line every ten seconds
        running = diagnose_log(str(server.log))
        server.process.terminate()
        ended = server.diagnose()
    for one, other in zip(read_benchmark(own).points, read_benchmark(theirs).points, strict=True):
        assert one.agreed
        assert other.agreed
        assert 0.3 < one.output_throughput / other.output_throughput < 3
    assert (running.state, running.failed, running.health.lines > 0) == (State.SERVING, False, True)
    assert (ended.state, ended.failed, ended.header.version) == (State.STOPPED, False, "0.20.2")


def test_a_cache_mode_on_a_transformer_dies_at_the_first_request(model: Path, tmp_path: Path) -> None:
    with serving(
        model, tmp_path / "log", *OPTIONS, "--enable-prefix-caching", "--mamba-cache-mode", "align"
    ) as server:
        assert server.wait_ready(), "it is healthy, that is the trap"
        assert diagnose_log(str(server.log)).failed is False
        assert server.complete() == 500
        diagnosis = server.diagnose()
    assert [match.failure.id for match in diagnosis.causes] == ["mamba-on-transformer"]


def test_the_engine_is_killed_during_a_request(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "log", *OPTIONS) as server:
        assert server.wait_ready()
        os.kill(server.child("EngineCore"), signal.SIGKILL)
        assert server.complete(900) == 500
        diagnosis = server.diagnose()
    assert [match.failure.id for match in diagnosis.causes] == ["engine-vanished"]


def _damage(directory: Path, how: str) -> None:
    last = sorted(directory.glob("*.safetensors"))[-1]
    if how == "cut":
        last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    elif how == "missing":
        last.unlink()
    else:
        last.write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1118808\n"
        )


@pytest.mark.parametrize(
    ("how", "cause"),
    [("cut", "weights-cut"), ("missing", "weights-file-missing"), ("pointer", "weights-not-safetensors")],
)
def test_weights_that_are_damaged(model: Path, tmp_path: Path, how: str, cause: str) -> None:
    shutil.copytree(model, tmp_path / "tiny")
    _damage(tmp_path / "tiny", how)
    with serving(tmp_path / "tiny", tmp_path / "log", *OPTIONS) as server:
        assert not server.wait_ready()
        diagnosis = server.diagnose()
    assert [match.failure.id for match in diagnosis.causes] == [cause]


def test_shards_without_their_load_format(model: Path, tmp_path: Path) -> None:
    shard(model, tmp_path / "shards", open_progress(quiet=True), ranks=1, platform="cpu")
    with serving(tmp_path / "shards", tmp_path / "log", *OPTIONS) as server:
        assert not server.wait_ready()
        diagnosis = server.diagnose()
    assert [match.failure.id for match in diagnosis.causes] == ["shards-default-loader"]


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("--max-model-len", "53248"), "max-model-len"),
        (("--speculative-model", "x"), "option-speculative-model"),
        (("--quantization", "ascend"), "quantization-unknown"),
    ],
)
def test_options_that_cannot_be(model: Path, tmp_path: Path, options: tuple[str, ...], cause: str) -> None:
    with serving(model, tmp_path / "log", "--enforce-eager", *options) as server:
        assert not server.wait_ready()
        diagnosis = server.diagnose()
    assert [match.failure.id for match in diagnosis.causes] == [cause]


def test_a_port_in_use(model: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = int(other.getsockname()[1])
        with serving(model, tmp_path / "log", *OPTIONS, port=port) as server:
            assert server.process.wait(READY_SECONDS) == 1
            diagnosis = server.diagnose()
    assert [match.failure.id for match in diagnosis.causes] == ["port-in-use"]
