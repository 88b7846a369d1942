"""Judges commands that somebody wrote: each `vllm serve` and `docker run` of a text, and what it should be instead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.ascend.docker_line import DockerLine, read_docker_line
from pipeline.ascend.options import Problem, check_options
from pipeline.ascend.rules import (
    CONTAINER_RULES,
    RULES,
    Case,
    Finding,
    Severity,
    errors_first,
    judge_case,
    judge_container,
    judge_text,
)
from pipeline.ascend.rules.case import Served
from pipeline.ascend.rules.container import ContainerCase
from pipeline.ascend.serve_line import UNREAD, ServeLine, read_line
from pipeline.ascend.shell import Command, find_commands, plain
from pipeline.catalog.schema import Architecture, Base, Catalog, Quantization
from pipeline.catalog.target import find_target
from pipeline.errors import UsageError, quoted
from pipeline.stages.launch import option_finding
from pipeline.weights.shards.config import read_config
from pipeline.weights.shards.quantization import read_quantization

_ARCHITECTURES = {
    "Qwen3ForCausalLM": Architecture.QWEN3,
    "Qwen3MoeForCausalLM": Architecture.QWEN3_MOE,
    "Qwen3_5ForConditionalGeneration": Architecture.QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": Architecture.QWEN3_5_MOE,
}
ROUNDS = 8
"""A fix can show the next fault; after so many rounds they would chase each other."""


@dataclass(frozen=True)
class Reviewed:
    """One command: where it stands, what it serves, what is wrong with it, and the corrected one.

    `remaining` are the errors and warnings that the corrected command still has: they need a person.
    """

    where: str
    kind: str
    model: str
    findings: tuple[Finding, ...]
    fixed: str
    remaining: tuple[Finding, ...]


@dataclass(frozen=True)
class NamedModel:
    """A model that is in no catalog, as its path or its config.json describe it."""

    title: str
    architecture: Architecture
    quantization: Quantization
    max_positions: int


def review(
    text: str, catalog: Catalog, base: Base, *, where: str, key: str | None = None
) -> tuple[Reviewed, ...]:
    """Every command of the text, in order; `key` says which model of the catalog is served where the path does not.

    Raises UsageError when there is no such command, or its model cannot be told.
    """
    cleaned, odd = plain(text)
    commands = find_commands(cleaned, where=where)
    derived = _placed(judge_text(cleaned, base.vllm_ascend), where)
    if not commands and not derived:
        raise UsageError(
            "there is neither a 'vllm serve' nor a 'docker run' command in it",
            where=where,
            mend="give the script that has one; of a start script made by duopack give what DUOPACK_DRY_RUN=1 prints",
        )
    serves = [one for one in commands if one.kind == "serve"]
    lines = {id(one): read_line(one.words, one.env, base.vllm) for one in serves}
    dockers = [read_docker_line(one.words) for one in commands if one.kind == "docker"]
    reviewed = [Reviewed(where, "image", where, derived, "", derived)] if derived else []
    for command in commands:
        at = f"{where}:{command.line}"
        if command.kind == "serve":
            one = _review_serve(command, lines[id(command)], catalog, base, at, key)
        else:
            serve = next((lines[id(other)] for other in serves if _belongs(command, other, commands)), None)
            one = _review_docker(command, serve, dockers, base, at)
        if odd:
            one = replace(one, findings=(_typographic(odd, at), *one.findings))
        reviewed.append(one)
    return tuple(reviewed)


def _belongs(docker: Command, serve: Command, commands: Sequence[Command]) -> bool:
    """A server belongs to the last `docker run` before it."""
    order = [id(one) for one in commands]
    before = [one for one in commands[: order.index(id(serve))] if one.kind == "docker"]
    return bool(before) and before[-1] is docker


def _review_serve(
    command: Command, line: ServeLine, catalog: Catalog, base: Base, at: str, key: str | None
) -> Reviewed:
    model = identify(line.model, catalog, where=at, key=key)
    case = Case(model, line, base)
    problems = [option_finding(at, one, base) for one in _option_problems(command.words, line, base)]
    findings = [*judge_case(case), *problems, *_unread(line)]
    fixed = _fixed_line(case)
    left = [one for one in judge_case(replace(case, line=fixed)) if one.severity is not Severity.NOTE]
    return Reviewed(
        at, "serve", model.title, _placed(findings, at), fixed.text(), _placed([*left, *problems], at)
    )


def _review_docker(
    command: Command, serve: ServeLine | None, dockers: Sequence[DockerLine], base: Base, at: str
) -> Reviewed:
    docker = read_docker_line(command.words)
    case = ContainerCase(docker, serve, tuple(other for other in dockers if other != docker))
    fixed = _fixed_docker(case)
    left = judge_container(replace(case, docker=fixed), base.vllm_ascend)
    return Reviewed(
        at,
        "docker",
        docker.value("--name") or docker.image,
        _placed(judge_container(case, base.vllm_ascend), at),
        fixed.text(),
        _placed([one for one in left if one.severity is not Severity.NOTE], at),
    )


def _fixed_line(case: Case) -> ServeLine:
    for _ in range(ROUNDS):
        before = case.line
        for rule in RULES:
            if rule.fix and rule.judge(case, case.base.vllm_ascend):
                line = rule.fix(case)
                assert isinstance(line, ServeLine)
                case = replace(case, line=line)
        if case.line == before:
            break
    return case.line


def _fixed_docker(case: ContainerCase) -> DockerLine:
    for rule in CONTAINER_RULES:
        if rule.fix and rule.applies(case) is not None:
            docker = rule.fix(case)
            assert isinstance(docker, DockerLine)
            case = replace(case, docker=docker)
    return case.docker


def identify(path: str, catalog: Catalog, *, where: str, key: str | None = None) -> Served:
    """The model behind a path or an id: the catalog's by key, directory or source, else by config.json or name.

    Raises UsageError when none of these tells it.
    """
    if key is not None:
        return find_target(catalog, key).default_model
    parts = [part.casefold() for part in path.split("/") if part]
    for model in catalog.models.values():
        ids = {one.modelscope or one.huggingface or "" for one in model.sources}
        if model.directory.casefold() in parts or path.casefold() in {one.casefold() for one in ids}:
            return model
    return _by_config(path) or _by_name(path, where)


def _by_config(path: str) -> NamedModel | None:
    """What config.json and the quantizer's description say, when the path is a directory of this machine."""
    directory = Path(path)
    if not path.startswith("/") or not (directory / "config.json").is_file():
        return None
    config = read_config(directory)
    architecture = _ARCHITECTURES.get(config.architecture)
    if architecture is None:
        return None
    text = config.section("text_config") if "text_config" in config.values else config
    kind = read_quantization(directory).name.lower().replace("_", "-")
    quantization = Quantization(kind) if kind in set(Quantization) else Quantization.W8A8
    return NamedModel(directory.name, architecture, quantization, text.natural("max_position_embeddings"))


