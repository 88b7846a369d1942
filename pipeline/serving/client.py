"""A client of vLLM's OpenAI-compatible API, as far as a check needs it.

What the server answers was measured on vLLM 0.20.2: `/health` is 200 and empty and says nothing about
whether a request works; `/v1/models` names the weights in `root`; with a reasoning parser an answer cut by
`max_tokens` has its text in `message.reasoning` and a null `content`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import DuopackError, UsageError, quoted

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

MAX_ANSWER = 16 << 20


@dataclass(frozen=True)
class Answer:
    """An HTTP answer: its status and its body, parsed where it is JSON, else text."""

    status: int
    body: Any


@dataclass(frozen=True)
class ServedModel:
    """A row of `/v1/models`."""

    name: str
    root: str
    max_model_len: int | None


class ServerClient:
    """One server at a base URL such as http://127.0.0.1:12320; times in seconds.

    `connections` is how many requests may be under way at a time; threads can share a client.
    """

    def __init__(
        self, url: str, *, timeout: float = 300.0, api_key: str | None = None, connections: int = 1
    ) -> None:
        import urllib3

        if "@" in url.partition("?")[0]:
            raise UsageError(
                "the server's address has a user name or a password in it",
                mend="write http://HOST:PORT, and give a key as VLLM_API_KEY",
            )
        if not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", url):
            raise UsageError(f"'{quoted(url)}' is not a server's address", mend="write http://HOST:PORT")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout
        self._pool = urllib3.PoolManager(retries=False, maxsize=connections)

    def healthy(self) -> bool:
        """Whether `/health` answers 200 now; a server that does not listen yet is not an error here."""
        try:
            return self.ask("GET", "/health", timeout=10).status == 200
        except DuopackError:
            return False

    def models(self) -> tuple[ServedModel, ...]:
        """What the server says it serves. Raises DuopackError for anything but a model list."""
        answer = self.ask("GET", "/v1/models", timeout=30)
        try:
            return tuple(
                ServedModel(str(row["id"]), str(row.get("root", "")), row.get("max_model_len"))
                for row in answer.body["data"]
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise DuopackError(
                f"/v1/models answered {answer.status} with {_shown(answer.body)}",
                where=self.url,
                mend="check that the address is a vLLM server's",
            ) from error

    def chat(self, model: str, question: str, *, max_tokens: int) -> str:
        """The text of a greedy answer, reasoning included. Raises DuopackError when there is none."""
        request = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": 0,
        }
        answer = self.ask("POST", "/v1/chat/completions", request)
        try:
            message = answer.body["choices"][0]["message"]
            return (message.get("reasoning") or message.get("reasoning_content") or "") + (
                message["content"] or ""
            )
        except (TypeError, KeyError, IndexError, AttributeError) as error:
            raise DuopackError(
                f"a chat completion was answered with {answer.status}: {_shown(answer.body)}",
                where=self.url,
                mend="read the server's log: its first error is the cause",
            ) from error

    @contextmanager
    def stream(self, method: str, path: str, body: Any, *, timeout: float) -> Iterator[BaseHTTPResponse]:
        """An answer that is read as it comes; `timeout` is for each piece. The connection is closed when it is left
        in the middle. Raises DuopackError for any status but 200, and when the stream breaks.
        """
        import urllib3

        try:
            response = self._pool.request(
                method,
                self.url + path,
                body=json.dumps(body).encode(),
                headers=self._headers,
                timeout=timeout,
                preload_content=False,
            )
            try:
                if response.status != 200:
                    said = response.read(4096).decode("utf-8", "replace")
                    raise DuopackError(f"{method} {path} was answered with {response.status}: {quoted(said)}")
                yield response
                response.drain_conn()
                response.release_conn()
            finally:
                response.close()
        except urllib3.exceptions.HTTPError as error:
            raise DuopackError(
                f"no whole answer to {method} {path}: {quoted(str(error))}", where=self.url
            ) from error

    def ask(self, method: str, path: str, body: Any = None, *, timeout: float | None = None) -> Answer:
        """Sends one request and reads the whole answer, at most 16 MiB."""
        import urllib3

        try:
            response = self._pool.request(
                method,
                self.url + path,
                body=None if body is None else json.dumps(body).encode(),
                headers=self._headers,
                timeout=timeout or self._timeout,
                preload_content=False,
            )
            try:
                data = response.read(MAX_ANSWER)
            finally:
                response.release_conn()
        except urllib3.exceptions.HTTPError as error:
            raise DuopackError(
                f"no answer to {method} {path}: {quoted(str(error))}",
                where=self.url,
                mend="check that the server runs and that the address and port are right",
            ) from error
        try:
            return Answer(response.status, json.loads(data))
        except (ValueError, RecursionError):
            return Answer(response.status, data.decode("utf-8", "replace"))


def _shown(body: Any) -> str:
    return quoted(body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)) or "nothing"
