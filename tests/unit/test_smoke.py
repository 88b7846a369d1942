"""`duopack smoke`: a server that is right passes, and every way of being wrong is told by its own check."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from support.project import refused

from pipeline.errors import DuopackError, UsageError
from pipeline.serving.client import MAX_ANSWER, ServerClient
from pipeline.stages.smoke import degenerate

GOOD = "你好！我是一个由通义千问训练的语言模型。"


class FakeServer(ThreadingHTTPServer):
    """Answers as vLLM 0.20.2 does, with what the attributes say."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: Any = [{"id": "tiny-one", "root": "/models/Tiny-One", "max_model_len": 4096}]
        self.answers: list[Any] = []
        self.message: dict[str, Any] = {"role": "assistant", "content": GOOD}
        self.chat_status = 200
        self.unknown_status = 404
        self.health = 200
        self.key: str | None = None
        self.dies_at_chat = False
        self.asked: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, value: Any = None) -> None:
        body = b"" if value is None else value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(self.server.health)
        elif self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.reply(401, {"error": "Unauthorized"})
        else:
            models = self.server.models
            self.reply(200, models if isinstance(models, bytes) else {"object": "list", "data": models})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.asked.append(request)
        if request["model"] != "tiny-one":
            self.reply(server.unknown_status, {"error": {"message": "does not exist"}})
            return
        if server.dies_at_chat:
            server.health = 503
        if server.chat_status != 200 or server.dies_at_chat:
            self.reply(
                server.chat_status if server.chat_status != 200 else 500, {"error": {"message": "EngineDead"}}
            )
            return
        message = {**server.message, "content": server.answers.pop(0)} if server.answers else server.message
        self.reply(200, {"choices": [{"message": message}]})


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def verdicts(
    project, server, *arguments: str, key: str = "one"
) -> tuple[int, dict[str, str], dict[str, str]]:
    ran = project.run("smoke", key, "--url", server.url, "--json", *arguments)
    checks = ran.json["checks"]
    assert ran.json["passed"] == (ran.code == 0)
    return (
        ran.code,
        {check["id"]: check["verdict"] for check in checks},
        {check["id"]: check["evidence"] for check in checks},
    )


ALL = ("healthy", "served-model", "answers", "repeatable", "unknown-model-404", "still-healthy")


def test_a_right_server_passes_every_check(project, server):
    code, found, _ = verdicts(project, server)
    assert (code, found) == (0, dict.fromkeys(ALL, "pass"))
    assert server.asked[0]["temperature"] == 0
    assert server.asked[0] == server.asked[1]
    ran = project.run("smoke", "one", "--url", f"{server.url}/v1/")
    assert ran.code == 0
    assert ran.out.count("pass") == len(ALL)


def test_text_that_ended_in_thinking_counts(project, server):
    server.message = {"role": "assistant", "content": None, "reasoning": GOOD}
    assert verdicts(project, server)[0] == 0


def test_a_wrong_name_and_wrong_weights_fail_as_such(project, server):
    server.models = [{"id": "qwen3-8b", "root": "/models/Tiny-One"}]
    code, found, evidence = verdicts(project, server)
    assert code == 1
    assert found["served-model"] == "fail"
    assert found["answers"] == found["repeatable"] == "skip"
    assert found["still-healthy"] == "pass"
    assert "it serves qwen3-8b, not tiny-one" in evidence["served-model"]
    server.models = [{"id": "tiny-one", "root": "/models/Tiny-Two"}]
    _, found, evidence = verdicts(project, server)
    assert found["served-model"] == "fail"
    assert "name and weights disagree" in evidence["served-model"]


def test_a_server_that_dies_at_its_first_request_is_told_by_two_checks(project, server):
    server.dies_at_chat = True
    code, found, evidence = verdicts(project, server)
    assert code == 1
    assert (found["answers"], found["still-healthy"]) == ("fail", "fail")
    assert "EngineDead" in evidence["answers"]


def test_an_answer_that_changes_fails(project, server):
    server.answers = [GOOD, "别的"]
    _, found, evidence = verdicts(project, server)
    assert (found["answers"], found["repeatable"]) == ("pass", "fail")
    assert "别的" in evidence["repeatable"]


def test_an_unknown_model_must_be_refused(project, server):
    server.unknown_status = 200
    _, found, evidence = verdicts(project, server)
    assert found["unknown-model-404"] == "fail"
    assert "200" in evidence["unknown-model-404"]


