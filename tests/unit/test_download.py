"""The download stage: what is there is kept, what is wrong is found, nothing else comes along."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.hub import FaultyHub, isolate_clients, quick_sleep

from pipeline.catalog.schema import Files, Model, Source
from pipeline.demo.model import make_model
from pipeline.errors import DuopackError
from pipeline.files import FileRecord
from pipeline.hubs import Hub, open_hub
from pipeline.hubs.selection import complete, select
from pipeline.lock.values import LockedModel
from pipeline.stages import download as stage
from pipeline.stages.download import Downloaded, Framed, download

LARGE = "model.safetensors-00002-of-00002.safetensors"


class Recorder:
    """A progress that remembers bars and what they were told."""

    def __init__(self) -> None:
        self.bars: dict[str, list[int]] = {}
        self.total: dict[str, int] = {}

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator:
        self.total[label] = total
        steps = self.bars.setdefault(label, [])

        class Bar:
            def advance(self, count: int) -> None:
                steps.append(count)

        yield Bar()

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def close(self) -> None: ...


def catalog_model(**profile) -> Model:
    profile = {
        "tensor_parallel": 1, "served_name": "demo", "max_model_len": 4096, "max_num_seqs": 4,
        "gpu_memory_utilization": 0.9, **profile,
    }  # fmt: skip
    return Model.model_validate(
        {
            "title": "Demo",
            "directory": "demo",
            "architecture": "qwen3.5",
            "max_positions": 4096,
            "sources": [{"modelscope": "Qwen/demo"}],
            "profiles": {"n1": profile},
        }
    )


class Case:
    """One model, its hub, its lock, and the directory it is downloaded to."""

    def __init__(self, hub: FaultyHub, kind: str, work: Path) -> None:
        self.hub = hub
        self.source = self.origin = hub.root / "Qwen" / "demo"
        self.work = work
        self.kind = kind
        self.model = catalog_model()
        opened = self.open()
        listing = select(opened.listing(), Files(), where="demo")
        self.locked = LockedModel(kind, listing.commit, "", complete(listing, opened))
        self.progress = Recorder()
        hub.forget()

    def open(self) -> Hub:
        source = Source(dir=str(self.source)) if self.kind == "dir" else Source(**{self.kind: "Qwen/demo"})
        commit = self.locked.commit if hasattr(self, "locked") else None
        return open_hub(source, relative_to=Path(), commit=commit)

    def run(self, framed: Mapping[str, Framed] | None = None) -> Downloaded:
        self.progress = Recorder()
        return download("demo", self.model, self.locked, self.open(), self.work, self.progress, framed)

    def refused(self) -> str:
        with pytest.raises(DuopackError) as caught:
            self.run()
        assert caught.value.mend
        return str(caught.value)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    make_model(tmp_path / "root" / "Qwen" / "demo")
    with FaultyHub(tmp_path / "root") as served:
        isolate_clients(monkeypatch, served.url, tmp_path / "home")
        from huggingface_hub import file_download
        from huggingface_hub.utils import _http

        quick_sleep(monkeypatch, file_download, _http)
        yield served


@pytest.fixture(params=("modelscope", "huggingface"))
def case(request, hub, tmp_path) -> Case:
    return Case(hub, request.param, tmp_path / "work")


@pytest.fixture
def own(hub, tmp_path) -> Case:
    """The same model as a directory of the user's."""
    return Case(hub, "dir", tmp_path / "work")


def test_all_locked_files_come_and_are_verified(case):
    result = case.run()
    assert tuple(file.record for file in result.files) == case.locked.files
    assert result.directory == case.work
    assert result.weights[0].tensors > 80
    for file in result.files:
        assert file.path.read_bytes() == (case.origin / file.record.path).read_bytes()
        assert file.identity.ino == file.path.stat().st_ino
    total = sum(record.size for record in case.locked.files)
    assert sum(case.progress.bars["demo: downloading"]) == total == case.progress.total["demo: downloading"]
    assert sum(case.progress.bars["demo: checking"]) == total


