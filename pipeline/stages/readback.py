"""Reads a finished image back and holds it against the lock: every byte, where it lies.

Each blob is hashed while it is read; each file in the model layers must be in the lock with this sha256,
and each file of the lock must be in the layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.catalog.target import Target
from pipeline.errors import DuopackError
from pipeline.lock.values import Lock
from pipeline.oci.documents import resolve
from pipeline.oci.model import OnBytes, Source
from pipeline.stages.image import ROOT
from pipeline.stages.inside.image import Asking, Inside, see
from pipeline.stages.inside.models import model_directories
from pipeline.stages.verify.finding import ordered
from pipeline.stages.verify.locked import Expected, check_locked
from pipeline.stages.verify.report import judge
from pipeline.stages.verify.weights import check_model


@dataclass(frozen=True)
class ReadBack:
    """What was found in an image; sizes in bytes."""

    digest: str
    layers: int
    size: int
    model_files: int
    other_files: tuple[str, ...]
    command: tuple[str, ...]


def read_back(
    source: Source,
    reference: str,
    target: Target,
    lock: Lock,
    *,
    on_bytes: OnBytes = lambda _: None,
) -> ReadBack:
    """Raises DuopackError for the first difference between the image and the lock, and for any other error in it."""
    resolved = resolve(source, reference, target.platform)
    inside = see(source, reference, resolved, Asking(deep=True, begin=lambda _total: on_bytes))
    expected = Expected({f"{ROOT}/{model.directory}": lock.models[key].files for key, model in target.models})
    models = tuple(check_model(inside, model) for model in model_directories(inside))
    for finding in ordered([*check_locked(inside, expected, strict=True), *judge(inside, models)]):
        if finding.severity == "error":
            raise DuopackError(
                f"{finding.where}: {finding.sentence} [{finding.id}]", where=reference, mend=finding.mend
            )
    return ReadBack(
        digest=str(resolved.descriptor.digest),
        layers=len(inside.layers),
        size=inside.size,
        model_files=sum(len(files) for files in expected.files.values()),
        other_files=_others(inside, expected),
        command=inside.words("Cmd"),
    )


def _others(inside: Inside, expected: Expected) -> tuple[str, ...]:
    """The files above the base that are not in the lock."""
    known = {f"{directory}/{file.path}" for directory, files in expected.files.items() for file in files}
    return tuple(
        path for path, entry in inside.tree.files() if entry.layer >= inside.base.count and path not in known
    )
