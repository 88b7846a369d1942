"""launch.json against the files, the labels and the config; and the options of every `vllm serve` in the scripts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from pipeline.ascend.options import check_options
from pipeline.ascend.own_script import OwnScript, read_own_script
from pipeline.ascend.shell import Command, find_commands
from pipeline.catalog.target import LIST
from pipeline.errors import DuopackError, quoted
from pipeline.oci.limits import LimitError
from pipeline.stages.inside.image import MAX_SCRIPT, Inside
from pipeline.stages.inside.launch import LAUNCH, Launch, LaunchProfile
from pipeline.stages.inside.place import UnreadError
from pipeline.stages.launch import LABEL
from pipeline.stages.verify.finding import AGAIN, Finding, Severity, of_error, of_unread
from pipeline.stages.verify.locked import BASE_DIGEST

MAX_SCRIPTS = 200
KNOWN_VLLM = "0.20.2"
"""Whose options foreign scripts are held against, when nothing tells the version."""
_UNREAD = re.compile(r"[$`]")


def check_launch(inside: Inside) -> Iterator[Finding]:
    """Everything about how servers of this image are started."""
    try:
        launch = inside.launch
    except UnreadError as error:
        yield of_unread("launch-unread", error, inside)
        return
    except DuopackError as error:
        if isinstance(error, LimitError) and error.limit == "seconds":
            raise
        yield of_error("launch-broken", error)
        return
    finally:
        inside.reading.release()
    if launch is None:
        if any(name.startswith(LABEL) for name in inside.labels) and not inside.unread:
            sentence = "the labels are duopack's, and the file that belongs to them is not there"
            yield Finding("launch-missing", "error", sentence, AGAIN, f"/{LAUNCH}")
        yield from _foreign_scripts(inside, set(), None)
        return
    yield from _models(launch)
    yield from _labels(inside, launch)
    yield from _start(inside, launch)
    own = {profile.script.strip("/") for _, profile in launch.profiles()}
    for _, profile in launch.profiles():
        yield from _own_script(inside, launch, profile)
    yield from _foreign_scripts(inside, own, launch)


def _models(launch: Launch) -> Iterator[Finding]:
    where = f"/{LAUNCH}"
    names = [profile.name for _, profile in launch.profiles()]
    if launch.default not in {*names, LIST}:
        sentence = f"its default is '{quoted(launch.default)}', and it has no such profile"
        yield Finding("launch-default", "error", sentence, AGAIN, where)
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Finding("launch-twice", "error", f"two profiles are called '{quoted(name)}'", AGAIN, where)
    for model, profile in launch.profiles():
        if not f"{profile.weights}/".startswith(f"{model.directory}/"):
            sentence = f"{quoted(profile.name)} loads {quoted(profile.weights)}, which is not in its model's directory"
            yield Finding("launch-weights", "error", sentence, AGAIN, where)


def _labels(inside: Inside, launch: Launch) -> Iterator[Finding]:
    chosen = launch.default_profile
    wanted = {
        f"{LABEL}models": ",".join(model.key for model in launch.models),
        f"{LABEL}default-profile": launch.default,
        BASE_DIGEST: launch.base_digest,
    }
    if chosen:
        wanted |= {
            f"{LABEL}tensor-parallel": str(chosen.tensor_parallel),
            f"{LABEL}port": str(chosen.port),
            f"{LABEL}served-name": chosen.served_name,
        }
    for name, value in wanted.items():
        found = inside.labels.get(name)
        if found != value:
            said = "it is missing" if found is None else f"it says '{quoted(found, 90)}'"
            sentence = f"the label {name}: {said}, and launch.json '{quoted(value, 90)}'"
            yield Finding("label", "error" if found is not None else "warning", sentence, AGAIN, "config")
    label = inside.labels.get(f"{LABEL}launch")
    if label is not None and not _same_json(label, launch):
        sentence = f"the label {LABEL}launch says something else than the file: who reads one is misled"
        yield Finding("label-launch", "error", sentence, AGAIN, "config")


def _same_json(text: str, launch: Launch) -> bool:
    try:
        return bool(json.loads(text) == launch.document)
    except (ValueError, RecursionError):
        return False


def _start(inside: Inside, launch: Launch) -> Iterator[Finding]:
    """The command, the health check and the port of the config."""
    chosen, command = launch.default_profile, inside.words("Cmd")
    scripts = {profile.script for _, profile in launch.profiles()}
    folder = {script.rpartition("/")[0] for script in scripts}
    starts = set(command) & scripts or {word for word in command if word.rpartition("/")[0] in folder}
    if not starts:
        sentence = f"the command is '{quoted(' '.join(command), 120)}', none of the image's scripts"
        yield Finding("command", "warning", sentence, "leave the image's command as it was built", "config")
    elif chosen and starts & scripts and chosen.script not in starts:
        sentence = f"the command is {quoted(' '.join(command), 120)}, and the default profile's {quoted(chosen.script)}"
        yield Finding("command", "error", sentence, AGAIN, "config")
    health = inside.settings.get("Healthcheck")
    test = health.get("Test") if isinstance(health, dict) else None
    words = [str(word) for word in test] if isinstance(test, list) else []
    if not words or words[0] == "NONE":
        sentence = "there is no health check: an engine takes a server that hangs for one that works"
        yield Finding("health", "warning", sentence, AGAIN, "config")
    for word in (*starts, *words[1:]):
        if word.startswith("/"):
            yield from _runnable(inside, word)
    ports = inside.settings.get("ExposedPorts")
    if chosen and f"{chosen.port}/tcp" not in (ports if isinstance(ports, dict) else {}):
        sentence = f"port {chosen.port} of the default profile is not exposed"
        yield Finding("port", "warning", sentence, AGAIN, "config")


def _runnable(inside: Inside, path: str) -> Iterator[Finding]:
    entry = inside.tree.resolve(path.strip("/"))
    if entry is None or entry.member.kind != "file":
        if not inside.unread and path.startswith("/models/"):
            yield Finding(
                "script-missing", "error", "it is to be run, and not in the image", AGAIN, quoted(path)
            )
    elif entry.member.mode & 0o005 != 0o005:
        sentence = f"its mode is {entry.member.mode:04o}, so it cannot be run by everybody"
        yield Finding("script-mode", "error", sentence, "give it 0755", quoted(path))


def _own_script(inside: Inside, launch: Launch, profile: LaunchProfile) -> Iterator[Finding]:
    """A profile's script: there, runnable, and saying what launch.json says."""
    where = quoted(profile.script)
    yield from _runnable(inside, profile.script)
    text = _text(inside, profile.script.strip("/"))
    if text is None:
        if inside.place(profile.script).is_file():
            severity: Severity = "error" if inside.deep else "note"
            yield Finding("script-unread", severity, "it was not read", "read the whole image: --deep", where)
        return
    own = read_own_script(text)
    if own is None:
        sentence = "it is not as duopack wrote it, so what it would run is only guessed"
        yield Finding(
            "script-changed", "warning", sentence, "change models.yaml, and build the image again", where
        )
        yield from _commands(text, where, launch.vllm)
        return
    yield from _settings(own, profile, where)
    yield from _options(own.words, where, launch.vllm)


