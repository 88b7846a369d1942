"""`duopack bench`: numbers that are the client's and the server's, from a server whose speed is known."""

from __future__ import annotations

import json
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.errors import DuopackError, UsageError
from pipeline.reports.lines import Series, nice_ceiling, svg_lines
from pipeline.serving import vllm_bench
from pipeline.serving.bench_page import as_html, remarks
from pipeline.serving.benchmark import (
    Benchmark,
    Point,
    ServerSide,
    Spread,
    as_value,
    check_comparable,
    compare,
    from_value,
    read_benchmark,
    spread,
)
from pipeline.serving.client import ServerClient
from pipeline.serving.loadgen import MAX_EVENT, events
from pipeline.serving.metrics import Counters, parse_counters
from pipeline.stages.bench import Wanted, bench, inner_url

PAUSE = 0.01
FIRST = 0.05
POINT = Point(
    concurrency=4,
    requests=16,
    failed=0,
    seconds=2.0,
    output_throughput=100.0,
    total_throughput=500.0,
    ttft=Spread(1.0, 1.0, 2.0, 3.0),
    tpot=Spread(4.0, 4.0, 5.0, 6.0),
    server=ServerSide(1600, 200, 0, 0.0),
    agreed=True,
)
BENCHMARK = Benchmark(
    "http://h:1", "tiny", "/models/tiny", "duopack", 100, 8, 7, "2026-06-14T00:00:00Z", (POINT,)
)


