"""What clients meet: names, ports, parsers."""

from __future__ import annotations

import re

from pipeline.ascend.rules.case import Case
from pipeline.ascend.rules.rule import Rule, Severity, when

NAME, PARSER = "--served-model-name", "--tool-call-parser"
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def _no_name(case: Case) -> str | None:
    return when(case.written and not case.line.has(NAME), case.line.model)


def _other_size(case: Case) -> str | None:
    """A size or family in the served name that the weights' directory does not have."""
    name, path = (case.line.value(NAME) or "").lower(), case.line.model.lower()
    sizes = re.findall(r"(?<![a-z0-9.])(\d+(?:\.\d+)?b)(?![a-z0-9])", name)
    wrong = [size for size in sizes if not re.search(rf"(?<![0-9.]){re.escape(size)}(?![a-z0-9])", path)]
    sized = re.search(r"(?<![0-9.])\d+(?:\.\d+)?b(?![a-z0-9])", path)
    return when(wrong and sized, f"{name} for {case.line.model}")


def _port(case: Case) -> str | None:
    port = case.line.number("--port")
    return when(port is not None and not 1024 <= port <= 65535, port)


RULES: tuple[Rule[Case], ...] = (
    Rule(
        "served-name-missing",
        Severity.WARNING,
        NAME,
        _no_name,
        "no served name is given: clients must send the path {} as model, and get 404 for any other",
        f"give {NAME} and a short name",
        "vLLM's OpenAI-compatible server: the model's name is its path unless said",
    ),
    Rule(
        "served-name-other",
        Severity.WARNING,
        f"{NAME}, the directory of the weights",
        _other_size,
        "the served name is {}: clients would believe to speak to another model",
        "name what is served",
        "the deployment guide, chapter 8.3",
    ),
    Rule(
        "port",
        Severity.WARNING,
        "--port",
        _port,
        "port {} is outside 1024 to 65535: it needs special rights, or does not exist",
        "use 12320, as the deployment guide does",
        "the deployment guide, chapter 8.5",
    ),
    Rule(
        "host-loopback",
        Severity.WARNING,
        "--host",
        lambda case: when(case.line.value("--host") in _LOOPBACK, case.line.value("--host")),
        "the server listens on {} only: a published port of the container does not reach it",
        "give --host 0.0.0.0",
        "docker's port mapping goes to the container's own address",
        fix=lambda case: case.line.with_option("--host", "0.0.0.0"),
    ),
    Rule(
        "tool-parser-missing",
        Severity.ERROR,
        f"--enable-auto-tool-choice, {PARSER}",
        lambda case: when(case.line.switch("--enable-auto-tool-choice") and not case.line.has(PARSER)),
        "--enable-auto-tool-choice without a parser: vLLM refuses to start",
        f"give {PARSER} (qwen3_coder for Qwen3.5, hermes for Qwen3)",
        "vLLM's check of its server arguments",
        fix=lambda case: case.line.with_option(PARSER, "qwen3_coder" if case.hybrid else "hermes"),
    ),
)