def test_a_second_run_asks_nothing_and_reads_nothing(case):
    first = case.run()
    case.hub.forget()
    assert case.run() == first
    assert not case.hub.requests
    assert not case.progress.bars


def test_debris_in_the_work_directory_does_not_come_along(case):
    case.run()
    (case.work / "model-extra.safetensors").write_text("debris")
    (case.work / ".msc").write_text("debris")
    assert {file.record.path for file in case.run().files} == {path.name for path in case.origin.iterdir()}


def test_a_file_that_was_touched_is_read_again_and_one_that_was_changed_is_fetched_again(case):
    case.run()
    os.utime(case.work / "config.json")
    changed = case.work / LARGE
    changed.write_bytes(changed.read_bytes()[:-1] + b"\xff")
    case.hub.forget()
    case.run()
    assert {request.file for request in case.hub.requests if request.file} == {LARGE}
    assert changed.read_bytes() == (case.origin / LARGE).read_bytes()


def test_a_lost_or_broken_record_costs_only_hashing(case):
    case.run()
    for content in (b"", b"[]", b'{"config.json": 3}', b"\xff"):
        (case.work / stage.RECORD).write_bytes(content)
        case.hub.forget()
        case.run()
        assert not case.hub.requests


def test_what_is_made_of_a_file_is_hashed_while_the_file_is_checked_and_only_then(case):
    told: list[str] = []
    framed = {LARGE: Framed(b"before", b"after", told.append)}
    size = (case.origin / LARGE).stat().st_size
    case.hub.faults.content_once = {LARGE: bytes(size)}
    case.run(framed)
    data = (case.origin / LARGE).read_bytes()
    assert told == [hashlib.sha256(b"before" + data + b"after").hexdigest()]
    case.run(framed)
    assert len(told) == 1


def test_a_wrong_file_tells_nothing_of_what_is_made_of_it(own):
    told: list[str] = []
    path = own.source / LARGE
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(DuopackError, match="its sha256 is"):
        own.run({LARGE: Framed(b"", b"", told.append), "config.json": Framed(b"", b"", told.append)})
    config = (own.source / "config.json").read_bytes()
    assert told == [hashlib.sha256(config).hexdigest()]


def test_a_file_that_comes_corrupt_once_is_fetched_again(case):
    corrupt = bytes(next(record.size for record in case.locked.files if record.path == LARGE))
    case.hub.faults.content_once = {LARGE: corrupt}
    case.run()
    assert len(case.hub.gets(LARGE)) == 2
    assert len(case.hub.gets("config.json")) == 1


def test_a_file_that_stays_corrupt_is_refused_with_both_digests_and_removed(case):
    record = next(record for record in case.locked.files if record.path == LARGE)
    case.hub.faults.content = {LARGE: bytes(record.size)}
    text = case.refused()
    assert hashlib.sha256(bytes(record.size)).hexdigest() in text
    assert record.sha256 in text
    assert not (case.work / LARGE).exists()
    case.hub.faults.content = {}
    case.hub.forget()
    case.run()
    assert not case.hub.gets("model.safetensors-00001-of-00002.safetensors")


@pytest.mark.parametrize("content", [b"", bytes(3_000_000)])
def test_an_empty_or_grown_file_is_refused(case, content):
    case.hub.faults.content = {LARGE: content}
    assert "the lock says" in case.refused()
    assert not (case.work / LARGE).exists()


def test_a_modelscope_model_that_moved_on_is_found_before_anything_is_fetched(hub, tmp_path):
    case = Case(hub, "modelscope", tmp_path / "work")
    (case.origin / "config.json").write_text(
        '{"grown": "since the lock", "and": "longer than it was before it"}'
    )
    (case.origin / "tokenizer.json").unlink()
    text = case.refused()
    assert "changed at the hub since it was locked" in text
    assert "and 1 more" in text
    assert "duopack lock --update demo" in text
    assert not [request for request in case.hub.requests if request.file]


