"""Brings a lock up to date with its catalog: resolves what is missing or stale, shows what moved.

A moved entry stays as it is until somebody asks for the update: a build must not change because a hub did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Literal, Protocol, TypeVar

from pipeline.catalog.schema import Base, Catalog, Model
from pipeline.catalog.target import find_target
from pipeline.errors import DuopackError
from pipeline.lock.compare import base_changes, model_changes
from pipeline.lock.resolve import base_staleness, model_staleness
from pipeline.lock.values import Lock, LockedBase, LockedModel

Kind = Literal["locked", "same", "moved", "updated", "left", "dropped", "failed"]


@dataclass(frozen=True)
class Change:
    """What became of one entry.

    `locked`: was missing or stale, and is resolved now. `same`: nothing moved. `moved`: the hub or registry
    has something else, and the entry stays. `updated`: so too, and the new one is taken. `left`: the catalog
    does not have it any more. `dropped`: so too, and it is taken out. `failed`: it could not be resolved.
    """

    kind: Kind
    entry: str
    """`base KEY` or `model KEY`."""
    reason: str
    lines: tuple[str, ...] = ()
    """The difference, as `compare` writes it."""
    error: DuopackError | None = None


@dataclass(frozen=True)
class Refreshed:
    """The lock as it should be written, and what became of each entry that was looked at."""

    lock: Lock
    changes: tuple[Change, ...]

    @property
    def moved(self) -> bool:
        """Whether something moved and was left as it was."""
        return any(change.kind == "moved" for change in self.changes)

    @property
    def current(self) -> bool:
        """Whether every entry was locked before and nothing moved: what `--check` wants to know."""
        return all(change.kind in {"same", "left"} for change in self.changes)

    @property
    def failures(self) -> tuple[DuopackError, ...]:
        """What could not be resolved, in the catalog's order."""
        return tuple(change.error for change in self.changes if change.error)


class ResolveModel(Protocol):
    """`resolve.lock_model` with everything but the model filled in."""

    def __call__(self, key: str, model: Model) -> LockedModel: ...


class ResolveBase(Protocol):
    """`resolve.lock_base` with everything but the base filled in."""

    def __call__(self, key: str, base: Base) -> LockedBase: ...


OnChange = Callable[[Change, Lock], None]
"""Told of each entry as it is done, with the lock so far: what succeeded can be written at once."""


def refresh(
    catalog: Catalog,
    lock: Lock,
    keys: Iterable[str] = (),
    *,
    resolve_model: ResolveModel,
    resolve_base: ResolveBase,
    update: bool = False,
    only_stale: bool = False,
    on_start: Callable[[str], None] | None = None,
    on_change: OnChange | None = None,
) -> Refreshed:
    """Looks at the bases and models of `keys`, or at all.

    A key is one that can be built, which stands for its models and the default base, or a base. What is
    missing or stale is resolved and taken. The rest is left alone with `only_stale`; else it is resolved and
    compared, and taken only with `update`, which also drops what the catalog does not have (when no keys are
    given). An entry that cannot be resolved is a `failed` change and stays as it was; the others go on.
    Raises UsageError for an unknown key. Writes nothing.
    """
    wanted = tuple(keys)
    jobs: list[_Step] = [
        job
        for job in _jobs(catalog, wanted, lock, resolve_model, resolve_base)
        if job.stale or not only_stale
    ]
    if not wanted and not only_stale:
        jobs += _leftovers(catalog, lock)
    changes = []
    for job in jobs:
        if on_start:
            on_start(job.name)
        change, lock = job.run(lock, update=update)
        changes.append(change)
        if on_change:
            on_change(change, lock)
    return Refreshed(lock, tuple(changes))


class _Step(Protocol):
    """One entry to look at."""

    @property
    def name(self) -> str: ...

    def run(self, lock: Lock, *, update: bool) -> tuple[Change, Lock]: ...


Entry = TypeVar("Entry", LockedBase, LockedModel)


