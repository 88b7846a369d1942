"""Lines of a server's log: every decoration taken off, none too long, none lost between two pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.serving.header import model_in, options_in, version_in
from pipeline.serving.health import MAX_POINTS, HealthReader, sample_in
from pipeline.serving.logs import MAX_JSON, MAX_LINE, Line, Role, lines_of, parse_line

RECORD = "ERROR 06-14 20:12:01 [core.py:1099] KeyError: 'x'"
ENGINE = (
    "Engine 000: Avg prompt throughput: {prompt} tokens/s, Avg generation throughput: {generation} tokens/s, "
    "Running: {running} reqs, Waiting: {waiting} reqs, GPU KV cache usage: {cache}%, Prefix cache hit rate: {hits}%"
)


def parsed(text: str) -> Line:
    return parse_line(text.encode(), 1)


@pytest.mark.parametrize(
    ("text", "process", "role"),
    [
        (RECORD, "", Role.OTHER),
        (f"(EngineCore pid=568) {RECORD}", "EngineCore", Role.ENGINE),
        (f"(EngineCore_DP0 pid=568) {RECORD}", "EngineCore_DP0", Role.ENGINE),
        (f"(Worker_TP0_EP0 pid=1) {RECORD}", "Worker_TP0_EP0", Role.WORKER),
        (f"(VllmWorker rank=3 pid=1) {RECORD}", "VllmWorker", Role.WORKER),
        (f"(VllmWorkerProcess pid=7246) {RECORD}", "VllmWorkerProcess", Role.WORKER),
        (f"(APIServer pid=1) {RECORD}", "APIServer", Role.SERVER),
        (f"(EngineCore pid=5) (Worker_TP1 pid=9) {RECORD}", "EngineCore", Role.ENGINE),
        (f"[rank1]: {RECORD}", "rank1", Role.WORKER),
        (f"\x1b[1;36m(EngineCore pid=5)\x1b[0;0m {RECORD}", "EngineCore", Role.ENGINE),
        (f"2026-06-14T20:12:03.123456789Z (EngineCore pid=5) {RECORD}", "EngineCore", Role.ENGINE),
        (f"2026-06-14T20:12:03.1+08:00 stderr F (EngineCore pid=5) {RECORD}", "EngineCore", Role.ENGINE),
        (f"vllm-qwen3d5-27b  | (Worker_TP0 pid=286) {RECORD}", "Worker_TP0", Role.WORKER),
    ],
)
def test_decoration_is_taken_off(text: str, process: str, role: Role) -> None:
    line = parsed(text)
    assert (line.text, line.process, line.role) == ("KeyError: 'x'", process, role)
    assert line.level == "ERROR"
    # One clock for all lines of a log: docker's where it has put its times before them.
    assert line.when == ("06-14 20:12:03" if text.startswith("2026") else "06-14 20:12:01")


def test_older_and_other_loggers() -> None:
    old = parsed("INFO 04-16 13:55:44 __init__.py:30] Available plugins")
    assert (old.level, old.when, old.text) == ("INFO", "04-16 13:55:44", "Available plugins")
    access = parsed('(APIServer pid=1) INFO:     127.0.0.1:40000 - "GET /health HTTP/1.1" 200 OK')
    assert (access.level, access.text) == ("INFO", '127.0.0.1:40000 - "GET /health HTTP/1.1" 200 OK')
    frame = parsed('(APIServer pid=1)   File "/opt/x.py", line 3, in run')
    assert frame.text == '  File "/opt/x.py", line 3, in run'


def test_a_line_of_dockers_json_file() -> None:
    row = {"log": f"(EngineCore pid=5) {RECORD}\n", "stream": "stderr", "time": "2026-06-14T20:12:09.5Z"}
    line = parsed(json.dumps(row))
    assert (line.process, line.text, line.when) == ("EngineCore", "KeyError: 'x'", "06-14 20:12:09")
    bare = parsed(json.dumps(row | {"log": "Killed\n"}))
    assert (bare.text, bare.when) == ("Killed", "06-14 20:12:09")
    for broken in ('{"log": 3', '{"log":3}', '{"log":"x","time":7}', '{"log":' + "[" * 5000):
        parsed(broken)


def test_a_progress_bar_is_as_many_lines_as_it_was_written_over() -> None:
    lines = list(lines_of([b"Loading: 0%\rLoading: 50%\rLoading: 100%\nReady\n"]))
    assert [(line.number, line.text) for line in lines] == [
        (1, "Loading: 0%"),
        (1, "Loading: 50%"),
        (1, "Loading: 100%"),
        (2, "Ready"),
    ]


def test_numbers_are_those_of_the_file() -> None:
    assert [line.number for line in lines_of([b"a\n\n\nb"])] == [1, 4]


@given(
    st.lists(
        st.sampled_from(
            [b"x", b"\n", b"\r", b"(Worker pid=1) ", b"ERROR 06-14 20:12:01 [a.py:1] ", b"\xff\x1b["]
        )
    ),
    st.lists(st.integers(1, 7)),
)
def test_pieces_of_any_size_give_the_same_lines(words: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(words)
    pieces, rest = [], whole
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    assert list(lines_of([*pieces, rest])) == list(lines_of([whole]))


def test_a_line_without_an_end_is_cut_and_costs_no_memory() -> None:
    def pieces():  # type: ignore[no-untyped-def]
        yield b"(Worker pid=1) "
        for _ in range(200):
            yield b"y" * 100_000
        yield b"\nnext\n"

    held = list(lines_of(pieces()))
    assert [len(line.text) <= MAX_LINE for line in held] == [True, True]
    assert held[1] == Line(2, "next")
    assert MAX_JSON < 1 << 20


@given(st.binary(max_size=300))
def test_no_bytes_can_break_it(data: bytes) -> None:
    for line in lines_of([data]):
        assert len(line.text) <= MAX_LINE
        sample_in(line.text), version_in(line.text), model_in(line.text), options_in(line.text)


def test_the_header() -> None:
    assert version_in(" ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.20.2") == "0.20.2"
    assert (
        version_in("Initializing a V1 LLM engine (v0.20.2rc1+empty) with config: model='x'")
        == "0.20.2rc1+empty"
    )
    assert version_in("some version 0.20.2") is None
    assert model_in("  █▄█▀ █     █     █     █  model   /models/Qwen3.5-9B") == "/models/Qwen3.5-9B"
    assert options_in("nothing") is None


def test_options_with_values_that_are_no_literals() -> None:
    text = (
        "non-default args: {'model': '/models/a, b', 'max_model_len': 53248, 'served_model_name': ['x'], "
        "'compilation_config': {'mode': None, 'cudagraph_mode': <CUDAGraphMode.FULL_DECODE_ONLY: (2, 0)>, "
        "'cudagraph_capture_sizes': [1, 4]}, 'other': Thing(a={'b': 1}, c='}'), 'last': True}"
    )
    options = options_in(text)
    assert options is not None
    assert options["model"] == "/models/a, b"
    assert options["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert options["compilation_config"]["cudagraph_capture_sizes"] == [1, 4]
    assert (options["max_model_len"], options["last"]) == (53248, True)
    assert options["other"] == "Thing(a={'b': 1}, c='}')"


@pytest.mark.parametrize("text", ["{", "{'a'", "{'a': ", "{'a': [1, ", "{]", "{" * 3000, "{'a': '\\"])
def test_options_that_were_cut(text: str) -> None:
    assert isinstance(options_in(f"non-default args: {text}"), dict)


def test_an_engines_line_with_its_optional_parts() -> None:
    sample = sample_in(
        "Engine 003: Avg prompt throughput: 1403.7 tokens/s, Avg generation throughput: 17.0 tokens/s, "
        "Running: 1 reqs, Waiting: 2 reqs, Deferred: 1 reqs, Preemptions: 4, "
        "GPU KV cache usage: 1.5%, Prefix cache hit rate: 12.5%, "
        "External prefix cache hit rate: 99.0%, MM cache hit rate: 3.0%"
    )
    assert sample is not None
    assert (sample.engine, sample.prompt, sample.generation) == (3, 1403.7, 17.0)
    assert (sample.running, sample.waiting, sample.preemptions) == (1, 2, 4)
    assert (sample.cache, sample.hits) == (1.5, 12.5)
    assert sample_in("Engine 003: Added request") is None


def test_health_keeps_few_points_and_the_true_extremes() -> None:
    reader = HealthReader()
    for number in range(10_000):
        text = ENGINE.format(
            prompt=number % 100, generation=10, running=number % 2 + 1, waiting=0, cache=1.0, hits=0.0
        )
        sample = sample_in(text)
        assert sample is not None
        reader.add(sample, f"06-14 {number // 3600:02}:{number // 60 % 60:02}:{number % 60:02}")
    health = reader.result()
    assert len(health.points) <= MAX_POINTS + 1
    assert (health.lines, health.prompt_max, health.generation_mean, health.generation_one) == (
        10_000,
        99.0,
        10.0,
        10.0,
    )
    assert (health.first, health.last) == ("06-14 00:00:00", "06-14 02:46:39")
    assert {point.generation for point in health.points} == {10.0}
