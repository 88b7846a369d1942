"""`duopack diagnose`: real logs of vLLM 0.20.2 (tests/unit/data/logs, cut), and what could mislead it."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.errors import DuopackError
from pipeline.serving.diagnosis import Diagnosis, State
from pipeline.serving.telling import as_text, as_value, sparkline, summary
from pipeline.stages.diagnose import (
    container_state,
    diagnose_container,
    diagnose_log,
    diagnose_stream,
)

LOGS = Path(__file__).parent / "data/logs"
REAL = {
    "bad-json": (State.DEAD, "option-json"),
    "unknown-option": (State.DEAD, "option-speculative-model"),
    "tool-parser": (State.DEAD, "tool-parser-missing"),
    "port-in-use": (State.DEAD, "port-in-use"),
    "max-model-len": (State.DEAD, "max-model-len"),
    "quantization-ascend": (State.DEAD, "quantization-unknown"),
    "no-such-path": (State.DEAD, "model-not-there"),
    "no-config": (State.DEAD, "model-not-there"),
    "unknown-arch": (State.DEAD, "architecture-unknown"),
    "truncated": (State.DEAD, "weights-cut"),
    "missing": (State.DEAD, "weights-file-missing"),
    "lfs": (State.DEAD, "weights-not-safetensors"),
    "kv-too-small": (State.DEAD, "kv-cache-too-small"),
    "ulimit": (State.DEAD, "host-memory"),
    "mamba-align": (State.DEAD, "mamba-on-transformer"),
    "shards-no-format": (State.DEAD, "shards-default-loader"),
    "shards-tp1-at-tp2": (State.DEAD, "shards-rank-missing"),
    "kill-engine": (State.DEAD, "engine-vanished"),
    "kill-worker": (State.DEAD, "worker-vanished"),
    # These say nothing: shards of TP 2 load at TP 1 and answer garbage, and kill -9 leaves no word.
    "shards-tp2-at-tp1": (State.STOPPED, None),
    "kill-server": (State.READY, None),
    "healthy": (State.STOPPED, None),
}
HEADER = """\
(APIServer pid=1) INFO 06-14 20:11:01 [utils.py:299]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.20.2
(APIServer pid=1) INFO 06-14 20:11:01 [utils.py:299]   █▄█▀ █     █     █     █  model   /models/Qwen3.5-9B
(APIServer pid=1) INFO 06-14 20:11:01 [utils.py:233] non-default args: {'model': '/models/Qwen3.5-9B'}
"""
READY = "(APIServer pid=1) INFO:     Application startup complete.\n"
ANSWERED = '(APIServer pid=1) INFO:     127.0.0.1:40000 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
LOADING = "(Worker pid=3) INFO 06-14 20:11:20 [cpu_model_runner.py:101] Starting to load model /models/Qwen3.5-9B...\n"


def diagnosed(text: str, *symptoms: str) -> Diagnosis:
    return diagnose_stream([text.encode()], where="test", symptoms=symptoms)


def causes(diagnosis: Diagnosis) -> list[str]:
    return [match.failure.id for match in diagnosis.causes]


def raised(process: str, when: str, error: str, file: str = "x.py") -> str:
    start = f"({process} pid=9) ERROR {when} [core.py:1] "
    return f'{start}Traceback (most recent call last):\n{start}  File "/opt/{file}", line 7, in run\n{start}{error}\n'


def test_every_real_log_is_told_of() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == set(REAL)


@pytest.mark.parametrize("name", sorted(REAL))
def test_a_real_log(name: str) -> None:
    state, cause = REAL[name]
    diagnosis = diagnose_log(str(LOGS / f"{name}.log"))
    assert diagnosis.state is state
    assert causes(diagnosis)[:1] == ([cause] if cause else [])
    assert diagnosis.failed == (cause is not None)
    assert not diagnosis.causes or diagnosis.causes[0].certain


def test_the_first_error_is_the_workers_and_not_the_last_traceback() -> None:
    error = diagnose_log(str(LOGS / "missing.log")).first_error
    assert error is not None
    assert error.line.process == "Worker"
    assert error.text.startswith("ValueError: Following weights were not initialized")
    assert "default_loader.py" in error.frame


def test_an_error_that_only_counts_is_told_with_its_words() -> None:
    error = diagnose_log(str(LOGS / "max-model-len.log")).first_error
    assert error is not None
    assert "validation error for ModelConfig: " in error.text
    assert "max_model_len (53248)" in error.text


def test_health_of_a_real_server() -> None:
    diagnosis = diagnose_log(str(LOGS / "healthy.log"))
    assert diagnosis.health.lines == 4
    assert diagnosis.health.running_max == 4
    assert diagnosis.health.generation_max == 1423.6
    assert (diagnosis.first, diagnosis.last) == ("12-01 16:57:24", "12-01 16:59:27")
    assert diagnosis.header.version == "0.20.2"
    assert diagnosis.header.option("compilation_config.cudagraph_capture_sizes") == [1, 4]
    assert [match.failure.id for match in diagnosis.notes] == [
        "model-name",
        "request-too-long",
        "broadcast-slow",
    ]
    assert summary(diagnosis) == ""


def test_an_unknown_failure_is_said_to_be_unknown_with_its_first_error() -> None:
    log = HEADER + LOADING
    log += raised("Worker_TP1", "06-14 20:12:00", "FrobnicationError: the widget is bent", "widget.py")
    log += raised(
        "EngineCore",
        "06-14 20:12:00",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    )
    diagnosis = diagnosed(log)
    assert (diagnosis.state, diagnosis.failed, diagnosis.unknown) == (State.DEAD, True, True)
    assert "not known" in summary(diagnosis)
    assert "the widget is bent" in summary(diagnosis)
    text = as_text(diagnosis, "x")
    assert "no known failure fits" in text
    assert "/opt/widget.py:7 in run" in text


def test_errors_are_ordered_by_time_and_then_from_worker_to_server() -> None:
    server = raised("APIServer", "06-14 20:12:01", "ValueError: third")
    engine = raised("EngineCore", "06-14 20:12:00", "ValueError: second")
    worker = raised("Worker_TP0", "06-14 20:12:00", "ValueError: first")
    error = diagnosed(HEADER + server + engine + worker).first_error
    assert error is not None
    assert error.text == "ValueError: first"
    late = raised("Worker_TP0", "06-14 20:12:09", "ValueError: late")
    error = diagnosed(HEADER + late + engine).first_error
    assert error is not None
    assert error.text == "ValueError: second"


def test_lines_of_two_processes_may_be_mixed() -> None:
    one = raised("Worker_TP0", "06-14 20:12:00", "ValueError: one").splitlines(keepends=True)
    two = raised("Worker_TP1", "06-14 20:12:05", "ValueError: two").splitlines(keepends=True)
    mixed = "".join(line for pair in zip(two, one, strict=True) for line in pair)
    error = diagnosed(HEADER + mixed).first_error
    assert error is not None
    assert (error.text, error.frame) == ("ValueError: one", "/opt/x.py:7 in run")


def test_a_cause_that_the_server_outlived_is_none() -> None:
    oom = "(Worker pid=3) ERROR 06-14 20:13:00 [x.py:1] RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB\n"
    assert causes(diagnosed(HEADER + READY + oom)) == ["chip-memory"]
    assert causes(diagnosed(HEADER + READY + oom + ANSWERED)) == []
    death = "(EngineCore pid=2) ERROR 06-14 20:13:00 [x.py:1] EngineCore encountered a fatal error.\n"
    assert causes(diagnosed(HEADER + READY + oom + ANSWERED + death)) == ["chip-memory"]


def test_the_last_of_several_runs_is_judged() -> None:
    first = HEADER + LOADING + "Killed\n"
    second = HEADER + LOADING + READY + ANSWERED
    diagnosis = diagnosed(first + first + second)
    assert (diagnosis.runs, diagnosis.state, causes(diagnosis)) == (3, State.SERVING, [])
    assert diagnosis.earlier == ("killed", "killed")
    assert "2 runs before this one ended with: killed" in as_text(diagnosis, "x")


def test_a_log_that_restarts_for_ever_costs_no_memory() -> None:
    run = (
        HEADER + LOADING + raised("Worker", "06-14 20:12:00", "ValueError: x") + READY + ANSWERED * 3
    ).encode()

    def logs(count: int) -> Iterator[bytes]:
        for number in range(count):
            yield run + b"(Worker pid=3) ERROR unique %d\n" % number

    tracemalloc.start()
    diagnose_stream(logs(50), where="warm")
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    diagnosis = diagnose_stream(logs(500), where="long")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert diagnosis.runs == 500
    assert peak - before < 1 << 20


def test_many_processes_and_open_tracebacks_cost_no_memory() -> None:
    def lines() -> Iterator[bytes]:
        yield HEADER.encode()
        for number in range(5_000):
            yield b"(Worker_%d pid=1) Traceback (most recent call last):\n" % number
            yield b"(Server_%d pid=1) ERROR:    Exception in ASGI application\n" % number

    tracemalloc.start()
    diagnose_stream(lines(), where="long")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 << 20


def test_what_smoke_saw_is_a_symptom() -> None:
    sharded = HEADER.replace("{'model'", "{'load_format': 'sharded_state', 'model'") + READY + ANSWERED
    seen = "smoke: the answer is one character over and over: !!!!!!!!!!!!!!!!"
    assert causes(diagnosed(sharded))[:1] == []
    assert causes(diagnosed(sharded, seen)) == ["garbage-shards", "garbage-graph"]
    assert causes(diagnosed(HEADER + READY, seen)) == ["garbage-graph"]
    newer = HEADER.replace("0.20.2", "0.23.0")
    assert causes(diagnosed(newer + READY, seen)) == []


def test_without_its_header_a_log_gives_likely_causes() -> None:
    line = "(EngineCore pid=5) ERROR 06-14 20:12:01 [core.py:1099] KeyError: 'layers.0.mlp.gate_gate_up_proj.deq_scale'"
    match = diagnosed(line).causes[0]
    assert (match.failure.id, match.certain) == ("shards-default-loader", False)
    assert summary(diagnosed(line)).startswith("Probably: ")
    assert "likely cause: " in as_text(diagnosed(line), "x")


def test_a_request_that_is_refused_ends_nothing() -> None:
    words = (
        "ERROR:    Exception in ASGI application",
        "Traceback (most recent call last):",
        '  File "/opt/x.py", line 1, in f',
        "vllm.exceptions.VLLMValidationError: no",
    )
    refusal = "".join(f"(APIServer pid=1) {line}\n" for line in words)
    diagnosis = diagnosed(HEADER + READY + refusal)
    assert (diagnosis.failed, diagnosis.first_error) == (False, None)
    later = raised("Worker_TP0", "06-14 20:19:00", "ValueError: the true one")
    later += "(EngineCore pid=2) ERROR 06-14 20:19:00 [x.py:1] EngineCore encountered a fatal error.\n"
    error = diagnosed(HEADER + READY + refusal + later).first_error
    assert error is not None
    assert error.text == "ValueError: the true one"


def test_errors_while_it_stops_are_none() -> None:
    stop = "(EngineCore pid=2) INFO 06-14 20:20:00 [core.py:1238] Shutdown initiated (timeout=0)\n"
    diagnosis = diagnosed(
        HEADER + READY + ANSWERED + stop + raised("Worker", "06-14 20:20:00", "ValueError: torn")
    )
    assert (diagnosis.state, diagnosis.failed, diagnosis.first_error) == (State.STOPPED, False, None)


class FakeContainer:
    """A container as the docker package gives it."""

    def __init__(self, log: str, name: str = "vllm-9b", **attributes: Any) -> None:
        self.name = name
        self.attrs = {
            "Config": {"Cmd": ["/models/scripts/n9.sh"]},
            "State": {"Status": "running"},
        } | attributes
        self._log = log

    def reload(self) -> None:
        pass

    def logs(self, **_: Any) -> Iterator[bytes]:
        for line in self._log.splitlines(keepends=True):
            yield f"2026-06-14T20:12:03.123456789Z {line}".encode()


@pytest.mark.parametrize(
    ("log", "attributes", "expected"),
    [
        (LOADING, {"State": {"Status": "exited", "ExitCode": 137, "OOMKilled": True}}, "container-memory"),
        (LOADING, {"State": {"Status": "exited", "ExitCode": 137}}, "container-killed"),
        (LOADING, {"State": {"Status": "exited", "ExitCode": 139}}, "container-crashed"),
        ("", {"State": {"Status": "exited", "ExitCode": 127}}, "container-command"),
        ("", {"Config": {"Cmd": ["bash"]}}, "container-shell"),
        ("", {"Config": {"Cmd": None, "Entrypoint": ["/bin/sh"]}}, "container-shell"),
        (
            READY,
            {
                "State": {
                    "Status": "running",
                    "Health": {"Status": "unhealthy", "Log": [{"Output": "curl: (28) timeout"}]},
                }
            },
            "container-unhealthy",
        ),
        (LOADING, {"State": {"Status": "running", "OOMKilled": True}}, "container-memory"),
        (
            "",
            {
                "State": {
                    "Status": "created",
                    "ExitCode": 127,
                    "Error": 'exec: "x": executable file not found in $PATH',
                }
            },
            "container-command",
        ),
    ],
)
def test_what_the_engine_knows_of_a_container(log: str, attributes: dict[str, Any], expected: str) -> None:
    diagnosis = diagnose_container(FakeContainer((HEADER + log) if log else "", **attributes))  # type: ignore[arg-type]
    assert causes(diagnosis)[:1] == [expected]
    assert diagnosis.failed


def test_notes_about_a_container() -> None:
    container = FakeContainer(HEADER.replace("9B", "27B-w8a8") + READY + ANSWERED, RestartCount=2)
    diagnosis = diagnose_container(container)  # type: ignore[arg-type]
    assert [match.failure.id for match in diagnosis.notes] == ["container-restarts", "container-name-other"]
    assert not diagnosis.failed
    right = FakeContainer(HEADER + READY + ANSWERED, name="vllm-qwen3.5-9b")
    assert diagnose_container(right).notes == ()  # type: ignore[arg-type]


def test_a_container_that_ended_as_told_is_no_failure() -> None:
    log = (LOGS / "healthy.log").read_text()
    container = FakeContainer(log, State={"Status": "exited", "ExitCode": 0})
    assert not diagnose_container(container).failed  # type: ignore[arg-type]


def test_an_inspection_with_nothing_in_it() -> None:
    assert container_state("x", {}).exit_code == 0
    assert container_state("x", {"State": None, "Config": None, "RestartCount": None}).command == ()


def test_the_command_on_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(LOGS / "mamba-align.log")]) == 1
    out = capsys.readouterr().out
    assert "cause: --mamba-cache-mode was given for a plain Transformer." in out
    assert "to mend: remove --mamba-cache-mode" in out
    assert "[mamba-on-transformer; run with vLLM 0.20.2" in out
    assert main(["diagnose", str(LOGS / "healthy.log")]) == 0
    assert "generation over time: " in capsys.readouterr().out


def test_the_command_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "--json", str(LOGS / "truncated.log")]) == 1
    value = json.loads(capsys.readouterr().out)
    assert value["schema"] == "duopack-diagnosis/1"
    assert (value["state"], value["failed"], value["unknown"]) == ("dead", True, False)
    assert value["causes"][0]["id"] == "weights-cut"
    assert value["options"]["max_model_len"] == 1024
    assert value["health"] is None


def test_the_command_on_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Stdin:
        buffer = io.BytesIO((LOGS / "port-in-use.log").read_bytes())

    monkeypatch.setattr("sys.stdin", Stdin())
    assert main(["diagnose", "-"]) == 1
    assert "Another process of this network already listens" in capsys.readouterr().out


def test_a_rotated_log(tmp_path: Path) -> None:
    packed = gzip.compress((LOGS / "lfs.log").read_bytes())
    (tmp_path / "x.log.1.gz").write_bytes(packed)
    assert causes(diagnose_log(str(tmp_path / "x.log.1.gz"))) == ["weights-not-safetensors"]
    (tmp_path / "cut.gz").write_bytes(packed[:-200])
    with pytest.raises(DuopackError, match="gzip file is broken"):
        diagnose_log(str(tmp_path / "cut.gz"))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["diagnose"], 2, "required"),
        (["diagnose", "--table", "x"], 2, "not allowed"),
        (["diagnose", "{tmp}"], 1, "Is a directory"),
        (["diagnose", "{tmp}/empty"], 1, "nothing is in the log"),
        (["diagnose", "{tmp}/no-such"], 1, "no such file"),
    ],
)
def test_wrong_use(
    arguments: list[str], code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    (tmp_path / "empty").touch()
    assert main([word.format(tmp=tmp_path) for word in arguments]) == code
    assert words in capsys.readouterr().err


def test_a_file_that_is_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_bytes(bytes(range(256)) * 100)
    assert main(["diagnose", str(tmp_path / "x")]) == 1
    assert "nothing of a server is in it" in capsys.readouterr().out


def test_a_terminal_gets_no_control_characters() -> None:
    log = HEADER + raised("Worker", "06-14 20:12:00", "ValueError: \x1b[2J\x07 bell \x9b31m") + "Killed\n"
    text = as_text(diagnosed(log), "\x1b[2Jname")
    assert all(char.isprintable() or char == "\n" for char in text)


def test_a_sparkline_is_short() -> None:
    assert len(sparkline([float(number) for number in range(1000)])) == 60
    assert sparkline([0.0, 0.0]) == "  "
    assert set(sparkline([1.0, 2.0, 3.0], plain=True)) <= set(" .:-=+*#@")


def test_a_value_is_json() -> None:
    for name in REAL:
        json.dumps(as_value(diagnose_log(str(LOGS / f"{name}.log")), name))