@dataclass(frozen=True)
class _Job(Generic[Entry]):
    """An entry that the catalog has."""

    name: str
    stale: str | None
    old: Entry | None
    resolve: Callable[[], Entry]
    compare: Callable[[Entry | None, Entry], tuple[str, ...]]
    put: Callable[[Lock, Entry], Lock]

    def run(self, lock: Lock, *, update: bool) -> tuple[Change, Lock]:
        try:
            new = self.resolve()
        except DuopackError as error:
            return Change("failed", self.name, self.stale or "it could not be compared", error=error), lock
        lines = self.compare(self.old, new)
        if self.stale and new != self.old:
            return Change("locked", self.name, self.stale, lines), self.put(lock, new)
        if not lines or _same_content(self.old, new):
            return Change("same", self.name, "nothing moved"), lock
        if update:
            return Change("updated", self.name, "it moved, and the lock follows", lines), self.put(lock, new)
        return Change("moved", self.name, "it moved; the lock stays until --update", lines), lock


def _same_content(old: LockedBase | LockedModel | None, new: LockedBase | LockedModel) -> bool:
    """Whether another source gave the very same files: a hub that is down today is no change."""
    if isinstance(old, LockedModel) and isinstance(new, LockedModel):
        return old.source != new.source and old.files == new.files
    return old == new


def _jobs(
    catalog: Catalog,
    keys: tuple[str, ...],
    lock: Lock,
    resolve_model: ResolveModel,
    resolve_base: ResolveBase,
) -> Iterator[_Job[LockedBase] | _Job[LockedModel]]:
    bases, models = _chosen(catalog, keys)
    for key in bases:
        base = catalog.bases[key]
        missing = next(
            (p for p in base.platforms if key in lock.bases and p not in lock.bases[key].platforms), None
        )
        yield _Job(
            name=f"base {key}",
            stale=base_staleness(lock, key, base, missing),
            old=lock.bases.get(key),
            resolve=partial(resolve_base, key, base),
            compare=base_changes,
            put=partial(_put_base, key),
        )
    for key in models:
        yield _Job(
            name=f"model {key}",
            stale=model_staleness(lock, key, catalog.models[key]),
            old=lock.models.get(key),
            resolve=partial(resolve_model, key, catalog.models[key]),
            compare=model_changes,
            put=partial(_put_model, key),
        )


def _chosen(catalog: Catalog, keys: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The bases and models that keys stand for, each once, in the catalog's order."""
    if not keys:
        return list(catalog.bases), list(catalog.models)
    bases = {key for key in keys if key in catalog.bases}
    targets = [find_target(catalog, key) for key in keys if key not in catalog.bases]
    bases |= {target.base_key for target in targets}
    models = {key for target in targets for key, _ in target.models}
    return [key for key in catalog.bases if key in bases], [key for key in catalog.models if key in models]


def _put_base(key: str, lock: Lock, base: LockedBase) -> Lock:
    return lock.with_base(key, base)


def _put_model(key: str, lock: Lock, model: LockedModel) -> Lock:
    return lock.with_model(key, model)


@dataclass(frozen=True)
class _Leftover:
    """An entry of the lock that the catalog does not have."""

    kind: Literal["bases", "models"]
    key: str

    @property
    def name(self) -> str:
        return f"{self.kind.removesuffix('s')} {self.key}"

    def run(self, lock: Lock, *, update: bool) -> tuple[Change, Lock]:
        if not update:
            return Change("left", self.name, "models.yaml does not have it any more; --update drops it"), lock
        rest = {key: entry for key, entry in getattr(lock, self.kind).items() if key != self.key}
        dropped = replace(lock, bases=rest) if self.kind == "bases" else replace(lock, models=rest)
        return Change("dropped", self.name, "models.yaml does not have it any more"), dropped


def _leftovers(catalog: Catalog, lock: Lock) -> list[_Leftover]:
    bases = [_Leftover("bases", key) for key in lock.bases if key not in catalog.bases]
    return bases + [_Leftover("models", key) for key in lock.models if key not in catalog.models]
