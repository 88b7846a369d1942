"""Does it answer? A short, strict look at a running server: not whether it is healthy, but what it says.

Measured on vLLM 0.20.2: a server with one wrong flag passes `/health` and dies at its first request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from pipeline.catalog.schema import Model, Profile
from pipeline.errors import DuopackError, quoted
from pipeline.serving.client import ServerClient

Verdict = Literal["pass", "fail", "skip"]
QUESTION = "你好，请用一句话介绍一下自己。"
MAX_TOKENS = 96


@dataclass(frozen=True)
class Check:
    """One question to the server and what came of it; `seconds` is how long it took."""

    id: str
    verdict: Verdict
    evidence: str
    seconds: float


def smoke(client: ServerClient, model: Model, profile: Profile) -> tuple[Check, ...]:
    """Runs the checks in order; after a failure the rest are skipped, since they would only repeat it."""
    checks: list[Check] = []
    for name, run in _checks(client, model, profile):
        if checks and checks[-1].verdict != "pass":
            checks.append(Check(name, "skip", "an earlier check failed", 0.0))
            continue
        started = time.monotonic()
        try:
            verdict, evidence = run()
        except DuopackError as error:
            verdict, evidence = False, str(error)
        checks.append(
            Check(name, "pass" if verdict else "fail", evidence, round(time.monotonic() - started, 3))
        )
    return tuple(checks)


def _checks(
    client: ServerClient, model: Model, profile: Profile
) -> Iterator[tuple[str, Callable[[], tuple[bool, str]]]]:
    answers: list[str] = []

    def healthy() -> tuple[bool, str]:
        ok = client.healthy()
        return ok, "/health answers 200" if ok else "/health does not answer 200"

    def served() -> tuple[bool, str]:
        return _served(client, model, profile)

    def answered() -> tuple[bool, str]:
        answers.append(client.chat(profile.served_name, QUESTION, max_tokens=MAX_TOKENS))
        fault = degenerate(answers[0])
        return fault is None, fault or f"answered: {quoted(answers[0], 120)}"

    def repeatable() -> tuple[bool, str]:
        again = client.chat(profile.served_name, QUESTION, max_tokens=MAX_TOKENS)
        same = again == answers[0]
        return (
            same,
            "the same greedy request gives the same text"
            if same
            else f"then it answered: {quoted(again, 120)}",
        )

    def refused() -> tuple[bool, str]:
        body = {"model": "no-such-model", "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
        status = client.ask("POST", "/v1/chat/completions", body).status
        return status == 404, f"an unknown model is answered with {status}"

    yield "healthy", healthy
    yield "served-model", served
    yield "answers", answered
    yield "repeatable", repeatable
    yield "unknown-model-404", refused
    yield "still-healthy", healthy


def _served(client: ServerClient, model: Model, profile: Profile) -> tuple[bool, str]:
    models = client.models()
    found = next((row for row in models if row.name == profile.served_name), None)
    if found is None:
        names = ", ".join(quoted(row.name) for row in models) or "nothing"
        return False, f"it serves {names}, not {profile.served_name}"
    wanted = "/".join(filter(None, ("/models", model.directory, profile.weights)))
    if found.root.rstrip("/") != wanted:
        return (
            False,
            f"{found.name} is served from {quoted(found.root)}, not from {wanted}: name and weights disagree",
        )
    return True, f"{found.name} from {found.root}, max_model_len {found.max_model_len}"


def degenerate(text: str) -> str | None:
    """Why a text is not an answer: nothing, broken characters, or one thing over and over; None when it is one.

    `!!!!` from the first token is what 310P says when `deq_scale` is not int64, or the weights are for A2/A3.
    """
    stripped = text.strip()
    if not stripped:
        return "the answer is empty"
    if "\ufffd" in stripped.rstrip("\ufffd"):
        return f"the answer has broken characters: {quoted(stripped, 80)}"
    if len(stripped) >= 16 and len(set(stripped)) <= 2:
        return f"the answer is one character over and over: {quoted(stripped, 80)}"
    words = stripped.split()
    if len(words) >= 16 and len(set(words)) <= 2:
        return f"the answer is one word over and over: {quoted(stripped, 80)}"
    return None
