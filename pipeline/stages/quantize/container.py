"""Programs run in the base image with the host's chips: what needs CANN runs where CANN is."""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pipeline.ascend.container import container_options, visible_chips
from pipeline.ascend.environment import ASCEND_ROOT, SET_ENV
from pipeline.errors import DuopackError
from pipeline.reports.progress import Progress
from pipeline.stages.quantize.environment import VERSION
from pipeline.stages.quantize.runner import TAIL, Call, OnLine, failed, launcher, quant_arguments

if TYPE_CHECKING:
    from docker.models.containers import Container

READ_ONLY: Final = "ro"
WRITABLE: Final = "rw"


@dataclass(frozen=True)
class Base:
    """The image, by its name in the engine or a registry, and where the host's device nodes are."""

    image: str
    devices: Path = Path("/dev")

    def chips(self) -> tuple[int, ...]:
        return visible_chips(self.devices)

    def prepare(self, progress: Progress) -> None:
        """Pulls the image when the engine does not have it."""
        from pipeline.serving.container import engine, ensure_image

        with engine() as client:
            ensure_image(client, self.image, progress.note)

    def run(
        self,
        script: str,
        mounts: Mapping[Path, str],
        chips: Sequence[int],
        on_line: OnLine,
        *,
        writable: Path,
    ) -> None:
        """Runs a shell script to its end; host paths keep theirs inside. `writable` is where it leaves its files.

        The container is removed whatever happens. Raises DuopackError with the first error it printed when it fails.
        """
        from pipeline.serving.container import engine, engine_errors, runtimes

        with engine() as client, engine_errors(self.image):
            options = container_options(chips, runtimes=runtimes(client), devices=self.devices)
            modes = dict.fromkeys(options.mounts, READ_ONLY) | {
                str(path): mode for path, mode in mounts.items()
            }
            container = client.containers.create(
                self.image,
                command=["sh", "-c", f"{_environment()}\n{script}"],
                runtime=options.runtime,
                devices=[f"{device}:{device}" for device in options.devices],
                volumes={path: {"bind": path, "mode": mode} for path, mode in modes.items()},
                environment=options.env,
                shm_size=options.shm_size,
                working_dir=str(writable),
            )
            try:
                container.start()
                _follow(container, on_line)
            finally:
                container.remove(force=True, v=True)


def _environment() -> str:
    """What the base's entrypoint sources, again: an image may have another entrypoint."""
    paths = (f"{ASCEND_ROOT}/{name}" for name in SET_ENV)
    return "\n".join(f"if [ -f {path} ]; then . {path}; fi" for path in paths) + "\nset -e"


def _follow(container: Container, on_line: OnLine) -> None:
    last: deque[str] = deque(maxlen=TAIL)
    rest = b""
    for piece in container.logs(stream=True, follow=True):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            last.append(line.decode("utf-8", "replace"))
            on_line(last[-1])
    code = int(container.wait()["StatusCode"])
    if code:
        raise failed(code, [*last, rest.decode("utf-8", "replace")])


@dataclass(frozen=True)
class ChipRunner:
    """msmodelslim in the base image, on the first chip: it takes no more than one for these models."""

    base: Base

    chips: Final = True

    def check(self) -> None:
        if not self.base.chips():
            raise DuopackError(
                "this host shows no chip",
                where=f"{self.base.devices}/davinci*",
                mend="run it on an Ascend host ('npu-smi info' lists the chips), or use --device cpu",
            )

    def prepare(self, progress: Progress) -> None:
        self.base.prepare(progress)

    def run(self, call: Call, on_line: OnLine) -> None:
        wide = " --float32" if call.wide else ""
        command = (
            shlex.join(["python3", str(launcher())])
            + wide
            + " "
            + shlex.join(quant_arguments(call, device="npu"))
        )
        script = f"{ensure_msmodelslim()}\n{command}"
        mounts = {
            launcher(): READ_ONLY,
            call.weights.resolve(): READ_ONLY,
            call.output.parent.absolute(): WRITABLE,
        }
        self.base.run(script, mounts, self.base.chips()[:1], on_line, writable=call.output.parent.absolute())


def ensure_msmodelslim() -> str:
    """Shell that installs it into the container when the image does not have it."""
    return (
        "python3 -c 'import msmodelslim' 2>/dev/null || "
        f"python3 -m pip install --quiet msmodelslim=={VERSION}"
    )
