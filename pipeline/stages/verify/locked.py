"""The image against models.lock: each file of each model, and the base's digest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeline.errors import DuopackError, quoted
from pipeline.files import FileRecord
from pipeline.lock.values import Lock
from pipeline.stages.inside.image import Inside
from pipeline.stages.quantize.record import RECORD as QUANTIZATION_RECORD
from pipeline.stages.verify.finding import Finding, Severity
from pipeline.weights.shards.record import RECORD as SHARDS_RECORD

BASE_DIGEST = "org.opencontainers.image.base.digest"
BASE_NAME = "org.opencontainers.image.base.name"
_AGAIN = "build the image again from this lock, or verify it with the lock that it was built from (--catalog)"


@dataclass(frozen=True)
class Expected:
    """What must be in an image: files by model directory, each path relative to it, and the base's digest."""

    files: Mapping[str, tuple[FileRecord, ...]]
    base: str | None = None


def expected_from_lock(inside: Inside, lock: Lock) -> tuple[Expected, tuple[str, ...]]:
    """What the lock says of the models that launch.json names; and the keys that the lock does not have."""
    try:
        launch = inside.launch
    except DuopackError:
        launch = None
    files, absent = {}, []
    for model in launch.models if launch else ():
        directory = model.directory.strip("/")
        if locked := lock.models.get(model.key):
            if not is_made(inside, directory):
                files[directory] = locked.files
        else:
            absent.append(model.key)
    return Expected(files, _locked_base(inside, lock)), tuple(absent)


def is_made(inside: Inside, directory: str) -> bool:
    """Whether a model's weights were made while building: the lock then names their source, not them."""
    records = (QUANTIZATION_RECORD, SHARDS_RECORD)
    return any(
        path.startswith(f"{directory}/") and path.rpartition("/")[2] in records
        for path in inside.tree.entries
    )


def check_locked(inside: Inside, expected: Expected, *, strict: bool) -> Iterator[Finding]:
    """Differences between the image and what is expected: errors when `strict`, else warnings."""
    severity: Severity = "error" if strict else "warning"
    for directory, files in expected.files.items():
        for file in files:
            yield from _check_file(inside, f"{directory}/{file.path}", file, severity)
        yield from _extra(inside, directory, files, severity)
    claimed = inside.labels.get(BASE_DIGEST)
    if expected.base is not None and claimed != expected.base:
        said = quoted(claimed or "no known base", 90)
        sentence = f"it says that it was built on {said}, and the lock has {expected.base}"
        yield Finding("lock-base", severity, sentence, _AGAIN, "config")


def _check_file(inside: Inside, path: str, file: FileRecord, severity: Severity) -> Iterator[Finding]:
    where = f"/{quoted(path)}"
    entry = inside.tree.entries.get(path)
    if entry is None or entry.member.kind != "file":
        if inside.unread:
            sentence = "it is in the lock, and not in the layers that were looked into"
            yield Finding("lock-unread", "note", sentence, "read the whole image: --deep", where)
        else:
            yield Finding("lock-missing", severity, "it is in the lock, and not in the image", _AGAIN, where)
        return
    if entry.member.size != file.size:
        sentence = f"it has {entry.member.size} bytes, and {file.size} by the lock"
        yield Finding("lock-size", severity, sentence, _AGAIN, where)
        return
    sha256 = inside.layers[entry.layer].hashes.get(path)
    if sha256 is not None and sha256 != file.sha256:
        sentence = f"its sha256 is {sha256}, and {file.sha256} by the lock"
        yield Finding("lock-sha256", "error", sentence, _AGAIN, where)
    elif sha256 is None and inside.deep:
        yield Finding("lock-unread", severity, "its bytes could not be read", _AGAIN, where)


def _extra(
    inside: Inside, directory: str, files: tuple[FileRecord, ...], severity: Severity
) -> Iterator[Finding]:
    known = {f"{directory}/{file.path}" for file in files}
    for path, entry in inside.tree.entries.items():
        if path.startswith(f"{directory}/") and entry.member.kind != "directory" and path not in known:
            sentence = "it lies among the model's files, and the lock does not know it"
            yield Finding("lock-extra", severity, sentence, _AGAIN, f"/{quoted(path)}")


def _locked_base(inside: Inside, lock: Lock) -> str | None:
    """The digest that the lock has for the base that the image names, on its platform; None when it has none."""
    name = inside.labels.get(BASE_NAME)
    for base in lock.bases.values():
        if name is not None and name in base.images:
            platform = "/".join(inside.platform.split("/")[:2])
            return base.platforms.get(platform)
    return None
