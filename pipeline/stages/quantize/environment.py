"""The Python environment that msmodelslim runs in: made once, apart from duopack's own, by pip as it is configured."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

from pipeline.errors import DuopackError, UsageError, quoted
from pipeline.files import disk_errors, exclusive, require_space
from pipeline.reports.progress import Progress

VARIABLE: Final = "DUOPACK_MSMODELSLIM"
VERSION: Final = "26.1.0"
ROOM: Final = 8 << 30
"""Bytes: torch for a GPU, which an index may have as its only build, needs this much; one for CPUs a quarter."""
ASK: Final = "import importlib.metadata as m; print(m.version('msmodelslim')); import torch, transformers"


@dataclass(frozen=True)
class Environment:
    """Where msmodelslim is installed; `python` runs it."""

    python: Path


def find_environment(cache: Path, environ: Mapping[str, str]) -> Environment | None:
    """The environment that DUOPACK_MSMODELSLIM names, or that an earlier run made; None when there is none.

    Raises UsageError when the one that is named is none, or has another msmodelslim.
    """
    named = environ.get(VARIABLE)
    if not named:
        made = _place(cache) / "bin" / "python"
        return Environment(made) if made.exists() else None
    python = Path(named) / "bin" / "python"
    answer = _ask(python)
    if answer != VERSION:
        raise UsageError(
            f"there is no msmodelslim {VERSION} with torch and transformers ({quoted(answer)})",
            where=f"{VARIABLE}={named}",
            mend=f"name a virtual environment that has them, or unset {VARIABLE}: duopack then makes one",
        )
    return Environment(python)


def make_environment(cache: Path, environ: Mapping[str, str], progress: Progress) -> Environment:
    """The environment, made when there is none: minutes and gigabytes the first time, nothing afterwards.

    Raises DuopackError when it cannot be made; nothing is left of it then.
    """
    if found := find_environment(cache, environ):
        return found
    place = _place(cache)
    with exclusive(place.with_name(f"{place.name}.lock"), progress.note):
        if found := find_environment(cache, environ):
            return found
        require_space(cache, ROOM, purpose="installing msmodelslim with torch")
        progress.note(f"installing msmodelslim {VERSION} with torch into {place}: minutes, once")
        partial = place.with_name(f"{place.name}.partial")
        try:
            with disk_errors(partial):
                shutil.rmtree(partial, ignore_errors=True)
                _install(partial)
                partial.rename(place)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return Environment(place / "bin" / "python")


def _place(cache: Path) -> Path:
    """Another Python or other pins make another environment."""
    text = f"{sys.version_info[:2]} {_constraints().read_text(encoding='utf-8')}"
    return cache.absolute() / f"msmodelslim-{VERSION}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _constraints() -> Path:
    return Path(str(files("pipeline.stages.quantize") / "constraints.txt"))


def _install(place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    python = place / "bin" / "python"
    _run([sys.executable, "-m", "venv", "--without-pip", str(place)], "make an environment")
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    if not importlib.util.find_spec("pip"):
        _run([str(python), "-m", "ensurepip"], "bring pip into the environment")
        pip = [str(python), "-m", "pip"]
    lines = (
        line.partition("#")[0].strip() for line in _constraints().read_text(encoding="utf-8").splitlines()
    )
    pins = [line for line in lines if line]
    # torch on its own first: pip then takes a build for CPUs where its configuration offers one.
    torch = [pin for pin in pins if pin.startswith("torch==")]
    for wanted in (torch, pins):
        _run(
            [*pip, "install", "--no-input", "--quiet", "-c", str(_constraints()), *wanted],
            f"install {wanted[0]} …",
        )
    answer = _ask(python)
    if answer != VERSION:
        raise DuopackError(
            f"what was installed does not run: {quoted(answer)}",
            where="msmodelslim",
            mend=f"install it yourself and let {VARIABLE} name the virtual environment",
        )


def _run(command: Sequence[str], purpose: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise DuopackError(
            f"cannot {purpose}: {quoted(' '.join(said[-3:]), 600)}",
            where="msmodelslim's environment",
            mend="check the network, or point pip at a mirror that you can reach (PIP_INDEX_URL, or 'index-url' in "
            f"pip.conf); or let {VARIABLE} name a virtual environment that has msmodelslim {VERSION}",
        )


def _ask(python: Path) -> str:
    """The version of msmodelslim in an environment, or why it does not run."""
    if not os.access(python, os.X_OK):
        return f"no {python}"
    done = subprocess.run([str(python), "-c", ASK], check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else " ".join(done.stderr.splitlines()[-1:])
