#!/usr/bin/env python3
"""One command on a fresh machine: makes .venv, installs what is needed there, hands over to nox.

    python3 scripts/bootstrap.py -s demo        the whole job on a tiny model, offline
    python3 scripts/bootstrap.py -s build-9b    the real thing
    python3 scripts/bootstrap.py                what else there is

Standard library only. Packages come from wherever pip is configured to look (PIP_INDEX_URL, pip.conf).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("DUOPACK_VENV", ROOT / ".venv"))
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
    os.chdir(ROOT)
    os.execv(PYTHON, [str(PYTHON), "-m", "nox", *(arguments or ["--list"])])


def ensure(*groups: str) -> str | None:
    """Makes .venv with duopack and these dependency groups; returns what went wrong, or None.

    A stamp per group holds the hash of pyproject.toml: what is installed already needs no network.
    """
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + sys.version.encode()).hexdigest()
    missing = [group for group in groups if _stamp(group, wanted) is not None]
    if not missing:
        return None
    problem = _make_venv()
    if problem:
        return problem
    print(
        f"installing duopack ({', '.join(missing)}) into {os.path.relpath(VENV)} …",
        file=sys.stderr,
        flush=True,
    )
    command = [*_pip(), "install", "--quiet", "--editable", str(ROOT)]
    for group in missing:
        command += ["--group", f"{ROOT / 'pyproject.toml'}:{group}"]
    if subprocess.run(command, check=False).returncode != 0:
        return (
            "pip could not install what duopack needs; its message is above. To mend: check the network, or point "
            "pip at a mirror that you can reach (PIP_INDEX_URL, or 'index-url' in pip.conf), then run this again."
        )
    for group in missing:
        (VENV / f".duopack-{group}").write_text(wanted)
    return None


def _make_venv() -> str | None:
    if not PYTHON.exists():
        print(f"making {os.path.relpath(VENV)} …", file=sys.stderr, flush=True)
        made = subprocess.run(
            [sys.executable, "-m", "venv", str(VENV)], check=False, capture_output=True, text=True
        )
        if made.returncode != 0:
            return (
                f"Python could not make a virtual environment in {VENV}: {(made.stdout + made.stderr).strip()[-300:]} "
                "To mend: on Debian and Ubuntu 'apt-get install python3-venv', on openEuler 'dnf install python3-pip', "
                "then run this again."
            )
    # --group (PEP 735) came with pip 25.1.
    check = subprocess.run([*_pip(), "install", "--help"], check=False, capture_output=True, text=True)
    if "--group" in check.stdout:
        return None
    if subprocess.run([*_pip(), "install", "--quiet", "--upgrade", "pip>=25.1"], check=False).returncode != 0:
        return "pip could not renew itself; its message is above. To mend: check the network or PIP_INDEX_URL."
    return None


def _pip() -> list[str]:
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check"]


def _stamp(group: str, wanted: str) -> str | None:
    """The group's name when it must be installed, else None."""
    try:
        return None if (VENV / f".duopack-{group}").read_text() == wanted else group
    except OSError:
        return group


def _refuse(text: str) -> int:
    print(text, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
