"""Does it answer? A short, strict look at a running server: not whether it is healthy, but what it says.

Measured on vLLM 0.20.2: a server with one wrong flag passes `/health` and dies at its first request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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


@dataclass(frozen=True)
class _Question:
    """A check to run: it returns whether it passed, and the evidence. It makes no sense unless `needs` passed."""

    id: str
    ask: Callable[[], tuple[bool, str]]
    needs: str | None = None


def smoke(client: ServerClient, model: Model, profile: Profile) -> tuple[Check, ...]:
    """Runs the checks in order; one whose precondition failed would only repeat that, and is skipped."""
    checks: dict[str, Check] = {}
    for question in _questions(client, model, profile):
        if question.needs and checks[question.needs].verdict != "pass":
            checks[question.id] = Check(question.id, "skip", f"it needs '{question.needs}'", 0.0)
            continue
        started = time.monotonic()
        try:
            passed, evidence = question.ask()
        except DuopackError as error:
            passed, evidence = False, str(error)
        seconds = round(time.monotonic() - started, 3)
        checks[question.id] = Check(question.id, "pass" if passed else "fail", evidence, seconds)
    return tuple(checks.values())


def _questions(client: ServerClient, model: Model, profile: Profile) -> tuple[_Question, ...]:
    answers: list[str] = []

    def healthy() -> tuple[bool, str]:
        status = client.ask("GET", "/health", timeout=10).status
        return status == 200, f"/health answers {status}"

    def answered() -> tuple[bool, str]:
        text = client.chat(profile.served_name, QUESTION, max_tokens=MAX_TOKENS)
        answers.append(text)
        fault = degenerate(text)
        if fault and "degenerate-answer" in model.allow:
            return True, f"the catalog allows it: {fault}"
        return fault is None, fault or f"answered: {quoted(text, 120)}"

    def repeated() -> tuple[bool, str]:
        again = client.chat(profile.served_name, QUESTION, max_tokens=MAX_TOKENS)
        if again == answers[0]:
            return True, "the same greedy request gives the same text"
        return False, f"then it answered: {quoted(again, 120)}"

    def refused() -> tuple[bool, str]:
        body = {"model": "no-such-model", "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
        status = client.ask("POST", "/v1/chat/completions", body).status
        return status == 404, f"an unknown model is answered with {status}"

    return (
        _Question("healthy", healthy),
        _Question("served-model", lambda: _served(client, model, profile), needs="healthy"),
        _Question("answers", answered, needs="served-model"),
        _Question("repeatable", repeated, needs="answers"),
        _Question("unknown-model-404", refused, needs="healthy"),
        _Question("still-healthy", healthy, needs="healthy"),
    )


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
