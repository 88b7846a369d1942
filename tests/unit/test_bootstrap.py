"""scripts/bootstrap.py on machines that lack something. Nothing is installed here: pip is a stand-in."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = """
import json, os, sys
with open(os.environ["PIP_CALLS"], "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
sys.exit(int(os.environ.get("PIP_FAILS", "0")))
"""
NOX = 'import os, sys\nprint("nox", *sys.argv[1:], os.getcwd(), os.environ["DUOPACK_VENV"], sep="|")\n'


class Machine:
    """A checkout with nothing but the project file and the script, in a path with a space."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "a checkout"
        (self.root / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "bootstrap.py", self.root / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.calls = directory / "calls"
        self.calls.touch()
        self.environ = {"PATH": os.environ["PATH"], "HOME": str(directory), "PIP_CALLS": str(self.calls)}
        self.venv = self.root / ".venv"

    def run(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, self.root / "scripts" / "bootstrap.py", *arguments],
            env={**self.environ, **environ}, capture_output=True, text=True, check=False, cwd=self.root.parent,
        )  # fmt: skip

    def furnish(self, venv: Path | None = None) -> None:
        """An environment whose pip and nox are stand-ins, as if both had been installed."""
        venv = venv or self.venv
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        (site,) = venv.glob("lib/python*/site-packages")
        for name, text in {"pip": PIP, "nox": NOX}.items():
            (site / name).mkdir()
            (site / name / "__init__.py").touch()
            (site / name / "__main__.py").write_text(text)

    def installs(self) -> list[list[str]]:
        return [json.loads(line) for line in self.calls.read_text().splitlines()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_it_installs_what_the_group_needs_hands_over_to_nox_and_next_time_needs_no_network(machine):
    machine.furnish()
    done = machine.run("-s", "demo")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"nox|-s|demo|{machine.root}|{machine.venv}\n"
    (call,) = machine.installs()
    assert call[call.index("--editable") + 1] == str(machine.root)
    assert any(word.startswith("nox") for word in call)
    assert machine.run().stdout == f"nox|--list|{machine.root}|{machine.venv}\n"
    assert len(machine.installs()) == 1
    (machine.root / "pyproject.toml").write_text(
        (machine.root / "pyproject.toml").read_text() + "\n# changed\n"
    )
    assert machine.run().returncode == 0
    assert len(machine.installs()) == 2


def test_a_failed_install_is_told_and_tried_again(machine):
    machine.furnish()
    done = machine.run(PIP_FAILS="1")
    assert done.returncode == 2
    assert "PIP_INDEX_URL" in done.stderr
    assert "Traceback" not in done.stderr
    assert machine.run().returncode == 0
    assert len(machine.installs()) == 2


def test_an_environment_whose_python_is_gone_is_made_anew(machine):
    machine.furnish()
    assert machine.run().returncode == 0
    python = machine.venv / "bin" / "python"
    for link in machine.venv.glob("bin/python*"):
        link.unlink()
    python.symlink_to("/nowhere/python3")
    done = machine.run(PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    assert "making" in done.stderr
    assert "anew" in done.stderr
    assert done.returncode == 2  # the new one has the real pip, which is told to find nothing
    assert "PIP_INDEX_URL" in done.stderr
    assert subprocess.run([python, "-c", ""], check=False).returncode == 0


def test_another_place_may_be_named_and_a_directory_with_other_things_is_left_alone(machine, tmp_path):
    other = tmp_path / "else where"
    machine.furnish(other)
    for place in (str(other), "else where"):
        done = machine.run(DUOPACK_VENV=place)
        assert done.stdout == f"nox|--list|{machine.root}|{other}\n", done.stderr
    assert not machine.venv.exists()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    done = machine.run(DUOPACK_VENV=str(precious))
    assert done.returncode == 2
    assert "other things" in done.stderr
    assert (precious / "thesis.txt").read_text() == "years of work"


def test_without_ensurepip_and_pip_the_packages_to_install_are_named(machine, tmp_path, monkeypatch):
    # An isolated Python cannot be robbed of ensurepip from outside: so the function is asked.
    bootstrap = load(machine)
    monkeypatch.setattr(
        bootstrap, "_python", lambda _: subprocess.CompletedProcess([], 1, "", "No module named pip")
    )
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda _: None)
    said = bootstrap._bring_pip()
    assert "python3-venv" in said
    assert "No module named pip" in said


def test_without_ensurepip_this_pythons_pip_installs_one(machine, monkeypatch):
    bootstrap = load(machine)
    monkeypatch.setattr(bootstrap, "_python", lambda _: subprocess.CompletedProcess([], 1, "", "no"))
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda _: object())
    ran = []

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(bootstrap, "_run", run)
    assert bootstrap._bring_pip() is None
    assert ran == [
        (sys.executable, "-m", "pip", "--python", str(bootstrap.PYTHON), "install", "--quiet", "pip")
    ]


def test_an_old_python_is_refused_in_words(machine, monkeypatch, capsys):
    bootstrap = load(machine)
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 2))
    assert bootstrap.main([]) == 2
    assert "3.11 or newer" in capsys.readouterr().err


def load(machine: Machine):
    spec = importlib.util.spec_from_file_location(
        "bootstrap_under_test", machine.root / "scripts" / "bootstrap.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