def test_nonsense_fails_unless_the_catalog_allows_it_by_name(project, server):
    server.message["content"] = "!" * 96
    code, found, evidence = verdicts(project, server)
    assert (code, found["answers"]) == (1, "fail")
    assert "over and over" in evidence["answers"]
    project.content["models"]["one"]["allow"] = ["degenerate-answer"]
    project.write()
    code, found, evidence = verdicts(project, server)
    assert (code, found["answers"]) == (0, "pass")
    assert "the catalog allows it" in evidence["answers"]


def test_control_characters_of_an_answer_reach_no_terminal(project, server):
    server.message["content"] = "\x1b[2J" + GOOD
    ran = project.run("smoke", "one", "--url", server.url)
    assert "\x1b" not in ran.out
    assert r"\x1b[2J" in ran.out


def test_no_server_and_another_program_on_the_port_are_told(project, server):
    server.models = b"<html>nginx</html>"
    _, found, evidence = verdicts(project, server)
    assert found["served-model"] == "fail"
    assert "nginx" in evidence["served-model"]
    server.shutdown()
    server.server_close()
    code, found, evidence = verdicts(project, server)
    assert (code, found["healthy"]) == (1, "fail")
    assert "refused" in evidence["healthy"]
    assert set(found.values()) == {"fail", "skip"}


def test_the_key_of_the_server_is_sent_and_never_shown(project, server, monkeypatch):
    server.key = "sk-very-secret"
    assert verdicts(project, server)[1]["served-model"] == "fail"
    monkeypatch.setenv("VLLM_API_KEY", "sk-very-secret")
    ran = project.run("smoke", "one", "--url", server.url, "--json")
    assert ran.code == 0
    assert "sk-very-secret" not in ran.out + ran.err


def test_the_address_may_come_from_the_environment(project, server, monkeypatch):
    monkeypatch.setenv("DUOPACK_SMOKE_URL", server.url)
    assert project.run("smoke", "one").code == 0


@pytest.mark.parametrize(
    "url", ["host:1", "ftp://h", "http://", "http://u:p@h:1", "http://h:1/?x", "http://h 1"]
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(UsageError) as caught:
        ServerClient(url)
    assert "u:p" not in str(caught.value)


def test_an_endless_answer_is_cut(server):
    server.models = b"[" * (MAX_ANSWER + 10)
    with pytest.raises(DuopackError, match="/v1/models answered 200"):
        ServerClient(server.url).models()


@pytest.mark.parametrize(
    "body", [[], {}, {"choices": []}, {"choices": [{"message": {"content": 5}}]}, "text"]
)
def test_an_answer_of_another_shape_is_an_error(server, monkeypatch, body):
    monkeypatch.setattr(Handler, "do_POST", lambda self: self.reply(200, body))
    with pytest.raises(DuopackError, match="a chat completion was answered with 200"):
        ServerClient(server.url).chat("m", "q", max_tokens=1)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "empty"),
        (" \n\t", "empty"),
        ("!" * 40, "one character"),
        ("! " * 40, "over and over"),
        ("好" * 40, "one character"),
        ("the the " * 20, "one word"),
        ("a\ufffdb", "broken"),
    ],
)
def test_what_is_no_answer(text, fault):
    assert fault in (degenerate(text) or "")


@pytest.mark.parametrize(
    "text", [GOOD, "是。", "ok", "哈哈哈哈哈哈", "4", "cut in a character\ufffd", "no no no"]
)
def test_what_is_an_answer(text):
    assert degenerate(text) is None


def test_without_an_address_an_image_and_chips_are_needed(project, monkeypatch):
    refused(project.run("smoke", "one"), 2, "an engine cannot start oci:", "--image", "--url")
    monkeypatch.setenv("DUOPACK_REGISTRY", "registry.example/x")
    monkeypatch.setattr("pipeline.ascend.container.visible_chips", lambda: ())
    refused(project.run("smoke", "nn1"), 1, "2 chips are needed", "shows 0")


@pytest.mark.parametrize("chips", ["0", "0,0", "0,1,2", "a,b", "0,", "²,1", "-1,0", "0 1", "00000,1"])
def test_chips_are_as_many_different_ids_as_the_profile_needs(project, chips):
    refused(
        project.run("smoke", "nn1", "--image", "x", f"--chips={chips}"), 2, "does not name 2 chips", "0,1"
    )


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "100000"])
def test_the_limit_is_a_time_that_passes(project, minutes):
    ran = project.run("smoke", "one", "--image", "x", "--chips", "0", f"--start-limit={minutes}")
    refused(ran, 2, "--start-limit")


def test_no_engine_is_one_paragraph(project, monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    refused(
        project.run("smoke", "one", "--image", "x", "--chips", "0"),
        1,
        "no docker engine answers",
        "DOCKER_HOST",
    )