def test_too_little_space_is_found_before_anything_is_asked(case, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    text = case.refused()
    assert "downloading demo needs" in text
    assert "short" in text
    assert not case.hub.requests


def test_space_counts_only_what_is_missing(case, monkeypatch):
    case.run()
    (case.work / "config.json").unlink()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 20}))
    case.run()


def test_a_failure_keeps_what_is_complete(case):
    case.hub.faults.file_status = {"tokenizer.json": 403}
    assert "refuses access" in case.refused()
    case.hub.faults.file_status = {}
    complete_before = {path.name for path in case.work.glob("*.safetensors")}
    case.hub.forget()
    case.run()
    assert not [name for name in complete_before if case.hub.gets(name)]


def test_a_model_whose_weights_are_not_whole_is_refused(hub, tmp_path):
    index = hub.root / "Qwen/demo/model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["metadata"]["total_size"] += 1
    index.write_text(json.dumps(value))
    case = Case(hub, "modelscope", tmp_path / "work")
    assert "total_size" in case.refused()
    case.model = case.model.model_copy(update={"allow": ("index-total",)})
    case.run()


def test_a_profile_that_loads_another_directory_must_find_files_there(case):
    case.model = catalog_model(weights="TP2", load_format="sharded_state", tensor_parallel=2)
    assert "profile 'n1' loads 'TP2', but no locked file is there" in case.refused()


def test_a_symlink_in_the_work_directory_is_replaced_by_the_file(case, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes((case.origin / "config.json").read_bytes())
    case.work.mkdir()
    (case.work / "config.json").symlink_to(outside)
    case.run()
    assert not (case.work / "config.json").is_symlink()
    assert outside.exists()


def test_a_directory_is_used_in_place_and_not_written_to(own):
    before = sorted(own.source.iterdir())
    result = own.run()
    assert result.directory == own.source
    assert all(file.path.parent == own.source for file in result.files)
    assert sorted(own.source.iterdir()) == before
    own.run()
    assert not own.progress.bars


def test_a_directory_that_changed_is_refused_and_left_alone(own):
    own.run()
    config = own.source / "config.json"
    config.write_text("{}")
    assert "it has 2 bytes, the lock says" in own.refused()
    assert config.read_text() == "{}"
    content = (own.source / LARGE).read_bytes()
    config.unlink()
    assert "it is missing" in own.refused()
    (own.source / LARGE).write_bytes(content[::-1])
    own.locked = LockedModel("dir", None, "", tuple(file for file in own.locked.files if file.path == LARGE))
    text = own.refused()
    assert hashlib.sha256(content).hexdigest() in text
    assert hashlib.sha256(content[::-1]).hexdigest() in text
    assert (own.source / LARGE).read_bytes() == content[::-1]


def test_a_full_disk_is_one_clear_fault(case, monkeypatch):
    import errno

    def full(*args, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    import modelscope_hub._download
    from huggingface_hub import file_download

    monkeypatch.setattr(modelscope_hub._download.DownloadManager, "_download_with_resume", full)
    monkeypatch.setattr(file_download, "http_get", full)
    text = case.refused()
    assert "No space left on device" in text
    assert "what is complete is kept" in text


def test_large_files_have_a_bar_of_their_own(monkeypatch):
    monkeypatch.setattr(stage, "WORTH_A_BAR", 100)
    records = [FileRecord("large", 200, ""), FileRecord("small", 10, ""), FileRecord("other", 100, "")]
    progress = Recorder()
    with stage.FileBars(progress, "x", records) as bars:
        for path, count in (("large", 150), ("small", 10), ("large", -50), ("large", 100), ("other", 100)):
            bars.advance(path, count)
    assert sum(progress.bars["x"]) == progress.total["x"] == 310
    assert progress.bars["x large"] == [150, -50, 100]
    assert progress.total["x large"] == 200
    assert progress.bars["x other"] == [100]
    assert "x small" not in progress.bars
