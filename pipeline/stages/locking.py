"""Locks what a build needs and the lock does not have yet, saying so; `locked` forbids that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from pipeline.catalog.schema import Model, Source
from pipeline.catalog.target import Target
from pipeline.errors import DuopackError, UsageError, quoted
from pipeline.files import exclusive
from pipeline.lock.resolve import base_staleness, lock_base, lock_model, model_staleness
from pipeline.lock.values import Lock, LockedModel, read_lock, write_lock
from pipeline.reports.progress import Progress
from pipeline.settings import Settings

_BASE = "(base)"


def parse_source(text: str) -> Source:
    """`modelscope:ID[@REV]`, `huggingface:ID[@REV]` or `dir:PATH`. Raises UsageError for anything else."""
    kind, _, rest = text.partition(":")
    mend = "write modelscope:owner/name[@revision], huggingface:owner/name[@revision] or dir:PATH"
    try:
        if kind == "dir" and rest:
            return Source(dir=str(Path(rest).expanduser().absolute()))
        name, _, revision = rest.partition("@")
        if kind == "modelscope" and name:
            return Source(modelscope=name, revision=revision or None)
        if kind == "huggingface" and name:
            return Source(huggingface=name, revision=revision or None)
    except ValueError as error:
        raise UsageError(f"'{quoted(text)}' does not name a source", where="--source", mend=mend) from error
    raise UsageError(f"'{quoted(text)}' does not name a source", where="--source", mend=mend)


def ensure_locked(
    target: Target,
    settings: Settings,
    progress: Progress,
    *,
    locked: bool,
    source: Source | None = None,
    needs_base: bool = True,
) -> Lock:
    """The lock with everything that the target needs; what is missing or stale is resolved and written.

    With `locked` anything missing or stale is an error instead. `source`, when given, is asked in place of
    the catalog's. `needs_base` is false for a build with a base of its own.
    """
    path = settings.lock
    relative_to = settings.catalog.parent
    lock = read_lock(path)
    stale = _stale(lock, target, needs_base)
    if locked and stale:
        raise DuopackError(
            "; ".join(stale.values()),
            where=str(path),
            mend=f"run 'duopack lock {target.key}' and commit models.lock, or build without --locked",
        )
    if reason := stale.get(_BASE):
        progress.note(f"{reason}: locking it first")
        base = lock_base(target.base_key, target.base, relative_to=relative_to, on_note=progress.warn)
        lock = change_lock(path, lambda old: old.with_base(target.base_key, base), progress)
    for key, model in target.models:
        if reason := stale.get(key):
            progress.note(f"{reason}: locking it first")
            entry = resolve_model(key, model, settings, progress, source)
            lock = change_lock(path, partial(Lock.with_model, key=key, model=entry), progress)
    return lock


def _stale(lock: Lock, target: Target, needs_base: bool) -> dict[str, str]:
    """Why an entry must be resolved, by model key; the base's under a name that no key can have."""
    base = base_staleness(lock, target.base_key, target.base, target.platform) if needs_base else None
    reasons = {_BASE: base} | {key: model_staleness(lock, key, model) for key, model in target.models}
    return {key: reason for key, reason in reasons.items() if reason}


def resolve_model(
    key: str, model: Model, settings: Settings, progress: Progress, source: Source | None = None
) -> LockedModel:
    """Asks the model's sources for its files; shows progress while files are hashed that have no sha256 yet."""
    with progress.bar(f"{key}: hashing", None) as bar:
        return lock_model(
            key,
            model,
            relative_to=settings.catalog.parent,
            sources=(source,) if source else (),
            on_note=progress.warn,
            on_file=lambda path, count: bar.advance(count),  # noqa: ARG005
        )


def change_lock(path: Path, change: Callable[[Lock], Lock], progress: Progress) -> Lock:
    """Reads models.lock, changes it and writes it back, while no other duopack does."""
    with exclusive(lock_file_guard(path), progress.note):
        changed = change(read_lock(path))
        write_lock(path, changed)
    return changed


def lock_file_guard(path: Path) -> Path:
    """The empty file that whoever changes models.lock holds."""
    return path.with_name(f".{path.name}.lock")
