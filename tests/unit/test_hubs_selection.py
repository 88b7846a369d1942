"""Which files of a listing are taken, and which listings are refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from pipeline.catalog.schema import Files, Source
from pipeline.errors import DuopackError
from pipeline.files import FileRecord
from pipeline.hubs import open_hub
from pipeline.hubs.hub import Listing, RemoteFile
from pipeline.hubs.selection import MAX_UNHASHED, complete, select


def listing(*paths: str) -> Listing:
    return Listing("c0ffee", tuple(RemoteFile(path, 1, "0" * 64) for path in paths))


def chosen(source: Listing, **patterns) -> list[str]:
    return [file.path for file in select(source, Files(**patterns), where="model 'x'").files]


def refused(source: Listing, **patterns) -> str:
    with pytest.raises(DuopackError) as caught:
        select(source, Files(**patterns), where="model 'x'")
    return str(caught.value)


def test_everything_but_debris_is_taken_in_order():
    found = listing(
        "b.json", ".msc", ".mv", ".mdl", "._____temp/x", ".cache/huggingface/a", "w.safetensors.incomplete",
        "a.lock", ".gitattributes", ".git/config", "TP2/.msc", "a.json", "TP2/c.json",
        ".duopack-verified.json",
    )  # fmt: skip
    assert chosen(found) == ["TP2/c.json", "a.json", "b.json"]
    assert select(found, Files(), where="x").commit == "c0ffee"


def test_patterns_match_the_whole_path_and_star_crosses_slashes():
    found = listing("TP1/a.safetensors", "TP2/a.safetensors", "TP2/deep/b.json", "README.md")
    assert chosen(found, include=("TP2/*",)) == ["TP2/a.safetensors", "TP2/deep/b.json"]
    assert chosen(found, exclude=("TP?/*",)) == ["README.md"]
    assert "'a.safetensors' matches none of the files" in refused(found, include=("TP1/*", "a.safetensors"))


def test_a_selection_of_nothing_names_the_patterns():
    assert "the exclude patterns a.*, b.* take all" in refused(
        listing("a.json", "b.json"), exclude=("a.*", "b.*")
    )
    assert "'*' matches none" in refused(listing())


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "a/../../x",
        "/etc/passwd",
        "a\\b",
        "a//b",
        "a\x1b[2J",
        "a\nb",
        "\u202egpj.exe",
        "",
        "./a",
        "a" * 256,
    ],
)
def test_a_name_that_is_not_safe_refuses_the_whole_listing(path):
    text = refused(listing("config.json", path))
    assert "file name" in text
    assert all(character.isprintable() for character in text)


def test_an_unsafe_name_is_refused_though_a_pattern_would_leave_it_out():
    assert "leaves its directory" in refused(listing("config.json", "../x"), include=("config.json",))


@pytest.mark.parametrize("inside", ["config.json/x", "config.json/a/b", "CONFIG.json/x"])
def test_a_name_that_is_a_file_and_a_directory_is_refused(inside):
    assert "would lie inside of it" in refused(listing("config.json", inside))
    assert chosen(listing("config.json", inside), exclude=("*/*",)) == ["config.json"]


def test_names_that_differ_only_by_case_are_refused():
    assert "differ only by case" in refused(listing("Config.json", "config.json"))


class SmallFiles:
    """A hub that tells no sha256, as Hugging Face does for small files."""

    location = None

    def __init__(self, content: dict[str, bytes]) -> None:
        self.content = content
        self.fetched: list[str] = []

    def listing(self) -> Listing:
        raise AssertionError("the listing is already there")

    def fetch(self, files, directory, on_bytes) -> None:
        for file in files:
            self.fetched.append(file.path)
            (directory / file.path).write_bytes(self.content[file.path])
            on_bytes(file.path, len(self.content[file.path]))


def test_files_without_a_sha256_are_fetched_and_hashed():
    hub = SmallFiles({"a.json": b"{}"})
    found = Listing("c", (RemoteFile("a.json", 2, None), RemoteFile("w", 9, "1" * 64)))
    told: list[tuple[str, int]] = []
    records = complete(found, hub, lambda path, count: told.append((path, count)))
    assert records == (
        FileRecord("a.json", 2, hashlib.sha256(b"{}").hexdigest()),
        FileRecord("w", 9, "1" * 64),
    )
    assert hub.fetched == ["a.json"]
    assert told == [("a.json", 2)]


def test_a_fetched_file_of_another_size_is_refused():
    with pytest.raises(DuopackError, match="listed with 3 bytes, but has 2"):
        complete(Listing(None, (RemoteFile("a.json", 3, None),)), SmallFiles({"a.json": b"{}"}))


def test_large_files_are_not_fetched_only_to_be_hashed():
    with pytest.raises(DuopackError, match="too much to fetch only for hashing"):
        complete(Listing(None, (RemoteFile("w", MAX_UNHASHED + 1, None),)), SmallFiles({}))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    (place / "TP2").mkdir(parents=True)
    (place / "config.json").write_text("{}")
    (place / "TP2" / "w.safetensors").write_bytes(b"weights")
    return place


def opened(place: Path):
    return open_hub(Source(dir=place.name), relative_to=place.parent)


def test_a_directory_is_hashed_where_it_is(directory):
    hub = opened(directory)
    told: dict[str, int] = {}
    records = complete(hub.listing(), hub, lambda path, count: told.update({path: count}))
    assert [record.path for record in records] == ["TP2/w.safetensors", "config.json"]
    assert records[0].sha256 == hashlib.sha256(b"weights").hexdigest()
    assert told == {"TP2/w.safetensors": 7, "config.json": 2}
    assert hub.location == directory


def test_a_symlink_in_a_directory_is_named_with_a_way_out(directory):
    (directory / "vocab.json").symlink_to("/etc/hostname")
    with pytest.raises(DuopackError, match=r"'vocab\.json' is a symbolic link.*cp -L"):
        opened(directory).listing()


def test_a_pipe_in_a_directory_is_refused_and_not_opened(directory):
    import os

    os.mkfifo(directory / "pipe")
    with pytest.raises(DuopackError, match="'pipe' is neither a file nor a directory"):
        opened(directory).listing()


def test_debris_in_a_directory_is_not_looked_at(directory):
    (directory / ".cache").symlink_to("/")
    (directory / ".msc").write_text("x")
    assert len(opened(directory).listing().files) == 2


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(DuopackError, match="there is no such directory"):
        open_hub(Source(dir="nowhere"), relative_to=tmp_path).listing()