def _by_name(path: str, where: str) -> NamedModel:
    found = re.search(r"(?i)qwen[-_]?3(?:[._-]?([56]))?(?![0-9])", path)
    if not found:
        raise UsageError(
            f"what model '{quoted(path)}' is cannot be told",
            where=where,
            mend="give its key too: duopack check KEY --command '…' ('duopack list' shows the keys)",
        )
    moe = bool(re.search(r"(?i)-a\d+b(?![a-z])", path))
    newer = found[1] is not None
    family = {
        (False, False): Architecture.QWEN3,
        (False, True): Architecture.QWEN3_MOE,
        (True, False): Architecture.QWEN3_5,
        (True, True): Architecture.QWEN3_5_MOE,
    }[newer, moe]
    kind = re.search(r"(?i)w8a8(sc|[-_]dynamic)?", path)
    quantization = Quantization(kind[0].lower().replace("_", "-")) if kind else Quantization.FLOAT
    return NamedModel(path.rstrip("/").rpartition("/")[2], family, quantization, 262_144 if newer else 40_960)


def _unread(line: ServeLine) -> list[Finding]:
    open_ = [one.flag for one in line.options if any(UNREAD.search(value) for value in one.values)]
    open_ += [word for word in (line.model, *line.stray) if UNREAD.search(word)]
    if not open_:
        return []
    shown = ", ".join(quoted(one, 60) for one in open_)
    return [
        Finding(
            "unread",
            Severity.NOTE,
            f"what the shell makes of {shown} cannot be told from the text: it is not judged",
            "give the command as it runs; a start script of duopack prints it with DUOPACK_DRY_RUN=1",
            "duopack runs no script",
        )
    ]


def _option_problems(words: Sequence[str], line: ServeLine, base: Base) -> list[Problem]:
    """What vLLM's own options say; a value that the shell makes may be any."""
    made = {one.flag for one in line.options if any(UNREAD.search(value) for value in one.values)}
    # vLLM knows neither word; the rules say more about them.
    known = {*made, "--speculative-model", *filter(UNREAD.search, words)}
    return [one for one in check_options(words, base.vllm) if one.option not in known]


def _typographic(found: str, at: str) -> Finding:
    shown = " ".join(f"U+{ord(character):04X}" for character in found)
    return Finding(
        "typographic",
        Severity.ERROR,
        f"the text has typographic quotes, dashes or spaces ({shown}): a shell takes them for letters",
        "write plain ones; the rest was judged as if they were",
        "pages and word processors change them when text is copied",
        at,
    )


def _placed(findings: Sequence[Finding], at: str) -> tuple[Finding, ...]:
    return errors_first(replace(one, where=at) for one in findings)
