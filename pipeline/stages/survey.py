"""What runs where: containers with chips, what each really serves, and where name and model disagree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.ascend.npu_smi import NpuSmi
from pipeline.ascend.rules.container import names_agree
from pipeline.errors import DuopackError, quoted
from pipeline.serving.client import ServerClient
from pipeline.stages.containers import Held

SECONDS = 2.0


@dataclass(frozen=True)
class Answered:
    """What a server said of itself: the served name and the directory of its weights."""

    served: str
    root: str


@dataclass(frozen=True)
class Row:
    """A container as it is: what it serves by its own word where it answers, else by its image's."""

    name: str
    image: str
    model: str
    served: str
    chips: tuple[int, ...] | None
    ports: tuple[int, ...]
    state: str
    health: str
    answers: bool
    warnings: tuple[str, ...]


def ask_servers(held: Sequence[Held], host: str) -> dict[str, Answered]:
    """The answers of those that run and publish a port, by container; who does not answer is left out."""
    answers = {}
    for one in held:
        for port in one.ports if one.state == "running" else ():
            if found := _ask(f"http://{host}:{port}"):
                answers[one.name] = found
    return answers


def _ask(url: str) -> Answered | None:
    try:
        body = ServerClient(url).ask("GET", "/v1/models", timeout=SECONDS).body
        first = body["data"][0]
        return Answered(quoted(str(first["id"])), quoted(str(first.get("root") or "")))
    except (DuopackError, TypeError, KeyError, IndexError, AttributeError):
        return None


def survey(held: Sequence[Held], answers: dict[str, Answered], npu: NpuSmi | None) -> tuple[Row, ...]:
    """One row a container, with what a person should know of it."""
    return tuple(_row(one, held, answers.get(one.name), npu) for one in held)


def _row(one: Held, held: Sequence[Held], answer: Answered | None, npu: NpuSmi | None) -> Row:
    served = answer.served if answer else one.served
    model = answer.root.rstrip("/").rpartition("/")[2] if answer and answer.root else one.model
    return Row(
        name=one.name,
        image=one.image,
        model=quoted(model),
        served=quoted(served),
        chips=one.chips,
        ports=one.ports,
        state=one.state,
        health=one.health,
        answers=answer is not None,
        warnings=tuple(_warnings(one, held, served, answer, npu)),
    )


def _warnings(
    one: Held, held: Sequence[Held], served: str, answer: Answered | None, npu: NpuSmi | None
) -> list[str]:
    found = []
    if served and not names_agree(one.name, served):
        found.append(f"it is called {one.name} and serves {quoted(served)}: requests go to the wrong model")
    if answer and one.served and answer.served != one.served:
        found.append(f"its image serves {quoted(one.served)}, and it answers as {answer.served}")
    others = [
        other.name
        for other in held
        if other is not one and other.running and one.running and _shares(one, other)
    ]
    if others:
        found.append(f"it shares chips with {', '.join(others)}")
    if one.state in {"exited", "dead"}:
        memory = ": out of host memory?" if one.exit_code == 137 else ""
        found.append(f"it has ended with exit code {one.exit_code}{memory} (docker logs {one.name})")
    if one.state == "restarting" or (one.restarts and one.health != "healthy"):
        found.append(f"it was started again {one.restarts} times (docker logs {one.name})")
    if one.health == "unhealthy":
        found.append(f"it does not answer its health check (docker logs {one.name})")
    for chip in one.chips or ():
        seen = npu.chip(chip) if npu else None
        if seen and not seen.healthy:
            found.append(f"chip {chip}: its health is {quoted(seen.health)}")
    return found


def _shares(one: Held, other: Held) -> bool:
    if one.chips is None or other.chips is None:
        return bool(one.chips is None and other.chips) or bool(other.chips is None and one.chips)
    return bool(set(one.chips) & set(other.chips))


def strangers(held: Sequence[Held], npu: NpuSmi | None) -> tuple[str, ...]:
    """Processes on chips that no container has, one line a chip."""
    lines = []
    for chip in npu.chips if npu else ():
        pids = {pid for one in held for pid in one.pids}
        names = (
            [f"{one.pid} ({quoted(one.name)})" for one in npu.on(chip) if one.pid not in pids] if npu else []
        )
        if names and not any(one.running and one.has(chip.device) for one in held):
            lines.append(
                f"chip {chip.device} is used by process {', '.join(names)}, in no container that is seen"
            )
    return tuple(lines)
