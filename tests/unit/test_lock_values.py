"""models.lock reads back as it was written, and a file that is not sound is told as such."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import DuopackError
from pipeline.files import FileRecord
from pipeline.lock.values import Lock, LockedBase, LockedModel, read_lock, write_lock
from pipeline.oci.digest import Digest

HEX = st.text("0123456789abcdef", min_size=64, max_size=64)
DIGESTS = HEX.map(lambda text: Digest(f"sha256:{text}"))
PATHS = st.lists(
    st.from_regex(r"[A-Za-zé0-9][A-Za-z0-9._ -]{0,8}", fullmatch=True), min_size=1, max_size=3
).map("/".join)
FILES = st.lists(
    st.builds(FileRecord, PATHS, st.integers(0, 1 << 45), HEX), min_size=1, unique_by=lambda f: f.path
)
MODELS = st.builds(
    LockedModel,
    source=st.sampled_from(["dir", "modelscope:a/b@master"]),
    commit=st.none() | HEX,
    wanted=HEX,
    files=FILES.map(lambda files: tuple(sorted(files))),
)
BASES = st.builds(
    LockedBase,
    images=st.just(("r.example/x:1",)),
    digest=DIGESTS,
    platforms=st.dictionaries(st.sampled_from(["linux/arm64", "linux/amd64"]), DIGESTS),
)
KEYS = st.sampled_from(["9b", "27b", "v0.20.2rc1"])
LOCKS = st.builds(Lock, bases=st.dictionaries(KEYS, BASES), models=st.dictionaries(KEYS, MODELS))


def small() -> dict:
    return {
        "version": 1,
        "bases": {
            "b": {
                "images": ["r.example/x:1"],
                "digest": "sha256:" + "a" * 64,
                "platforms": {"linux/arm64": "sha256:" + "b" * 64},
            }
        },
        "models": {
            "m": {
                "source": "dir",
                "commit": None,
                "wanted": "0" * 64,
                "files": [{"path": "a.json", "size": 3, "sha256": "c" * 64}],
            }
        },
    }


@given(LOCKS)
def test_a_lock_reads_back_equal_and_gives_the_same_bytes(tmp_path_factory, lock):
    path = tmp_path_factory.mktemp("lock") / "models.lock"
    write_lock(path, lock)
    again = read_lock(path)
    assert again == lock
    assert again.to_bytes() == path.read_bytes()


def test_a_missing_lock_is_an_empty_one(tmp_path):
    assert read_lock(tmp_path / "models.lock") == Lock()


def test_an_unchanged_lock_is_not_written_again(tmp_path):
    path = tmp_path / "models.lock"
    write_lock(path, Lock())
    before = path.stat()
    write_lock(path, Lock())
    assert path.stat().st_ino == before.st_ino


def test_the_order_of_entries_does_not_matter(tmp_path):
    files = (FileRecord("a", 1, "0" * 64), FileRecord("b", 1, "0" * 64))
    one = LockedModel("dir", None, "", files)
    other = LockedModel("dir", None, "", files[::-1])
    assert Lock(models={"x": one, "y": one}).to_bytes() == Lock(models={"y": other, "x": other}).to_bytes()


def damaged(change) -> str:
    value = small()
    change(value)
    return json.dumps(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a sound lock file"),
        ("[]", "the file is not an object"),
        ("\xff", "not a sound lock file"),
        ("[" * 100_000, "not a sound lock file"),
        ('{"version": 1, "version": 1}', "a key is there twice"),
        (damaged(lambda v: v.update(version=2)), "it has version 2, this duopack reads version 1"),
        (damaged(lambda v: v.update(version=True)), "it has version True"),
        (damaged(lambda v: v.pop("models")), "the file has no 'models'"),
        (damaged(lambda v: v.update(bases=[])), "bases is not an object"),
        (
            damaged(lambda v: v["bases"]["b"].update(digest="latest")),
            "in bases.b 'latest' is not a sha256 digest",
        ),
        (
            damaged(lambda v: v["bases"]["b"].update(platforms={"linux/arm64": 1})),
            "platforms.linux/arm64 is not text",
        ),
        (damaged(lambda v: v["models"]["m"].update(files=[])), "models.m.files is empty"),
        (damaged(lambda v: v["models"]["m"].update(files=v["models"]["m"]["files"] * 2)), "has a path twice"),
        (damaged(lambda v: v["models"]["m"]["files"][0].update(path="../x")), "leaves its directory"),
        (damaged(lambda v: v["models"]["m"]["files"][0].update(size=-1)), "has the size -1"),
        (damaged(lambda v: v["models"]["m"]["files"][0].update(size=True)), "has the size True"),
        (damaged(lambda v: v["models"]["m"]["files"][0].update(size="3")), "size is not a whole number"),
        (damaged(lambda v: v["models"]["m"]["files"][0].pop("sha256")), "has no 'sha256'"),
        (damaged(lambda v: v["models"]["m"].update(commit=7)), "models.m.commit is not text"),
        (damaged(lambda v: v["models"].update(m=None)), "models.m is not an object"),
    ],
)
def test_a_lock_that_is_not_sound_is_told_with_its_file(tmp_path, text, said):
    path = tmp_path / "models.lock"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(DuopackError) as caught:
        read_lock(path)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert "duopack lock" in caught.value.mend or "install" in caught.value.mend


def test_the_small_lock_of_these_tests_is_sound(tmp_path):
    path = tmp_path / "models.lock"
    path.write_text(json.dumps(small()))
    assert read_lock(path).models["m"].size == 3


def test_a_merge_that_was_not_finished_is_recognised(tmp_path):
    path = tmp_path / "models.lock"
    path.write_text('{\n<<<<<<< HEAD\n "version": 1\n=======\n>>>>>>> other\n}')
    with pytest.raises(DuopackError, match="marks of a merge"):
        read_lock(path)


def test_a_directory_in_the_locks_place_is_told(tmp_path):
    with pytest.raises(DuopackError, match="cannot be read"):
        read_lock(tmp_path)
