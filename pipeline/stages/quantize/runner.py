"""Where msmodelslim runs: in an environment of its own on this machine's CPU, or in the base image with the chips."""

from __future__ import annotations

import re
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final, Protocol

from pipeline.errors import DuopackError, quoted
from pipeline.reports.progress import Progress
from pipeline.stages.quantize.environment import find_environment, make_environment

OnLine = Callable[[str], None]
TAIL: Final = 400
"""Lines of output kept for an error."""
EXCEPTION: Final = re.compile(r"[\w.]*(Error|Exception|Exit)\b")
PATIENCE: Final = 20.0
"""Seconds that msmodelslim gets to end when it is asked to."""


@dataclass(frozen=True)
class Call:
    """One run of msmodelslim: what it reads, where it writes, and by which of its adapters."""

    model: Path
    output: Path
    recipe: Path
    model_type: str
    weights: Path
    """The directory that links in `model` lead into."""
    wide: bool
    """Whether layers are to be kept in float32."""


class Runner(Protocol):
    """One way to run msmodelslim."""

    @property
    def chips(self) -> bool:
        """Whether it runs on NPUs."""
        ...

    def check(self) -> None:
        """Raises DuopackError for what can be seen at once that would keep it from running."""
        ...

    def prepare(self, progress: Progress) -> None:
        """Fetches and installs what is missing."""
        ...

    def run(self, call: Call, on_line: OnLine) -> None:
        """Runs it to its end; `on_line` gets every line that it prints.

        Raises DuopackError with the telling one when it fails.
        """
        ...


@dataclass(frozen=True)
class CpuRunner:
    """On this machine's CPU."""

    cache: Path
    environ: Mapping[str, str]

    chips: Final = False

    def check(self) -> None:
        find_environment(self.cache, self.environ)

    def prepare(self, progress: Progress) -> None:
        make_environment(self.cache, self.environ, progress)

    def run(self, call: Call, on_line: OnLine) -> None:
        environment = find_environment(self.cache, self.environ)
        assert environment, "prepare comes first"
        command = [
            str(environment.python.absolute()),
            # Isolated: no module beside the launcher, and none of the user's, stands before msmodelslim's own.
            "-IB",
            str(launcher()),
            *(["--float32"] if call.wide else []),
            *quant_arguments(call, device="cpu"),
        ]
        env = dict(self.environ) | {"HF_HUB_OFFLINE": "1"}
        _follow(command, env, call.recipe.parent, on_line)


def launcher() -> Path:
    """The script that msmodelslim's Python runs."""
    return Path(str(files("pipeline.stages.quantize") / "run_msmodelslim.py"))


def quant_arguments(call: Call, *, device: str) -> list[str]:
    """msmodelslim's command. With a recipe it asks nothing; code from a model's repository is never run."""
    options = {
        "model_path": call.model.absolute(),
        "save_path": call.output.absolute(),
        "config_path": call.recipe.absolute(),
        "model_type": call.model_type,
        "device": device,
        "trust_remote_code": False,
    }
    return ["quant", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


def failed(code: int, lines: Sequence[str]) -> DuopackError:
    """What a person should see of a run that ended badly: the first error, of which later ones are consequences."""
    telling = [line for line in lines if EXCEPTION.match(line)]
    why = telling[0] if telling else [*lines, "it printed nothing"][max(len(lines) - 1, 0)]
    killed = " (killed: out of memory?)" if code in {-9, 137} else ""
    return DuopackError(
        f"msmodelslim ended with exit code {code}{killed}: {quoted(why.strip(), 500)}",
        where="msmodelslim",
        mend="see --debug for more; 'killed' means that the model is too large for this machine's memory, which the "
        "streaming engine's recipes are not",
    )


def _follow(command: Sequence[str], env: Mapping[str, str], cwd: Path, on_line: OnLine) -> None:
    """Runs a command to its end, whatever ends us: it gets the time to end, and is then killed."""
    last: deque[str] = deque(maxlen=TAIL)
    process = subprocess.Popen(
        command,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line)
            on_line(line)
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.stdout:
            process.stdout.close()
    if code != 0:
        raise failed(code, last)
