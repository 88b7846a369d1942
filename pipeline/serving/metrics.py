"""A server's own counters, from `/metrics` (Prometheus text; names as of vLLM 0.20.2)."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from pipeline.errors import DuopackError, quoted
from pipeline.serving.client import ServerClient

_SAMPLE = re.compile(r"(vllm:[a-z_]{1,80})(?:\{.*\})? ([0-9.eE+-]{1,40})(?: \d{1,20})?")
_NAMES = {
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:request_success_total": "requests",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
}


@dataclass(frozen=True)
class Counters:
    """Tokens and requests since the server's start, over all its engines; `running` and `waiting` are now."""

    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    prefix_queries: float = 0.0
    prefix_hits: float = 0.0
    preemptions: float = 0.0
    requests: float = 0.0
    running: float = 0.0
    waiting: float = 0.0

    def since(self, earlier: Counters) -> Counters:
        """What was added; a server that was started anew in between has less than before, and that is negative."""
        return Counters(*(getattr(self, one.name) - getattr(earlier, one.name) for one in fields(Counters)))


def parse_counters(text: str) -> Counters:
    """The counters in the text of `/metrics`, each summed up over its labels; absent ones are 0."""
    sums = dict.fromkeys(_NAMES.values(), 0.0)
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line) if line.startswith("vllm:") else None
        name = _NAMES.get(match[1]) if match else None
        if match and name:
            sums[name] += _number(match[2])
    return Counters(**sums)


def read_counters(client: ServerClient) -> Counters:
    """The server's counters now. Raises DuopackError when it has none."""
    answer = client.ask("GET", "/metrics", timeout=30)
    if answer.status != 200 or not isinstance(answer.body, str) or "vllm:" not in answer.body:
        raise DuopackError(
            f"/metrics answered {answer.status} without vLLM's counters: {quoted(str(answer.body), 80)}",
            where=client.url,
            mend="check that the address is a vLLM server's",
        )
    return parse_counters(answer.body)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
