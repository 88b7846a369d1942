"""`duopack lock`: what is missing or stale is resolved, what moved is shown and stays until --update."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.catalog.load import load_catalog
from pipeline.catalog.schema import Catalog, Files
from pipeline.errors import DuopackError, UsageError
from pipeline.files import FileRecord
from pipeline.lock.refresh import refresh
from pipeline.lock.resolve import wanted_fingerprint
from pipeline.lock.values import Lock, LockedBase, LockedModel
from pipeline.oci.digest import Digest

ROOT = Path(__file__).resolve().parents[2]


class World:
    """Hubs and registries as one thing that can move and break; counts who was asked."""

    def __init__(self) -> None:
        self.content: dict[str, str] = {}
        self.source = "modelscope:x/y"
        self.broken: set[str] = set()
        self.asked: list[str] = []

    def _ask(self, key: str) -> str:
        self.asked.append(key)
        if key in self.broken:
            raise DuopackError(f"{key} does not answer", where="hub.example")
        return self.content.get(key, "a")

    def model(self, key, model) -> LockedModel:
        digit = self._ask(key)
        return LockedModel(self.source, None, wanted_fingerprint(model), (FileRecord("f", 1, digit * 64),))

    def base(self, key, base) -> LockedBase:
        digest = Digest(f"sha256:{self._ask(key) * 64}")
        return LockedBase(base.images, digest, dict.fromkeys(base.platforms, digest))

    def refresh(self, catalog: Catalog, lock: Lock, *keys: str, **options):
        return refresh(catalog, lock, keys, resolve_model=self.model, resolve_base=self.base, **options)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog(ROOT / "models.yaml")


@pytest.fixture
def locked(world: World, catalog: Catalog) -> Lock:
    lock = world.refresh(catalog, Lock()).lock
    world.asked.clear()
    return lock


def kinds(refreshed) -> dict[str, str]:
    return {change.entry: change.kind for change in refreshed.changes}


def test_without_keys_every_base_and_model_is_locked(world, catalog):
    refreshed = world.refresh(catalog, Lock())
    assert set(refreshed.lock.models) == set(catalog.models)
    assert set(refreshed.lock.bases) == set(catalog.bases)
    assert set(kinds(refreshed).values()) == {"locked"}
    assert refreshed.changes[0].reason == "base 'v0.20.2rc1' is not in models.lock"
    assert not refreshed.current


def test_a_second_time_nothing_has_moved_and_the_bytes_are_the_same(world, catalog, locked):
    refreshed = world.refresh(catalog, locked)
    assert set(kinds(refreshed).values()) == {"same"}
    assert refreshed.current
    assert refreshed.lock.to_bytes() == locked.to_bytes()


@pytest.mark.parametrize(
    ("keys", "entries"),
    [
        (("9b",), ["base v0.20.2rc1", "model 9b"]),
        (("nn27", "27b"), ["base v0.20.2rc1", "model 27b"]),
        (("v0.23.0rc1",), ["base v0.23.0rc1"]),
        (("v0.23.0rc1", "2b"), ["base v0.20.2rc1", "base v0.23.0rc1", "model 2b"]),
    ],
)
def test_keys_stand_for_their_models_and_the_base(world, catalog, keys, entries):
    assert list(kinds(world.refresh(catalog, Lock(), *keys))) == entries


def test_a_set_stands_for_its_models(world, catalog):
    refreshed = world.refresh(catalog, Lock(), "full")
    assert set(refreshed.lock.models) == set(catalog.sets["full"])


def test_an_unknown_key_is_refused_before_anything_is_asked(world, catalog):
    with pytest.raises(UsageError, match="9c"):
        world.refresh(catalog, Lock(), "9b", "9c")
    assert world.asked == []


def test_what_moved_is_shown_and_stays(world, catalog, locked):
    world.content = {"9b": "b", "v0.20.2rc1": "b"}
    refreshed = world.refresh(catalog, locked, "9b")
    assert kinds(refreshed) == {"base v0.20.2rc1": "moved", "model 9b": "moved"}
    assert refreshed.changes[1].lines == ("~ f sha256 aaaaaaaaaaaa… → bbbbbbbbbbbb…",)
    assert refreshed.lock == locked
    assert refreshed.moved
    assert not refreshed.current


def test_what_moved_is_taken_with_update(world, catalog, locked):
    world.content = {"9b": "b"}
    refreshed = world.refresh(catalog, locked, "9b", update=True)
    assert kinds(refreshed)["model 9b"] == "updated"
    assert refreshed.lock.models["9b"].files[0].sha256 == "b" * 64
    assert not refreshed.moved


def test_a_stale_entry_is_resolved_without_update(world, catalog, locked):
    changed = catalog.models["9b"].model_copy(update={"files": Files(include=("f",))})
    catalog = catalog.model_copy(update={"models": {**catalog.models, "9b": changed}})
    world.content = {"9b": "b"}
    refreshed = world.refresh(catalog, locked, "9b")
    (_, change) = refreshed.changes
    assert (change.kind, change.entry) == ("locked", "model 9b")
    assert "asks for other sources or files" in change.reason
    assert refreshed.lock.models["9b"].files[0].sha256 == "b" * 64


def test_only_what_is_stale_is_asked_for_when_a_build_wants_it(world, catalog, locked):
    without = replace(locked, models={key: model for key, model in locked.models.items() if key != "9b"})
    refreshed = world.refresh(catalog, without, only_stale=True)
    assert world.asked == ["9b"]
    assert kinds(refreshed) == {"model 9b": "locked"}


def test_a_platform_that_came_into_the_catalog_is_locked(world, catalog, locked):
    old = locked.bases["v0.20.2rc1"]
    one = replace(old, platforms={"linux/arm64": old.platforms["linux/arm64"]})
    refreshed = world.refresh(catalog, locked.with_base("v0.20.2rc1", one), "v0.20.2rc1")
    assert kinds(refreshed) == {"base v0.20.2rc1": "locked"}
    assert refreshed.lock == locked


def test_a_platform_that_the_image_does_not_have_settles(world, catalog, locked):
    old = locked.bases["v0.20.2rc1"]
    one = replace(old, platforms={"linux/arm64": old.platforms["linux/arm64"]})
    world.base = lambda key, base: one
    refreshed = world.refresh(catalog, locked.with_base("v0.20.2rc1", one), "v0.20.2rc1")
    assert refreshed.current


def test_the_same_files_from_another_source_are_no_change(world, catalog, locked):
    world.source = "huggingface:x/y"
    refreshed = world.refresh(catalog, locked, "9b")
    assert kinds(refreshed)["model 9b"] == "same"
    assert refreshed.lock == locked


def test_an_entry_that_fails_does_not_lose_the_others(world, catalog, locked):
    world.broken = {"9b"}
    refreshed = world.refresh(catalog, Lock(), "9b", "27b")
    assert kinds(refreshed) == {"base v0.20.2rc1": "locked", "model 9b": "failed", "model 27b": "locked"}
    assert set(refreshed.lock.models) == {"27b"}
    assert [str(error) for error in refreshed.failures] == ["hub.example: 9b does not answer."]
    assert not refreshed.current


def test_an_entry_that_cannot_be_compared_stays_in_the_lock(world, catalog, locked):
    world.broken = {"9b"}
    assert world.refresh(catalog, locked, update=True).lock == locked


def test_what_left_the_catalog_is_told_and_dropped_only_with_update(world, catalog, locked):
    extra = locked.with_model("old", locked.models["9b"]).with_base("old", locked.bases["v0.20.2rc1"])
    told = world.refresh(catalog, extra)
    assert (kinds(told)["model old"], kinds(told)["base old"]) == ("left", "left")
    assert told.lock == extra
    assert told.current
    dropped = world.refresh(catalog, extra, update=True)
    assert kinds(dropped)["model old"] == "dropped"
    assert dropped.lock == locked


def test_with_keys_the_rest_of_the_lock_is_not_touched(world, catalog, locked):
    extra = locked.with_model("old", locked.models["9b"])
    assert world.refresh(catalog, extra, "9b", update=True).lock == extra


def test_each_success_can_be_written_at_once(world, catalog):
    world.broken = {"27b"}
    written: list[int] = []
    world.refresh(
        catalog, Lock(), "9b", "27b", on_change=lambda change, lock: written.append(len(lock.models))
    )
    assert written == [0, 1, 1]


def test_who_is_asked_is_told_before(world, catalog):
    started: list[str] = []
    world.refresh(catalog, Lock(), "9b", on_start=started.append)
    assert started == ["base v0.20.2rc1", "model 9b"]
