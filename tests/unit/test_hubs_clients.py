"""The real ModelScope and Hugging Face clients against a hub on this machine, whole and broken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from support.hub import FaultyHub, client_environment, isolate_clients, quick_sleep

from pipeline.catalog.schema import Files, Source
from pipeline.demo.model import make_model
from pipeline.errors import DuopackError
from pipeline.files import sha256_file
from pipeline.hubs import Hub, open_hub
from pipeline.hubs.huggingface import HuggingFace
from pipeline.hubs.selection import complete, select

LARGE = "model.safetensors-00001-of-00002.safetensors"
HUBS = ("modelscope", "huggingface")
TOKEN = "secret-token-0123456789"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    make_model(tmp_path / "root" / "Qwen" / "demo")
    with FaultyHub(tmp_path / "root") as served:
        isolate_clients(monkeypatch, served.url, tmp_path / "home")
        from huggingface_hub import file_download
        from huggingface_hub.utils import _http

        quick_sleep(monkeypatch, file_download, _http)
        yield served


def opened(kind: str, model: str = "Qwen/demo", **more) -> Hub:
    return open_hub(Source(**{kind: model}), relative_to=Path(), **more)


def locked(source: Hub):
    return complete(select(source.listing(), Files(), where="demo"), source)


def nothing(path: str, count: int) -> None:
    pass


def fault(action) -> str:
    with pytest.raises(DuopackError) as caught:
        action()
    assert caught.value.what
    assert caught.value.where
    assert caught.value.mend
    text = str(caught.value)
    assert TOKEN not in text
    assert "\n" not in text
    return text


@pytest.fixture(params=HUBS)
def kind(request) -> str:
    return request.param


def test_a_model_is_listed_and_fetched_with_every_byte_counted(hub, kind, tmp_path, capfd):
    source = opened(kind)
    records = locked(source)
    assert {record.path for record in records} == {path.name for path in (hub.root / "Qwen/demo").iterdir()}
    counted: Counter[str] = Counter()
    source.fetch(records, tmp_path / "out", lambda path, count: counted.update({path: count}))
    assert counted == {record.path: record.size for record in records}
    for record in records:
        assert sha256_file(tmp_path / "out" / record.path) == record.sha256
    assert capfd.readouterr() == ("", "")


def test_hugging_face_tells_the_commit_and_modelscope_does_not(hub):
    assert opened("modelscope").listing().commit is None
    assert len(opened("huggingface").listing().commit or "") == 40


def test_files_in_subdirectories_are_listed_and_fetched(hub, kind, tmp_path):
    inner = hub.root / "Qwen/demo/TP2/deep"
    inner.mkdir(parents=True)
    (inner / "a b+c&d.json").write_text("{}")
    (inner / "empty.txt").touch()
    source = opened(kind)
    records = [record for record in locked(source) if record.path.startswith("TP2/")]
    assert [record.path for record in records] == ["TP2/deep/a b+c&d.json", "TP2/deep/empty.txt"]
    source.fetch(records, tmp_path, nothing)
    assert (tmp_path / records[0].path).read_text() == "{}"
    assert (tmp_path / records[1].path).read_bytes() == b""


def test_hugging_face_fetches_the_commit_that_was_listed(hub, tmp_path):
    source = opened("huggingface")
    records = locked(source)
    (hub.root / "Qwen/demo/config.json").write_text("{}")
    assert "at revision" in fault(lambda: source.fetch(records[:1], tmp_path, nothing))


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, ("refuses access", "(401)")),
        (403, ("refuses access", "(403)")),
        (404, ("has no", "at revision", "(404)")),
        (429, ("no more requests", "(429)")),
        (500, ("status 500",)),
    ],
)
def test_a_refusal_says_what_and_which_variable(hub, kind, status, words, monkeypatch, tmp_path):
    variable = {"modelscope": "MODELSCOPE_API_TOKEN", "huggingface": "HF_TOKEN"}[kind]
    monkeypatch.setenv(variable, TOKEN)
    source = opened(kind)
    records = locked(source)[:1]
    assert any(request.authorization == f"Bearer {TOKEN}" for request in hub.requests)
    hub.faults.status = status
    for action in (opened(kind).listing, lambda: source.fetch(records, tmp_path, nothing)):
        text = fault(action)
        assert all(word in text for word in words)
        assert "/Qwen/demo" in text
        if status in {401, 403, 404, 429}:
            assert variable in text


def test_an_unknown_model_or_revision_is_named(hub, kind):
    assert "Qwen/none" in fault(opened(kind, "Qwen/none").listing)
    other = open_hub(Source(**{kind: "Qwen/demo", "revision": "v9"}), relative_to=Path())
    assert "at revision v9" in fault(other.listing)


def test_a_hub_that_is_down_is_named_with_its_variable(hub, kind, monkeypatch, tmp_path):
    records = locked(opened(kind))
    variable = {"modelscope": "MODELSCOPE_ENDPOINT", "huggingface": "HF_ENDPOINT"}[kind]
    monkeypatch.setenv(variable, "http://user:secret@127.0.0.1:1")
    for action in (opened(kind).listing, lambda: opened(kind).fetch(records, tmp_path, nothing)):
        text = fault(action)
        assert "connection refused" in text
        assert variable in text
        assert "secret" not in text


def test_a_web_page_instead_of_an_answer_is_recognized(hub, kind):
    hub.faults.garbage = True
    assert "not that of" in fault(opened(kind).listing)


@pytest.mark.parametrize("endpoint", ["http://user:hidden@127.0.0.1:port", "http://[::1", "no address"])
def test_an_address_that_is_none_is_named_without_its_login(hub, kind, endpoint, monkeypatch):
    monkeypatch.setenv({"modelscope": "MODELSCOPE_ENDPOINT", "huggingface": "HF_ENDPOINT"}[kind], endpoint)
    text = fault(lambda: opened(kind).listing())
    assert "_ENDPOINT" in text
    assert "hidden" not in text


@pytest.mark.parametrize("error", [RuntimeError("the client has been closed"), AttributeError("request")])
def test_a_client_that_another_thread_closed_is_asked_again(hub, error, tmp_path, monkeypatch):
    source = opened("huggingface")
    records = locked(source)
    whole, failed = source._download, set()

    def closed_once(file, directory, meter):
        if file.path not in failed:
            failed.add(file.path)
            meter().update(7)
            raise error
        whole(file, directory, meter)

    monkeypatch.setattr(HuggingFace, "_download", lambda self, *given: closed_once(*given))
    counted: Counter[str] = Counter()
    source.fetch(records, tmp_path / "out", lambda path, count: counted.update({path: count}))
    assert counted == {record.path: record.size for record in records}
    monkeypatch.setattr(HuggingFace, "_download", lambda self, *given: raised(error))
    assert "not that of Hugging Face" in fault(lambda: source.fetch(records, tmp_path / "more", nothing))


def raised(error):
    raise error


def test_an_unsafe_name_in_the_listing_is_refused(hub):
    hub.faults.extra_files = ["../../etc/cron.d/x"]
    assert "leaves its directory" in fault(lambda: locked(opened("modelscope")))


def test_a_cut_connection_goes_on_where_it_broke(hub, kind, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(
        constants, "DOWNLOAD_CHUNK_SIZE", 50_000
    )  # it keeps whole chunks, of 10 MB as it comes
    source = opened(kind)
    records = [record for record in locked(source) if record.path == LARGE]
    hub.forget()
    hub.faults.cut_after = {LARGE: 1_000_000}
    hub.faults.cuts_left = 2
    counted: Counter[str] = Counter()
    source.fetch(records, tmp_path, lambda path, count: counted.update({path: count}))
    assert sha256_file(tmp_path / LARGE) == records[0].sha256
    assert [request.range for request in hub.gets(LARGE)] == [None, "bytes=1000000-", "bytes=2000000-"]
    assert counted[LARGE] == records[0].size


def test_a_connection_that_always_breaks_ends_in_one_clear_fault(hub, kind, tmp_path):
    source = opened(kind)
    records = [record for record in locked(source) if record.path == LARGE]
    hub.faults.cut_after = {LARGE: 0}
    assert "cannot reach" in fault(lambda: source.fetch(records, tmp_path, nothing))
    assert not (tmp_path / LARGE).exists()


def test_an_empty_or_grown_file_is_not_left_as_if_it_were_whole(hub, kind, tmp_path):
    source = opened(kind)
    records = [record for record in locked(source) if record.path == LARGE]
    for content in (b"", bytes(records[0].size + 5)):
        hub.faults.content = {LARGE: content}
        try:
            source.fetch(records, tmp_path, nothing)
        except DuopackError as error:
            assert "another size" in str(error)  # noqa: PT017
            assert not (tmp_path / LARGE).exists()
        else:
            assert (
                kind == "huggingface"
            )  # takes the size from the answer; the stage compares it with the lock
            (tmp_path / LARGE).unlink()


def test_what_the_modelscope_cache_holds_is_not_fetched_again_unless_it_is_wrong(hub, tmp_path):
    from modelscope.hub.snapshot_download import snapshot_download

    records = locked(opened("modelscope"))
    cache = Path(snapshot_download("Qwen/demo"))
    (cache / "config.json").write_text("changed in the cache")
    hub.forget()
    counted: Counter[str] = Counter()
    opened("modelscope").fetch(records, tmp_path / "out", lambda path, count: counted.update({path: count}))
    assert {request.file for request in hub.requests if request.file} == {"config.json"}
    assert all(sha256_file(tmp_path / "out" / record.path) == record.sha256 for record in records)
    assert counted == {record.path: record.size for record in records}


def test_a_cache_on_another_disk_is_copied_from(hub, tmp_path, monkeypatch):
    import errno

    from modelscope.hub.snapshot_download import snapshot_download

    def refuse(self, source):
        raise OSError(errno.EXDEV, "cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    records = locked(opened("modelscope"))
    snapshot_download("Qwen/demo")
    hub.forget()
    opened("modelscope").fetch(records, tmp_path / "out", nothing)
    assert not [request for request in hub.requests if request.file]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {record.path for record in records}


def test_one_bad_file_among_good_ones_is_the_one_named(hub, kind, tmp_path):
    source = opened(kind)
    records = locked(source)
    hub.faults.file_status = {"tokenizer.json": 403}
    text = fault(lambda: source.fetch(records, tmp_path, nothing))
    assert "'tokenizer.json' of Qwen/demo" in text


FETCH = """
import signal
import sys
from pathlib import Path
from pipeline.catalog.schema import Source
from pipeline.files import FileRecord
from pipeline.hubs import open_hub
# A shell starts what runs in its background with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
kind, directory, path, size = sys.argv[1:]
hub = open_hub(Source(**{kind: "Qwen/demo"}), relative_to=Path())
hub.fetch([FileRecord(path, int(size), "")], Path(directory), lambda path, count: print(count, flush=True))
"""


def start(kind, hub, tmp_path, size) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        **client_environment(hub.url, tmp_path / "home"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", FETCH, kind, str(tmp_path / "out"), LARGE, str(size)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def kill_in_the_middle(kind, hub, tmp_path, size, number) -> None:
    hub.faults.slow = 0.05
    process = start(kind, hub, tmp_path, size)
    deadline = time.monotonic() + 30
    while hub.bytes_sent.get(LARGE, 0) < 500_000 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=20)
    hub.faults.slow = 0.0
    assert not (tmp_path / "out" / LARGE).exists()
    hub.forget()


def test_modelscope_goes_on_after_kill_9_with_a_range(hub, tmp_path):
    size = (hub.root / "Qwen/demo" / LARGE).stat().st_size
    kill_in_the_middle("modelscope", hub, tmp_path, size, signal.SIGKILL)
    process = start("modelscope", hub, tmp_path, size)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    (request,) = hub.gets(LARGE)
    assert request.range is not None
    rest = size - int(request.range.removeprefix("bytes=").removesuffix("-"))
    assert rest <= size - 400_000
    assert hub.bytes_sent[LARGE] <= rest + (1 << 17)  # the first answer's last pieces may be counted late
    assert sha256_file(tmp_path / "out" / LARGE) == sha256_file(hub.root / "Qwen/demo" / LARGE)
    assert sum(map(int, output.split())) == size


def test_hugging_face_starts_a_file_again_after_kill_9_and_leaves_no_debris(hub, tmp_path):
    size = (hub.root / "Qwen/demo" / LARGE).stat().st_size
    kill_in_the_middle("huggingface", hub, tmp_path, size, signal.SIGKILL)
    leftovers = list((tmp_path / "out").rglob("*.incomplete"))
    assert leftovers
    process = start("huggingface", hub, tmp_path, size)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert [request.range for request in hub.gets(LARGE)] == [None]
    assert not list((tmp_path / "out").rglob("*.incomplete"))


def test_ctrl_c_ends_a_fetch_at_once(hub, kind, tmp_path):
    size = (hub.root / "Qwen/demo" / LARGE).stat().st_size
    started = time.monotonic()
    kill_in_the_middle(kind, hub, tmp_path, size, signal.SIGINT)
    assert time.monotonic() - started < 25
