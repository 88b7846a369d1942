"""What the environment and the common options say, read once at the start; nothing reads them later.

The variables of docker (`DOCKER_CONFIG`, …), ModelScope and Hugging Face are those tools' own, and
`DUOPACK_PLAIN_HTTP` is the registry client's: they are read by the parts that speak for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import UsageError, quoted


@dataclass(frozen=True)
class Settings:
    """Where things are and how hard to work.

    `catalog` is models.yaml, with models.lock beside it. `work` holds what is downloaded and what may be
    thrown away. `parallel` is the number of files or layers moved at once. `devices` is where chips are looked
    for: DUOPACK_DEVICE_DIR, as for the start scripts.
    """

    catalog: Path
    work: Path
    registry: str | None
    tag: str | None
    parallel: int
    devices: Path = Path("/dev")

    @property
    def lock(self) -> Path:
        return self.catalog.with_name("models.lock")

    @property
    def cache(self) -> Path:
        """What the pipeline keeps for itself inside the work directory; no key can have this name."""
        return self.work / "_work"

    def model_directory(self, key: str) -> Path:
        return self.cache / "models" / key

    def source_directory(self, key: str) -> Path:
        """Where the source of a model lies whose weights are made from it."""
        return self.cache / "sources" / key

    def quantized_directory(self, key: str) -> Path:
        """Where quantized weights lie that are only made to be split."""
        return self.cache / "quantized" / key

    @property
    def layer_memo(self) -> Path:
        return self.cache / "layers.json"

    @property
    def upload_journal(self) -> Path:
        return self.cache / "uploads"


def read_settings(
    environ: Mapping[str, str], *, catalog: Path | None = None, work: Path | None = None
) -> Settings:
    """Settings from the environment; what is given on the command line wins, and an empty variable is none.

    Raises UsageError for a variable that cannot be what it says.
    """
    parallel = environ.get("DUOPACK_PARALLEL") or "4"
    if not re.fullmatch("[1-9]|1[0-6]", parallel):
        raise UsageError(
            f"'{quoted(parallel)}' is not a number from 1 to 16",
            where="DUOPACK_PARALLEL",
            mend="unset it, or give the number of files to move at once",
        )
    return Settings(
        catalog=catalog or Path(environ.get("DUOPACK_CATALOG") or "models.yaml"),
        work=work or Path(environ.get("DUOPACK_WORK") or "build"),
        registry=environ.get("DUOPACK_REGISTRY") or None,
        tag=environ.get("DUOPACK_TAG") or None,
        parallel=int(parallel),
        devices=Path(environ.get("DUOPACK_DEVICE_DIR") or "/dev"),
    )
