"""A small load generator: some requests at a time, streamed, with the time of each token by the client's clock.

One thread for each request at a time is enough: a 310P gives some hundred tokens a second.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pipeline.errors import DuopackError, quoted
from pipeline.serving.client import ServerClient

MAX_EVENT = 1 << 20
"""Bytes of one event of a stream; a longer one is a fault."""
_TEXT = (
    "The quick brown fox jumps over the lazy dog. 人工智能正在改变我们的生活，大语言模型可以回答问题、写作和编程。 "
    "A server that answers many people at once shares its chip among them, one token at a time. 1234567890 "
)
_SILENCE = 600.0
"""Seconds without a byte after which a request has failed."""


@dataclass(frozen=True)
class Sample:
    """One request: seconds to its first token and for the whole, and the tokens that the server says it read and made.

    `error` is "" when it was answered.
    """

    first: float = 0.0
    whole: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def per_token(self) -> float | None:
        """Seconds for each token after the first; None for a single one."""
        return (self.whole - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True)
class Load:
    """What is asked for: `prompts` are token ids or texts, and each answer has exactly `output_tokens`."""

    model: str
    prompts: tuple[Any, ...]
    output_tokens: int


def make_prompts(client: ServerClient, model: str, *, count: int, tokens: int, seed: str) -> tuple[Any, ...]:
    """`count` prompts of `tokens` tokens, no two alike from their first tokens on, so that no prefix cache helps.

    They are token ids of the server's own tokenizer; a server without `/tokenize` gets words, about as many.
    """
    answer = client.ask(
        "POST", "/tokenize", {"model": model, "prompt": _TEXT, "add_special_tokens": False}, timeout=60
    )
    ids = answer.body.get("tokens") if answer.status == 200 and isinstance(answer.body, dict) else None
    source = random.Random(seed)
    if isinstance(ids, list) and ids and all(isinstance(one, int) for one in ids):
        return tuple([source.choice(ids) for _ in range(tokens)] for _ in range(count))
    words = _TEXT.split()
    return tuple(" ".join(source.choice(words) for _ in range(tokens)) for _ in range(count))


def run_load(client: ServerClient, load: Load, concurrency: int) -> tuple[tuple[Sample, ...], float]:
    """Sends all prompts, `concurrency` at a time; returns what became of each, and the seconds for all.

    A request that fails is a sample with an error. Ctrl-C ends it after the requests that run.
    """
    ended = threading.Event()

    def send(prompt: Any) -> Sample:
        return Sample(error="not sent") if ended.is_set() else _send(client, load, prompt)

    started = time.monotonic()
    with ThreadPoolExecutor(concurrency, thread_name_prefix="load") as pool:
        try:
            samples = tuple(pool.map(send, load.prompts))
        except BaseException:
            ended.set()
            raise
    return samples, time.monotonic() - started


def _send(client: ServerClient, load: Load, prompt: Any) -> Sample:
    body = {
        "model": load.model,
        "prompt": prompt,
        "max_tokens": load.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.monotonic()
    first = last = 0.0
    usage: dict[str, Any] = {}
    try:
        with client.stream("POST", "/v1/completions", body, timeout=_SILENCE) as response:
            for event in events(response.stream(1 << 16)):
                if error := event.get("error"):
                    return Sample(error=quoted(str(error)))
                if event.get("choices"):
                    last = time.monotonic() - started
                    first = first or last
                usage = event.get("usage") or usage
    except DuopackError as error:
        return Sample(error=str(error))
    made = usage.get("completion_tokens")
    if not isinstance(made, int) or not first:
        return Sample(error="the stream ended without an answer")
    return Sample(first, last, int(usage.get("prompt_tokens") or 0), made)


def events(chunks: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON values of a stream of server-sent events, in pieces of any size.

    Raises DuopackError for an event that is too long or no JSON object.
    """
    kept = b""
    for chunk in chunks:
        *lines, kept = (kept + chunk).split(b"\n")
        if len(kept) > MAX_EVENT:
            raise DuopackError(f"an event of the stream is longer than {MAX_EVENT} bytes")
        for line in lines:
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data and data != b"[DONE]":
                yield _event(data)


def _event(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DuopackError(
            f"an event of the stream is no JSON: {quoted(data.decode('utf-8', 'replace'), 80)}"
        ) from error
    if not isinstance(value, dict):
        raise DuopackError("an event of the stream is no JSON object")
    return value


def totals(samples: Sequence[Sample]) -> tuple[int, int]:
    """Tokens read and made, over the answered requests."""
    answered = [sample for sample in samples if not sample.error]
    return sum(sample.input_tokens for sample in answered), sum(sample.output_tokens for sample in answered)
