"""What is asked of an Ascend host: a fixed list of files and commands, captured as text, without secrets.

Captures are read live, or from a directory into which another machine's were written; what is made of them is the
same. A file that is not there and a program that is not installed are captures too: their text is empty.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import UsageError, quoted
from pipeline.files import write_atomically

ASCEND = "/usr/local/Ascend"
SECONDS = 20
MAX_CAPTURE = 1 << 20

FILES: Mapping[str, tuple[str, ...]] = {
    "os-release": ("/etc/os-release",),
    "meminfo": ("/proc/meminfo",),
    "driver": (f"{ASCEND}/driver/version.info",),
    "firmware": (f"{ASCEND}/firmware/version.info",),
    "cann": (
        f"{ASCEND}/ascend-toolkit/latest/version.cfg",
        f"{ASCEND}/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info",
    ),
    "atb": (f"{ASCEND}/nnal/atb/latest/version.info", f"{ASCEND}/atb/latest/version.info"),
}
"""The first of the files that is there."""
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "uname": ("uname", "-s", "-r", "-m"),
    "npu-smi": ("npu-smi", "info"),
    "npu-smi-topo": ("npu-smi", "info", "-t", "topo"),
    "docker": (),
    "devices": (),
    "storage": (),
    "reach": (),
    "user": (),
    "containers": (),
}
"""Without words: duopack itself looks, and the capture is JSON."""
DOCKER_KEYS = (
    "ServerVersion",
    "Runtimes",
    "DefaultRuntime",
    "DockerRootDir",
    "Driver",
    "Architecture",
    "ServerErrors",
)
"""What is kept of docker's answer: the rest has names, proxies and their passwords."""

_SECRETS = (
    (re.compile(r"(?i)(\w+://)[^/\s:@\"']+:[^/\s@\"']+@"), r"\1…@"),
    (
        re.compile(
            r"(?i)((?:token|password|passwd|secret|api[_-]?key|authorization|credential)s?\"?\s*[=:]\s*\"?)[^\s\",;]+"
        ),
        r"\1…",
    ),
    (re.compile(r"\b(?:hf|ms|ghp|github_pat|sk)[-_][A-Za-z0-9_-]{12,}\b"), "…"),
)


@dataclass(frozen=True)
class Capture:
    """What a file or command gave; `found` is False when there is no such file or program, or it failed."""

    text: str
    found: bool = True

    @property
    def json(self) -> dict[str, object]:
        """The capture as a JSON object; empty when it is none."""
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


NOTHING = Capture("", found=False)


def read_files() -> dict[str, Capture]:
    """The files of the list, as they are on this host."""
    return {name: _first(paths) for name, paths in FILES.items()}


def run_commands() -> dict[str, Capture]:
    """The programs of the list, each bounded in time and in what it may print."""
    return {name: run(words) for name, words in COMMANDS.items() if words}


def run(words: tuple[str, ...]) -> Capture:
    """What a program prints, on either stream when it fails; no shell, no input, 20 s at most."""
    try:
        done = subprocess.run(
            words, capture_output=True, stdin=subprocess.DEVNULL, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Capture(f"{words[0]}: {type(error).__name__}", found=False)
    text = (done.stdout or done.stderr) if done.returncode == 0 else done.stdout + done.stderr
    return Capture(text[:MAX_CAPTURE].decode("utf-8", "replace"), found=done.returncode == 0)


def _first(paths: tuple[str, ...]) -> Capture:
    for path in paths:
        try:
            with Path(path).open("rb") as file:
                return Capture(file.read(MAX_CAPTURE).decode("utf-8", "replace"))
        except OSError:
            continue
    return NOTHING


def redact(text: str) -> str:
    """The text without what looks like a secret."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def docker_facts(info: Mapping[str, object]) -> Capture:
    """The engine's answer with only the keys that are looked at."""
    kept = {key: value for key, value in info.items() if key in DOCKER_KEYS}
    if isinstance(runtimes := kept.get("Runtimes"), dict):
        kept["Runtimes"] = {name: {} for name in runtimes}
    return Capture(json.dumps(kept))


def device_facts(directory: Path) -> Capture:
    """The nodes of chips and of the driver, and whether this user may read and write each."""
    nodes = {}
    for pattern in ("davinci*", "hisi_hdc", "devmm_svm"):
        for path in sorted(directory.glob(pattern)):
            nodes[path.name] = {
                "access": os.access(path, os.R_OK | os.W_OK),
                "mode": stat.filemode(path.stat().st_mode),
                "group": path.stat().st_gid,
            }
    return Capture(json.dumps(nodes), found=bool(nodes))


def save(captures: Mapping[str, Capture], directory: Path) -> tuple[Path, ...]:
    """Writes each capture to `NAME.txt`, secrets removed; what was not found to `NAME.missing.txt`."""
    written = []
    for name, capture in sorted(captures.items()):
        path = directory / f"{name}{'' if capture.found else '.missing'}.txt"
        (directory / f"{name}{'.missing' if capture.found else ''}.txt").unlink(missing_ok=True)
        write_atomically(path, redact(capture.text).encode())
        written.append(path)
    return tuple(written)


def load(directory: Path) -> dict[str, Capture]:
    """Captures from a directory; one that is not there was not found. Raises UsageError when there is none at all."""
    captures = {}
    for name in (*FILES, *COMMANDS):
        for suffix, found in ((".txt", True), (".missing.txt", False)):
            path = directory / f"{name}{suffix}"
            if path.is_file():
                with path.open("rb") as file:
                    captures[name] = Capture(file.read(MAX_CAPTURE).decode("utf-8", "replace"), found)
                break
    if not captures:
        raise UsageError(
            "there are no captures here",
            where=quoted(str(directory)),
            mend="write them on the host with 'duopack doctor --collect DIR'",
        )
    return {name: captures.get(name, NOTHING) for name in (*FILES, *COMMANDS)}


def version_in(text: str) -> str:
    """The version that a version.info, version.cfg or install.info names; empty when it names none."""
    patterns = (
        r"(?im)^\s*(?:package_version|version)\s*=\s*\[?\"?([\w.+-]+)\"?\]?\s*$",
        r"(?im)^\s*(?:[\w-]*atb[\w-]*|ascend-cann-\w+)\s*(?:version)?\s*[:=]\s*([\w.+-]+)",
        r"(?im)^\s*\w*(?:toolkit|runtime|compiler)\w*_version\s*=\s*\[(?:[^\]:]*:)?([\w.+-]+)\]",
    )
    found = (re.search(pattern, text) for pattern in patterns)
    return next((match[1] for match in found if match), "")