def _settings(own: OwnScript, profile: LaunchProfile, where: str) -> Iterator[Finding]:
    wanted = {
        "MODEL_PATH": profile.weights,
        "SERVED_MODEL_NAME": profile.served_name,
        "TP": str(profile.tensor_parallel),
        "PORT": str(profile.port),
        "LOAD_FORMAT": profile.load_format,
        "MAX_MODEL_LEN": str(profile.max_model_len),
    }
    for name, value in wanted.items():
        found = own.settings.get(name)
        if found != value:
            sentence = f"its {name} is '{quoted(str(found), 80)}', and launch.json says '{quoted(value, 80)}'"
            yield Finding("script-setting", "error", sentence, AGAIN, where)


def _foreign_scripts(inside: Inside, own: set[str], launch: Launch | None) -> Iterator[Finding]:
    """Scripts above the base that start vLLM and are not a profile's."""
    paths = [
        path
        for path, entry in inside.tree.files()
        if entry.layer >= inside.base.count and path.endswith(".sh") and entry.member.size <= MAX_SCRIPT
    ]
    for path in [path for path in paths if path not in own][:MAX_SCRIPTS]:
        text = _text(inside, path)
        if text is not None and "vllm" in text:
            yield from _commands(text, f"/{quoted(path)}", launch.vllm if launch else KNOWN_VLLM)


def _commands(text: str, where: str, vllm: str) -> Iterator[Finding]:
    try:
        commands: Sequence[Command] = find_commands(text, where=where)
    except DuopackError as error:
        yield of_error("script-unreadable", error, severity="warning")
        return
    for command in commands:
        if command.kind == "serve":
            yield from _options(command.words, where, vllm)


def _options(words: Sequence[str], where: str, vllm: str) -> Iterator[Finding]:
    known = [word for word in words if not _UNREAD.search(word)]
    made = len(known) < len(words)
    try:
        problems = check_options(words, vllm)
    except DuopackError as error:
        yield of_error("options-unknown", error, severity="note")
        return
    for problem in problems:
        # A word that the shell makes may be any value.
        if not (made and (_UNREAD.search(problem.sentence) or _UNREAD.search(problem.option))):
            yield Finding("option", problem.severity, problem.sentence, problem.mend, where)


def _text(inside: Inside, path: str) -> str | None:
    """A script's text; None when it is not there or was not read."""
    place = inside.place(path)
    try:
        if not place.is_file() or place.stat().st_size > MAX_SCRIPT:
            return None
        return place.read_bytes().decode("utf-8", "replace")
    except UnreadError:
        return None
    finally:
        inside.reading.release()