class Server(ThreadingHTTPServer):
    """Streams as vLLM 0.20.2 does: a pause before the first token, one before each other, and counters."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.at_a_time = self.most = 0
        self.prompts: list[Any] = []
        self.counters = Counters()
        self.tokenizes = self.counts = True
        self.fails_from: int | None = None
        self.breaks = False
        self.miscounts = 0
        self.key: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, value: Any) -> None:
        body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.reply(401, {"error": "Unauthorized"})
        elif self.path == "/v1/models":
            self.reply(200, {"data": [{"id": "tiny", "root": "/models/tiny", "max_model_len": 4096}]})
        elif self.path == "/metrics" and self.server.counts:
            self.reply(200, self.metrics())
        else:
            self.reply(200 if self.path == "/health" else 404, {})

    def metrics(self) -> str:
        made = self.server.counters
        label = '{engine="0",model_name="tiny"}'
        return (
            "# HELP vllm:prompt_tokens_total Number of prefill tokens processed.\n"
            f"vllm:prompt_tokens_total{label} {made.prompt_tokens}\n"
            f"vllm:generation_tokens_total{label} {made.generation_tokens + self.server.miscounts}\n"
            f"vllm:prefix_cache_queries_total{label} {made.prompt_tokens}\n"
            f"vllm:prefix_cache_hits_total{label} {made.prompt_tokens / 4}\n"
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize" and self.server.tokenizes:
            self.reply(200, {"tokens": list(range(40, 90)), "count": 50})
        elif self.path == "/v1/completions":
            self.complete(body)
        else:
            self.reply(404, {"detail": "Not Found"})

    def complete(self, body: dict[str, Any]) -> None:
        server = self.server
        with server.lock:
            server.prompts.append(body["prompt"])
            server.at_a_time += 1
            server.most = max(server.most, server.at_a_time)
            fails = server.fails_from is not None and len(server.prompts) > server.fails_from
        try:
            if fails:
                self.reply(500, {"error": {"message": "EngineCore encountered an issue."}})
            else:
                self.stream(body)
        finally:
            with server.lock:
                server.at_a_time -= 1

    def stream(self, body: dict[str, Any]) -> None:
        assert body["stream"]
        assert body["ignore_eos"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        count = body["max_tokens"]
        for number in range(count):
            time.sleep(PAUSE if number else FIRST)
            self.event({"choices": [{"text": "x" if number % 2 else ""}]})
            if self.server.breaks:
                self.close_connection = True
                return
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        with self.server.lock:
            old = self.server.counters
            self.server.counters = replace(
                old,
                prompt_tokens=old.prompt_tokens + usage["prompt_tokens"],
                generation_tokens=old.generation_tokens + count,
            )
        self.event({"choices": [], "usage": usage})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, value: Any) -> None:
        self.chunk(f"data: {json.dumps(value)}\n\n".encode())

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.02,))
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def wanted(**more: Any) -> Wanted:
    return Wanted(
        **{"concurrencies": (1, 4), "input_tokens": 20, "output_tokens": 11, "requests": 4, "tool": "own"}
        | more
    )


def measured(server: Server, **more: Any) -> Benchmark:
    client = ServerClient(server.url, connections=8)
    return bench(client, wanted(**more), lambda _: None)


def test_the_times_are_the_servers_and_the_counts_agree(server: Server) -> None:
    result = measured(server)
    one, four = result.points
    assert (result.tool, result.model, result.root) == ("duopack", "tiny", "/models/tiny")
    assert (one.requests, one.failed, one.agreed) == (4, 0, True)
    assert one.ttft is not None
    assert one.tpot is not None
    assert FIRST * 1000 <= one.ttft.p50 < FIRST * 1000 + 60
    assert PAUSE * 1000 <= one.tpot.p50 < PAUSE * 1000 + 20
    request = FIRST + 10 * PAUSE
    assert 11 / request / 3 < one.output_throughput <= 11 / request
    assert one.total_throughput == pytest.approx(one.output_throughput * 31 / 11, rel=0.01)
    assert four.output_throughput > 1.5 * one.output_throughput
    assert server.most == 4
    assert one.server == ServerSide(80, 44, 0, 0.25)
    assert "25% of the prompts came from the prefix cache" in " ".join(remarks(result))


def test_no_two_prompts_are_alike_and_each_has_its_length(server: Server) -> None:
    measured(server)
    assert all(len(prompt) == 20 and set(prompt) <= set(range(40, 90)) for prompt in server.prompts)
    assert len({tuple(prompt[:8]) for prompt in server.prompts}) == len(server.prompts)
    first = list(server.prompts)
    server.prompts.clear()
    measured(server, concurrencies=(1,))
    assert server.prompts[:5] == first[:5], "one seed gives one set of prompts"


def test_a_server_without_a_tokenizer_or_counters(server: Server) -> None:
    server.tokenizes = server.counts = False
    result = measured(server, concurrencies=(1,))
    assert all(isinstance(prompt, str) and len(prompt.split()) == 20 for prompt in server.prompts)
    assert (result.points[0].server, result.points[0].agreed) == (None, None)
    assert "could not be read" in " ".join(remarks(result))


def test_somebody_else_on_the_server_is_noticed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Handler.stream

    def noisy(self: Handler, body: dict[str, Any]) -> None:
        server.miscounts += 5
        stream(self, body)

    monkeypatch.setattr(Handler, "stream", noisy)
    result = measured(server, concurrencies=(1,))
    assert result.points[0].agreed is False
    assert "somebody else uses the server" in " ".join(remarks(result))


def test_failed_requests_are_counted_and_told(server: Server) -> None:
    server.fails_from = 2 + 1
    result = measured(server)
    assert (result.points[0].requests, result.points[0].failed, result.failed) == (1, 3, True)
    assert "EngineCore encountered an issue" in result.points[0].errors[0]
    assert len(result.points) == 2, "a server that is healthy is asked on"


def test_a_stream_that_breaks_is_a_failed_request(server: Server) -> None:
    server.breaks = True
    with pytest.raises(DuopackError, match="does not answer"):
        measured(server)


def test_a_server_that_is_gone_ends_the_sweep(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.fails_from = 3
    monkeypatch.setattr(ServerClient, "healthy", lambda _: False)
    assert len(measured(server).points) == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model": "other"}, "serves tiny"),
        ({"input_tokens": 4090}, "do not fit"),
        ({"tool": "vllm"}, "no vllm on PATH"),
    ],
)
def test_what_cannot_be_measured(server: Server, more: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        measured(server, **more)


@pytest.mark.parametrize(
    "more",
    [
        {"concurrencies": ()},
        {"concurrencies": (0,)},
        {"output_tokens": 0},
        {"input_tokens": -1},
        {"requests": 0},
    ],
)
def test_what_nobody_can_want(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        wanted(**more)


def test_the_command(server: Server, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "secret-key"
    monkeypatch.setenv("VLLM_API_KEY", "secret-key")
    out, page = tmp_path / "b.json", tmp_path / "b.html"
    words = [
        "bench",
        server.url,
        "--with",
        "own",
        "--concurrency",
        "1,2",
        "--input-tokens",
        "20",
        "--output-tokens",
        "5",
    ]
    words += ["--requests", "2", "--quiet"]
    assert main([*words, "--out", str(out), "--html", str(page)]) == 0
    assert "agrees" in capsys.readouterr().out
    result = read_benchmark(out)
    assert [point.concurrency for point in result.points] == [1, 2]
    assert json.loads(out.read_text())["schema"] == "duopack-bench/1"
    assert "secret-key" not in out.read_text() + page.read_text()
    assert main([*words, "--baseline", str(out), "--tolerance", "0.9", "--json"]) == 0
    assert [row["concurrency"] for row in json.loads(capsys.readouterr().out)["compared"]] == [1, 2]
    better = as_value(result)
    better["points"][0]["output_throughput"] *= 100
    out.write_text(json.dumps(better))
    assert main([*words, "--baseline", str(out)]) == 1
    assert "slower" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--concurrency", "two"], "no list of numbers"),
        (["--concurrency", "2000"], "1 to 1024"),
        (["--baseline", "{tmp}/none"], "cannot be read"),
        (["--baseline", "{tmp}/text"], "no JSON"),
        (["--baseline", "{tmp}/other"], "its schema is duopack-bench/9"),
        (["--baseline", "{tmp}/damaged"], "damaged"),
        (["--baseline", "{tmp}/good"], "100 tokens in and 8 out"),
        (["--tolerance", "5"], "share"),
    ],
)
def test_wrong_use(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "other").write_text('{"schema": "duopack-bench/9"}')
    (tmp_path / "damaged").write_text('{"schema": "duopack-bench/1", "points": [{}]}')
    (tmp_path / "good").write_text(json.dumps(as_value(BENCHMARK)))
    assert main(["bench", "http://127.0.0.1:1", *(word.format(tmp=tmp_path) for word in arguments)]) == 2
    assert words in capsys.readouterr().err


def test_a_value_comes_back_as_it_was() -> None:
    bare = replace(POINT, ttft=None, tpot=None, server=None, agreed=None, errors=("x",))
    whole = replace(BENCHMARK, points=(POINT, bare))
    assert from_value(json.loads(json.dumps(as_value(whole))), where="x") == whole


@pytest.mark.parametrize("value", [None, [], 3, {}, {"schema": "duopack-bench/1"}])
def test_values_that_are_none(value: Any) -> None:
    with pytest.raises(UsageError):
        from_value(value, where="x")


def test_what_is_compared_and_what_not() -> None:
    slow = replace(BENCHMARK, points=(replace(POINT, output_throughput=94.0), replace(POINT, concurrency=9)))
    (one,) = compare(slow, BENCHMARK, tolerance=0.05)
    assert (one.concurrency, one.output_throughput, one.ttft, one.slower) == (4, 0.94, 1.0, True)
    assert not compare(slow, BENCHMARK, tolerance=0.07)[0].slower
    check_comparable(BENCHMARK, input_tokens=100, output_tokens=8, at=(1, 4))
    with pytest.raises(UsageError, match="no concurrency in common"):
        check_comparable(BENCHMARK, input_tokens=100, output_tokens=8, at=(1, 2))


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert spread([number / 1000 for number in range(1, 101)]) == Spread(50.5, 50.0, 90.0, 99.0)
    assert spread([0.002]) == Spread(2.0, 2.0, 2.0, 2.0)
    assert spread([]) is None


def test_counters_are_summed_over_engines_and_survive_rubbish() -> None:
    text = (
        'vllm:generation_tokens_total{engine="0"} 10.0\nvllm:generation_tokens_total{engine="1"} 1e2\n'
        'vllm:prompt_tokens_total 7\nvllm:num_preemptions_total{a="}"} 1\nvllm:prefix_cache_hits_total nan\n'
        "vllm:prompt_tokens_total ++\nprocess_cpu_seconds_total 9\nvllm:generation_tokens_created{} 5\n"
    )
    counters = parse_counters(text)
    assert (counters.generation_tokens, counters.prompt_tokens, counters.preemptions) == (110.0, 7.0, 1.0)
    assert counters.since(Counters(generation_tokens=100)).generation_tokens == 10.0


def test_events_in_pieces_of_any_size() -> None:
    stream = b': ping\n\ndata: {"a": 1}\r\n\r\ndata:{"a": 2}\n\ndata: [DONE]\n\n'
    for size in range(1, len(stream)):
        pieces = (stream[at : at + size] for at in range(0, len(stream), size))
        assert list(events(pieces)) == [{"a": 1}, {"a": 2}]
    for broken in (b"data: {\n", b"data: 3\n", b"data: " + b"[" * 100_000 + b"\n"):
        with pytest.raises(DuopackError):
            list(events(iter([broken])))
    with pytest.raises(DuopackError, match="longer than"):
        list(events(iter([b"data: " + b"x" * MAX_EVENT, b"x"])))


def test_the_page_is_whole_and_asks_nobody() -> None:
    hostile = replace(BENCHMARK, model="<script>alert(1)</script>", points=(replace(POINT, errors=("<b>",)),))
    page = as_html(hostile, compare(hostile, BENCHMARK, tolerance=0.05), BENCHMARK)
    assert "<script" not in page
    assert "<b>" not in page
    assert page.count("<svg ") == 3
    assert "src=" not in page
    assert [word for word in page.split('"') if word.startswith("http")] == ["http://www.w3.org/2000/svg"] * 3
    for part in page.split("<svg ")[1:]:
        ElementTree.fromstring("<svg " + part.partition("</svg>")[0] + "</svg>")


def test_lines_stay_inside_of_their_picture() -> None:
    picture = svg_lines(
        "t", [Series("a", [(1, 0.0), (2, 731.0), (64, 5.0)]), Series("b", [])], x_label="x", y_label="y"
    )
    root = ElementTree.fromstring(picture)
    circles = root.findall("{http://www.w3.org/2000/svg}circle")
    assert [float(circle.get("cx", "0")) for circle in circles] == [70.0, 350.0, 630.0]
    assert all(40 <= float(circle.get("cy", "0")) <= 260 for circle in circles)
    ElementTree.fromstring(svg_lines("none", [], x_label="x", y_label="y"))
    assert [nice_ceiling(value) for value in (0, 0.3, 1, 1.1, 731, 2500)] == [
        1.0,
        0.5,
        1.0,
        2.0,
        1000.0,
        2500.0,
    ]


FAKE_VLLM = """#!/usr/bin/env python3
import json, pathlib, sys
words = sys.argv[1:]
assert words[:2] == ["bench", "serve"], words
given = dict(zip(words, words[1:]))
if given["--random-input-len"] == "13":
    sys.exit("ValueError: unlucky")
