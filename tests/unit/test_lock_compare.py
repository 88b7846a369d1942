"""What moved between two locks reads like a diff."""

from dataclasses import replace

from pipeline.files import FileRecord
from pipeline.lock.compare import base_changes, file_changes, lock_changes, model_changes
from pipeline.lock.values import Lock, LockedBase, LockedModel
from pipeline.oci.digest import Digest


def file(path: str, digit: str = "a", size: int = 2048) -> FileRecord:
    return FileRecord(path, size, digit * 64)


def digest(digit: str) -> Digest:
    return Digest(f"sha256:{digit * 64}")


MODEL = LockedModel(
    "huggingface:a/b", "1" * 40, "w", (file("config.json"), file("model.safetensors", size=3 << 30))
)
BASE = LockedBase(("r.example/x:1",), digest("0"), {"linux/amd64": digest("1"), "linux/arm64": digest("2")})


def test_equal_entries_have_no_changes():
    assert model_changes(MODEL, MODEL) == ()
    assert base_changes(BASE, BASE) == ()


def test_files_that_came_went_and_changed_are_told_in_order_of_their_paths():
    old = (file("a"), file("b"), file("d", size=10))
    new = (file("a"), file("c", size=5 << 20), file("d", "b", size=1010))
    assert file_changes(old, new) == (
        "- b 2 KiB",
        "+ c 5 MiB",
        "~ d sha256 aaaaaaaaaaaa… → bbbbbbbbbbbb…, 10 → 1,010 bytes",
    )


def test_a_change_of_content_with_the_same_size_shows_no_size():
    assert file_changes((file("a"),), (file("a", "b"),)) == ("~ a sha256 aaaaaaaaaaaa… → bbbbbbbbbbbb…",)


def test_a_moved_commit_is_told_even_when_no_file_changed():
    assert model_changes(MODEL, replace(MODEL, commit="2" * 40)) == ("commit 111111111111… → 222222222222…",)


def test_another_source_is_told_with_its_commit():
    moved = replace(MODEL, source="modelscope:a/b", commit=None)
    assert model_changes(MODEL, moved) == ("source huggingface:a/b at 111111111111… → modelscope:a/b",)


def test_a_new_model_is_summed_up():
    assert model_changes(None, MODEL) == ("huggingface:a/b at 111111111111…, 2 files, 3 GiB",)


def test_a_moved_tag_is_told_for_each_platform():
    moved = LockedBase(BASE.images, digest("9"), {"linux/amd64": digest("1"), "linux/arm64": digest("3")})
    assert base_changes(BASE, moved) == (
        "tag moved 000000000000… → 999999999999…",
        "~ linux/arm64 222222222222… → 333333333333…",
    )


def test_a_platform_that_came_or_went_is_told():
    without = replace(BASE, platforms={"linux/arm64": digest("2")})
    assert base_changes(BASE, without) == (f"- linux/amd64 {digest('1')}",)
    assert base_changes(without, BASE) == (f"+ linux/amd64 {digest('1')}",)


def test_other_references_are_told():
    assert base_changes(BASE, replace(BASE, images=("r.example/x:2",))) == (
        "- r.example/x:1",
        "+ r.example/x:2",
    )
    two = replace(BASE, images=("a", "b"))
    assert base_changes(two, replace(two, images=("b", "a"))) == ("the order of its images changed",)


def test_two_locks_are_compared_entry_by_entry():
    old = Lock(bases={"b": BASE}, models={"m": MODEL, "gone": MODEL})
    new = Lock(bases={"b": BASE}, models={"m": replace(MODEL, commit="2" * 40), "new": MODEL})
    assert lock_changes(old, new) == (
        "model gone: removed",
        "model m",
        "  commit 111111111111… → 222222222222…",
        "model new",
        "  huggingface:a/b at 111111111111…, 2 files, 3 GiB",
    )
    assert lock_changes(old, old) == ()


def test_names_from_a_hub_cannot_write_to_the_terminal():
    (line,) = file_changes((), (file("a\x1b[2J"),))
    assert "\x1b" not in line
