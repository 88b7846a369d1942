"""All checks of an image, and what came of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.errors import DuopackError
from pipeline.lock.values import Lock
from pipeline.oci.documents import Resolved
from pipeline.oci.limits import LimitError
from pipeline.oci.model import Source
from pipeline.stages.inside.base import BaseImageError
from pipeline.stages.inside.image import Asking, Inside, platforms, see
from pipeline.stages.inside.models import model_directories
from pipeline.stages.verify.documents import check_documents
from pipeline.stages.verify.entries import check_entries
from pipeline.stages.verify.finding import Finding, of_error, ordered
from pipeline.stages.verify.launched import check_launch
from pipeline.stages.verify.locked import check_locked, expected_from_lock
from pipeline.stages.verify.weights import CheckedModel, check_model


@dataclass(frozen=True)
class Report:
    """What is known of one image of one platform. Sizes are in bytes; `read` is what was read for it."""

    reference: str
    digest: str
    platform: str
    deep: bool
    layers: int
    base_layers: int
    base_told_by: str
    size: int
    read: int
    seconds: float
    models: tuple[CheckedModel, ...]
    findings: tuple[Finding, ...]
    command: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether there is no error among the findings."""
        return not any(one.severity == "error" for one in self.findings)


def verify(
    source: Source,
    reference: str,
    asking: Asking,
    *,
    lock: Lock | None = None,
    locked: bool = False,
) -> tuple[Report, ...]:
    """Judges the image under a reference, or each image of an index when no platform is asked for.

    `lock` is what models.lock says; with `locked` every difference from it is an error. Raises DuopackError when
    there is no such image, or no manifest of one; everything wrong behind that is a finding.
    """
    return tuple(
        _report(source, reference, resolved, asking, lock, locked)
        for resolved in platforms(source, reference, asking.platform)
    )


def judge(inside: Inside, models: tuple[CheckedModel, ...]) -> tuple[Finding, ...]:
    """Every check that needs nothing but the image."""
    directories = [model.directory for model in models]
    return (
        *check_documents(inside),
        *check_entries(inside, directories),
        *check_launch(inside),
        *(finding for model in models for finding in model.findings),
    )


def _report(
    source: Source, reference: str, resolved: Resolved, asking: Asking, lock: Lock | None, locked: bool
) -> Report:
    started = time.monotonic()
    try:
        inside = see(source, reference, resolved, asking)
        models = tuple(check_model(inside, model) for model in model_directories(inside))
        findings = [*judge(inside, models), *_nothing(inside, models), *_locked(inside, lock, locked)]
    except BaseImageError:
        raise
    except DuopackError as error:
        # Its manifest is sound, and what it names cannot be had: that is what is to be said of it.
        return _failed(reference, resolved, asking, error, time.monotonic() - started)
    return Report(
        reference=reference,
        digest=inside.digest,
        platform=inside.platform,
        deep=inside.deep,
        layers=len(inside.layers),
        base_layers=inside.base.count,
        base_told_by=inside.base.told_by,
        size=inside.size,
        read=inside.reading.fetched + sum(layer.read for layer in inside.layers),
        seconds=round(time.monotonic() - started, 3),
        models=models,
        findings=ordered(findings),
        command=inside.words("Cmd"),
    )


def _failed(
    reference: str, resolved: Resolved, asking: Asking, error: DuopackError, seconds: float
) -> Report:
    id_ = f"limit-{error.limit}" if isinstance(error, LimitError) else "image"
    layers = resolved.manifest.layers
    return Report(
        reference=reference,
        digest=resolved.descriptor.digest,
        platform=resolved.descriptor.platform or "",
        deep=asking.deep,
        layers=len(layers),
        base_layers=0,
        base_told_by="nothing",
        size=sum(layer.size for layer in layers),
        read=0,
        seconds=round(seconds, 3),
        models=(),
        findings=(of_error(id_, error),),
    )


def _nothing(inside: Inside, models: tuple[CheckedModel, ...]) -> Iterator[Finding]:
    if not models:
        where = "in what was looked into" if inside.unread else "above the base"
        sentence = f"no weights were found {where}"
        yield Finding(
            "no-weights", "warning", sentence, "look into it: duopack inspect; build an image with models"
        )


def _locked(inside: Inside, lock: Lock | None, strict: bool) -> Iterator[Finding]:
    if lock is None:
        return
    expected, absent = expected_from_lock(inside, lock)
    if strict:
        for key in absent:
            yield Finding(
                "lock-absent", "error", f"models.lock does not hold {key}", f"duopack lock {key}", key
            )
        if expected.base is None:
            sentence = "models.lock does not hold the base that the image names"
            yield Finding(
                "lock-absent", "error", sentence, "duopack lock, or verify without --locked", "base"
            )
    yield from check_locked(inside, expected, strict=strict)