count, made = int(given["--num-prompts"]), int(given["--random-output-len"])
result = {"duration": 2.0, "completed": count, "failed": 0, "total_input_tokens": count * 20,
  "total_output_tokens": count * made, "output_throughput": count * made / 2, "total_token_throughput": 99.0,
  "mean_ttft_ms": 5.0, "p50_ttft_ms": 4.0, "p90_ttft_ms": 6.0, "p99_ttft_ms": 7.0,
  "mean_tpot_ms": 1.0, "p50_tpot_ms": 1.5, "p90_tpot_ms": 2.0, "p99_tpot_ms": 3.0, "errors": ["", ""]}
if given["--random-input-len"] == "14":
    result = []
pathlib.Path(given["--result-dir"], given["--result-filename"]).write_text(json.dumps(result))
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> Path:
    """A `vllm` on PATH that writes the result file of 0.20.2; the model's directory is there."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/vllm").write_text(FAKE_VLLM)
    (tmp_path / "bin/vllm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    do_get = Handler.do_GET

    def models(self: Handler) -> None:
        if self.path == "/v1/models":
            self.reply(200, {"data": [{"id": "tiny", "root": str(tmp_path), "max_model_len": 4096}]})
        else:
            do_get(self)

    monkeypatch.setattr(Handler, "do_GET", models)
    return tmp_path


def test_vllms_own_tool_is_used_where_it_is(server: Server, vllm: Path) -> None:
    result = measured(server, tool="auto", concurrencies=(4,))
    (point,) = result.points
    assert result.tool == "vllm bench serve"
    assert (point.requests, point.seconds, point.output_throughput) == (4, 2.0, 22.0)
    assert (point.ttft, point.tpot) == (Spread(5.0, 4.0, 6.0, 7.0), Spread(1.0, 1.5, 2.0, 3.0))
    assert point.agreed is False, "the server made nothing of what the tool says"
    assert measured(server, tool="own", concurrencies=(1,)).tool == "duopack"


@pytest.mark.parametrize(("tokens", "words"), [(13, "ended with 1: ValueError: unlucky"), (14, "no object")])
def test_vllms_own_tool_fails(server: Server, vllm: Path, tokens: int, words: str) -> None:
    with pytest.raises(DuopackError, match=words):
        measured(server, tool="vllm", input_tokens=tokens)


def test_every_word_of_vllms_command_is_an_option_of_0_20_2() -> None:
    order = vllm_bench.Order("http://h:1", "m", "/t", 1, 2, 3, 4, 5)
    command = vllm_bench.command(order, directory="/d", file="f")
    known = set((Path(__file__).parent / "data/vllm-0.20.2-bench-serve-options.txt").read_text().split())
    assert {word for word in command if word.startswith("--")} <= known


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"completed": 1}', '{"completed": "many"}'])
def test_results_that_are_none(text: str) -> None:
    with pytest.raises(DuopackError, match="cannot be read"):
        vllm_bench.point_of(text, vllm_bench.Order("u", "m", "t", 1, 1, 1, 1, 0))


class FakeContainer:
    """The server's container, with vLLM 0.20.2's tool in it."""

    name = "vllm-9b"

    def __init__(self, *, fails: bool = False) -> None:
        self.attrs: dict[str, Any] = {
            "NetworkSettings": {"Ports": {"12320/tcp": [{"HostPort": "12322"}], "9/tcp": None}}
        }
        self.ran: list[list[str]] = []
        self.fails = fails

    def exec_run(self, words: list[str]) -> tuple[int, bytes]:
        self.ran.append(words)
        if words[0] == "cat":
            count = int(self.ran[0][self.ran[0].index("--num-prompts") + 1])
            result = {"completed": count, "failed": 0, "duration": 1.0, "output_throughput": 9.0}
            times = {
                f"{kind}_{what}_ms": 1.0
                for kind in ("mean", "p50", "p90", "p99")
                for what in ("ttft", "tpot")
            }
            return 0, json.dumps(result | times | {"total_token_throughput": 10.0}).encode()
        return (1, b"no tokenizer\nOSError: gone") if self.fails else (0, b"")


def test_vllms_own_tool_inside_of_the_servers_container(server: Server) -> None:
    container = FakeContainer()
    client = ServerClient(server.url)
    result = bench(client, wanted(concurrencies=(2,)), lambda _: None, container)  # type: ignore[arg-type]
    assert (result.tool, result.points[0].output_throughput) == ("vllm bench serve", 9.0)
    measure, read, removed = container.ran
    assert measure[:3] == ["vllm", "bench", "serve"]
    assert measure[measure.index("--tokenizer") + 1] == "/models/tiny"
    assert read[0] == "cat"
    assert removed[:2] == ["rm", "-f"]
    assert read[1] == removed[2]


def test_the_servers_address_inside_of_its_container() -> None:
    container: Any = FakeContainer()
    assert inner_url("http://host:12322", container) == "http://127.0.0.1:12320"
    assert inner_url("http://host:8000", container) == "http://127.0.0.1:8000", "--net=host"


def test_vllms_own_tool_fails_inside(server: Server) -> None:
    container: Any = FakeContainer(fails=True)
    with pytest.raises(DuopackError, match="OSError: gone"):
        bench(ServerClient(server.url), wanted(), lambda _: None, container)
