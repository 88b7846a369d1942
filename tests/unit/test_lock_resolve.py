"""A catalog's entry is resolved by what hubs and registries say, and never by half of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.oci_memory import MemorySource, small_base

from pipeline.catalog.schema import Base, Files, Model, Source
from pipeline.catalog.target import Target
from pipeline.errors import DuopackError
from pipeline.files import FileRecord
from pipeline.hubs import Listing, RemoteFile
from pipeline.lock.resolve import (
    base_reference,
    base_staleness,
    lock_base,
    lock_model,
    model_staleness,
    staleness,
    wanted_fingerprint,
)
from pipeline.lock.values import Lock
from pipeline.oci.digest import Digest
from pipeline.oci.model import OCI_INDEX

HERE = Path("catalog")


class FakeHub:
    """A hub with files in memory; small ones have no sha256 in the listing, as at Hugging Face."""

    location = None

    def __init__(self, files: dict[str, bytes], commit: str | None = "c" * 40, *, told: bool = True) -> None:
        self.files = files
        self.commit = commit
        self.told = told

    def listing(self) -> Listing:
        sha = {path: Digest.of(data).hex if self.told else None for path, data in self.files.items()}
        return Listing(self.commit, tuple(RemoteFile(p, len(d), sha[p]) for p, d in self.files.items()))

    def fetch(self, files, directory, on_bytes) -> None:
        for file in files:
            path = directory / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.files[file.path])


class DownHub(FakeHub):
    def __init__(self, what: str = "the hub does not answer") -> None:
        super().__init__({})
        self.what = what

    def listing(self) -> Listing:
        raise DuopackError(self.what, where="hub.example", mend="try again")


@pytest.fixture
def model() -> Model:
    profile = {
        "tensor_parallel": 1,
        "served_name": "m",
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "gpu_memory_utilization": 0.5,
    }
    return Model.model_validate(
        {
            "title": "M",
            "directory": "M",
            "architecture": "qwen3.5",
            "max_positions": 4096,
            "sources": [{"modelscope": "a/b"}, {"huggingface": "a/b", "revision": "v1"}],
            "profiles": {"p": profile},
        }
    )


def hubs(*answers: FakeHub) -> Callable:
    left = list(answers)
    return lambda source, relative_to: left.pop(0)


def resolve(model: Model, *answers: FakeHub, **options):
    return lock_model("m", model, relative_to=HERE, open_hub=hubs(*answers), **options)


FILES = {"model.safetensors": b"weights", "config.json": b"{}"}


def test_the_first_source_gives_the_files_in_order_of_their_paths(model):
    locked = resolve(model, FakeHub(FILES, None))
    assert locked.source == "modelscope:a/b"
    assert locked.commit is None
    assert locked.files == (
        FileRecord("config.json", 2, Digest.of(b"{}").hex),
        FileRecord("model.safetensors", 7, Digest.of(b"weights").hex),
    )
    assert locked.wanted == wanted_fingerprint(model)


def test_a_file_without_a_sha256_is_fetched_for_it(model):
    assert resolve(model, FakeHub(FILES, told=False)).files == resolve(model, FakeHub(FILES)).files


def test_a_source_that_fails_is_noted_and_the_next_one_serves(model):
    notes: list[str] = []
    locked = resolve(model, DownHub(), FakeHub(FILES), on_note=notes.append)
    assert (locked.source, locked.commit) == ("huggingface:a/b@v1", "c" * 40)
    assert notes == [
        "model 'm' is locked from huggingface:a/b@v1, since modelscope:a/b failed: the hub does not answer"
    ]


def test_when_all_sources_fail_each_ones_reason_is_told(model):
    with pytest.raises(DuopackError) as caught:
        resolve(model, DownHub("no route"), DownHub("no such model"))
    assert "modelscope:a/b: no route" in str(caught.value)
    assert "huggingface:a/b@v1: no such model" in str(caught.value)
    assert str(caught.value).startswith("model 'm': ")


def test_a_source_with_an_unsafe_name_is_not_used(model):
    locked = resolve(model, FakeHub({**FILES, "../evil": b"x"}), FakeHub(FILES))
    assert locked.source == "huggingface:a/b@v1"


def test_only_what_the_patterns_take_is_locked(model):
    chosen = model.model_copy(update={"files": Files(include=("*.json",))})
    assert [file.path for file in resolve(chosen, FakeHub(FILES)).files] == ["config.json"]


def test_another_source_can_be_named_and_the_entry_stays_the_catalogs(model):
    asked: list[Source] = []

    def open_hub(source: Source, relative_to: Path) -> FakeHub:
        asked.append(source)
        return FakeHub(FILES, None)

    locked = lock_model("m", model, relative_to=HERE, sources=[Source(dir="copy")], open_hub=open_hub)
    assert asked == [Source(dir="copy")]
    assert locked.source == "dir"
    assert model_staleness(Lock().with_model("m", locked), "m", model) is None


def test_a_directory_is_locked_relative_to_the_catalog(model, tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/config.json").write_bytes(b"{}")
    local = model.model_copy(update={"sources": (Source(dir="weights"),)})
    locked = lock_model("m", local, relative_to=tmp_path)
    assert locked.files == (FileRecord("config.json", 2, Digest.of(b"{}").hex),)
    assert str(tmp_path) not in Lock().with_model("m", locked).to_bytes().decode()


@pytest.mark.parametrize(
    "change",
    [
        {"sources": (Source(modelscope="a/c"),)},
        {"sources": (Source(modelscope="a/b", revision="v2"), Source(huggingface="a/b", revision="v1"))},
        {"files": Files(include=("*.json",))},
        {"files": Files(exclude=("*.bin",))},
    ],
)
def test_the_entry_is_stale_when_the_catalog_asks_for_something_else(model, change):
    lock = Lock().with_model("m", resolve(model, FakeHub(FILES)))
    assert model_staleness(lock, "m", model) is None
    changed = model_staleness(lock, "m", model.model_copy(update=change))
    assert changed == "models.yaml asks for other sources or files of model 'm' than models.lock has"


def test_the_entry_is_not_stale_when_only_the_serving_changed(model):
    lock = Lock().with_model("m", resolve(model, FakeHub(FILES)))
    assert model_staleness(lock, "m", model.model_copy(update={"title": "Other", "max_positions": 1})) is None


def test_a_model_that_was_never_locked_is_told(model):
    assert model_staleness(Lock(), "m", model) == "model 'm' is not in models.lock"


# ── bases ────────────────────────────────────────────────────────────────────────────────────────────


def base(*images: str, **changes) -> Base:
    return Base.model_validate(
        {"images": images or ("r.example/x:1",), "vllm": "1", "vllm_ascend": "1", **changes}
    )


def registry(tag: str = "1", **platforms: str) -> tuple[MemorySource, str, dict[str, str]]:
    """An index under a tag, with one image per platform (name: architecture)."""
    source = MemorySource()
    entries, digests = [], {}
    for name, architecture in platforms.items():
        image = small_base(source, os="linux", architecture=architecture, variant="")
        entries.append({**image, "platform": {"os": "linux", "architecture": name}})
        digests[f"linux/{name}"] = image["digest"]
    index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}
    return source, source.add_manifest(index, tag, media_type=OCI_INDEX)["digest"], digests


def down(reference):
    raise DuopackError("it does not answer", where=str(reference))


def resolve_base(wanted: Base, sources: dict[str, MemorySource], **options):
    def open_source(reference):
        return sources[reference.registry] if reference.registry in sources else down(reference)

    return lock_base("b", wanted, relative_to=HERE, open_source=open_source, **options)


def test_a_tag_is_locked_to_its_digest_and_one_digest_for_each_platform():
    source, digest, platforms = registry(arm64="arm64", amd64="amd64")
    locked = resolve_base(base(), {"r.example": source})
    assert (locked.digest, locked.platforms) == (digest, platforms)
    assert locked.images == ("r.example/x:1",)


def test_only_the_platforms_that_the_catalog_asks_for_are_locked():
    source, _, _ = registry(arm64="arm64", amd64="amd64")
    locked = resolve_base(base(platforms=["linux/amd64"]), {"r.example": source})
    assert set(locked.platforms) == {"linux/amd64"}


def test_an_image_for_one_platform_is_locked_for_it_and_the_other_is_noted():
    source = MemorySource()
    digest = small_base(source, "1")["digest"]
    notes: list[str] = []
    locked = resolve_base(base(), {"r.example": source}, on_note=notes.append)
    assert locked.platforms == {"linux/arm64": digest}
    assert locked.digest == digest
    assert notes == ["base 'b' is locked without linux/amd64: the image is for linux/arm64/v8"]


def test_an_image_for_none_of_the_platforms_is_refused():
    source = MemorySource()
    small_base(source, "1", architecture="riscv64", variant="")
    with pytest.raises(DuopackError, match="none of its platforms") as caught:
        resolve_base(base(), {"r.example": source})
    assert "the image is for linux/riscv64" in str(caught.value)


def test_an_index_that_lies_about_a_platform_is_not_believed():
    source, _, _ = registry(arm64="amd64", amd64="amd64")
    notes: list[str] = []
    locked = resolve_base(base(), {"r.example": source}, on_note=notes.append)
    assert set(locked.platforms) == {"linux/amd64"}
    assert notes == ["base 'b' is locked without linux/arm64: the image is for linux/amd64"]


def test_mirrors_that_agree_are_locked_once():
    source, digest, _ = registry(arm64="arm64")
    wanted = base("r.example/x:1", "m.example/r/x:1", platforms=["linux/arm64"])
    assert resolve_base(wanted, {"r.example": source, "m.example": source}).digest == digest


def test_a_mirror_with_another_image_is_refused_with_both_digests():
    source, digest, _ = registry(arm64="arm64")
    other, wrong, _ = registry(arm64="arm64", amd64="amd64")
    with pytest.raises(DuopackError, match="not the same") as caught:
        resolve_base(base("r.example/x:1", "m.example/x:1"), {"r.example": source, "m.example": other})
    assert digest in str(caught.value)
    assert wrong in str(caught.value)


def test_a_mirror_serves_when_the_first_image_does_not_answer():
    source, digest, _ = registry(arm64="arm64", amd64="amd64")
    notes: list[str] = []
    locked = resolve_base(base("r.example/x:1", "m.example/x:1"), {"m.example": source}, on_note=notes.append)
    assert locked.digest == digest
    assert notes == ["base 'b': r.example/x:1 could not be compared: it does not answer"]


def test_when_no_image_answers_each_ones_reason_is_told():
    with pytest.raises(DuopackError) as caught:
        resolve_base(base("r.example/x:1", "m.example/x:1"), {})
    assert "r.example/x:1: it does not answer" in str(caught.value)
    assert "m.example/x:1: it does not answer" in str(caught.value)


def test_a_malformed_reference_is_told_by_its_own_error():
    with pytest.raises(DuopackError, match="is not an image name"):
        resolve_base(base("r.example/X:1"), {})


def test_a_layout_is_found_beside_the_catalog(tmp_path):
    assert base_reference("oci:base", tmp_path).path == tmp_path / "base"
    assert base_reference("oci:/abs/base", tmp_path).path == Path("/abs/base")
    assert str(base_reference("r.example/x:1", tmp_path)) == "docker://r.example/x:1"


def test_a_base_is_stale_for_other_images_and_for_a_platform_it_has_not(model):
    source, _, _ = registry(arm64="arm64")
    wanted = base()
    lock = Lock().with_base("b", resolve_base(wanted, {"r.example": source}))
    assert base_staleness(Lock(), "b", wanted) == "base 'b' is not in models.lock"
    assert base_staleness(lock, "b", wanted) is None
    assert base_staleness(lock, "b", wanted, "linux/arm64") is None
    assert (
        base_staleness(lock, "b", wanted, "linux/amd64") == "models.lock has no linux/amd64 image of base 'b'"
    )
    assert "names other images" in (base_staleness(lock, "b", base("r.example/x:2")) or "")


def test_a_target_is_stale_for_each_part_that_is(model):
    target = Target("m", (("m", model),), "p", "b", base(), "linux/arm64")
    assert staleness(Lock(), target) == ("base 'b' is not in models.lock", "model 'm' is not in models.lock")
    source, _, _ = registry(arm64="arm64")
    lock = Lock().with_base("b", resolve_base(base(), {"r.example": source}))
    assert staleness(lock.with_model("m", resolve(model, FakeHub(FILES))), target) == ()
