#!/usr/bin/env python3
"""One command on a fresh machine: makes .venv, installs what is needed there, hands over to nox.

    python3 scripts/bootstrap.py -s demo        the whole job on a tiny model, offline
    python3 scripts/bootstrap.py -s build-9b    the real thing
    python3 scripts/bootstrap.py                what else there is

Standard library only. Packages come from wherever pip is configured to look (PIP_INDEX_URL, pip.conf).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("DUOPACK_VENV") or ROOT / ".venv").expanduser().absolute()
PYTHON = VENV / "bin" / "python"


def main(arguments: list[str]) -> int:
    if sys.version_info < (3, 11):
        return _refuse(
            f"duopack needs Python 3.11 or newer; this is {sys.version.split()[0]} ({sys.executable}). "
            "To mend: run it with a newer one, e.g. 'python3.11 scripts/bootstrap.py …'."
        )
    if os.name != "posix":
        return _refuse("duopack runs on Linux (and macOS for building only). To mend: use WSL 2 on Windows.")
    problem = ensure("nox")
    if problem:
        return _refuse(problem)
    # Said absolutely: nox starts elsewhere.
    os.environ["DUOPACK_VENV"] = str(VENV)
    os.chdir(ROOT)
    os.execv(PYTHON, [str(PYTHON), "-m", "nox", *(arguments or ["--list"])])


def ensure(*groups: str) -> str | None:
    """Makes .venv with duopack and these dependency groups; returns what went wrong, or None.

    A stamp per group holds the hash of pyproject.toml: what is installed already needs no network.
    """
    import fcntl

    # Two at a time would install over each other; the kernel lets go of the lock when this process ends.
    with (ROOT / "pyproject.toml").open("rb") as project:
        fcntl.flock(project, fcntl.LOCK_EX)
        data = project.read()
        if not _version():
            problem = _make_venv()
            if problem:
                return problem
        # Another Python, or another checkout that was moved here, has nothing of what was installed.
        wanted = hashlib.sha256(data + f"{ROOT}\n{_version()}".encode()).hexdigest()
        missing = [group for group in groups if not _is_installed(group, wanted)]
        return _install(missing, data.decode(), wanted) if missing else None


def _install(groups: list[str], project: str, wanted: str) -> str | None:
    import tomllib

    problem = _bring_pip()
    if problem:
        return problem
    known = tomllib.loads(project)["dependency-groups"]
    requirements = sorted({text for group in groups for text in known[group]})
    _say(f"installing duopack ({', '.join(groups)}) into {_shown(VENV)} …")
    command = [*_pip(), "install", "--quiet", "--no-user", "--editable", str(ROOT), *requirements]
    if subprocess.run(command, check=False).returncode != 0:
        return (
            "pip could not install what duopack needs; its message is above. To mend: check the network, or point "
            "pip at a mirror that you can reach (PIP_INDEX_URL, or 'index-url' in pip.conf), then run this again."
        )
    for group in groups:
        _stamp(group).write_text(wanted)
    return None


def _make_venv() -> str | None:
    """An environment in place of none, or of one whose Python is gone; pip comes when something is installed."""
    if VENV.is_dir() and any(VENV.iterdir()) and not (VENV / "pyvenv.cfg").exists():
        return (
            f"{VENV} is a directory with other things in it. To mend: unset DUOPACK_VENV, or let it name a "
            "directory that is empty or not there."
        )
    again = "anew, since its Python does not run, " if PYTHON.is_symlink() else ""
    _say(f"making {_shown(VENV)} {again}…")
    shutil.rmtree(VENV, ignore_errors=True)
    made = _run(sys.executable, "-m", "venv", "--without-pip", str(VENV))
    if made.returncode == 0 and _version():
        return None
    return _no_environment(made)


def _bring_pip() -> str | None:
    """pip for the environment: Python's own copy, or by a pip that this Python has (Debian keeps them apart)."""
    if _python("import pip").returncode == 0:
        return None
    tried = _python("import ensurepip; ensurepip.bootstrap()")
    if tried.returncode != 0 and importlib.util.find_spec("pip"):
        tried = _run(sys.executable, "-m", "pip", "--python", str(PYTHON), "install", "--quiet", "pip")
    return None if tried.returncode == 0 else _no_environment(tried)


def _no_environment(tried: subprocess.CompletedProcess[str]) -> str:
    said = " ".join((tried.stdout + tried.stderr).split())[-300:]
    return (
        f"Python could not make an environment with pip in {VENV}: {said or 'it says nothing'}. To mend: on Debian "
        "and Ubuntu 'apt-get install python3-venv', on openEuler 'dnf install python3-pip', then run this again."
    )


def _version() -> str:
    """The version of the environment's Python; empty when it is not there or does not run."""
    try:
        return _python("import sys; print(sys.version)").stdout
    except OSError:
        return ""


def _python(statement: str) -> subprocess.CompletedProcess[str]:
    return _run(str(PYTHON), "-I", "-c", statement)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True)


def _pip() -> list[str]:
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check"]


def _stamp(group: str) -> Path:
    return VENV / f".duopack-{group}"


def _is_installed(group: str, wanted: str) -> bool:
    try:
        return _stamp(group).read_text() == wanted
    except OSError:
        return False


def _shown(path: Path) -> str:
    """As short as it can be written."""
    return min(str(path), os.path.relpath(path), key=len)


def _refuse(text: str) -> int:
    _say(text)
    return 2


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
