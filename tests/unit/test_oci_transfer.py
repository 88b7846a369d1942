"""Moving images: once, only what is missing, one digest everywhere, an orderly end when something fails."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.oci_memory import Bytes, MemorySink, MemorySource, small_base

from pipeline.errors import DuopackError
from pipeline.oci.archive import ArchiveSink
from pipeline.oci.digest import Digest
from pipeline.oci.image import Image, Layer, load_base
from pipeline.oci.layout import LayoutSink, LayoutSource
from pipeline.oci.model import OCI_INDEX, Blob, Descriptor, OnBytes
from pipeline.oci.tar import TarEntry, TarLayer
from pipeline.oci.transfer import copy_image, write_image


def tar(number: int, size: int = 5000) -> TarLayer:
    return TarLayer([TarEntry(f"models/m/{number}", 0o644, bytes([number]) * size)])


@pytest.fixture
def source() -> MemorySource:
    made = MemorySource()
    small_base(made, "t")
    return made


@pytest.fixture
def image(source: MemorySource) -> Image:
    layers = [Layer.of(tar(number)) for number in range(3)]
    return load_base(source, "t", "linux/arm64").with_layers(layers).with_config(cmd=["/models/n.sh"])


@dataclass
class Recorder:
    started: list[str] = field(default_factory=list)
    passed_by: list[str] = field(default_factory=list)
    bytes: int = 0

    def start(self, title: str, size: int) -> OnBytes:
        self.started.append(title)
        return self._count

    def skipped(self, title: str, size: int) -> None:
        self.passed_by.append(title)

    def _count(self, count: int) -> None:
        self.bytes += count


@pytest.fixture(autouse=True)
def _no_thread_outlives_a_test() -> Iterator[None]:
    yield
    assert [one.name for one in threading.enumerate() if one.name.startswith("duopack")] == []


def test_every_place_gets_the_same_digest(image: Image, tmp_path: Path) -> None:
    sinks = [
        MemorySink(),
        LayoutSink(tmp_path / "layout", "t"),
        ArchiveSink(tmp_path / "a.tar", "x/y:t"),
        LayoutSink(tmp_path / "other", "u"),
    ]
    digests = {write_image(image, sink, parallel=number).digest for number, sink in enumerate(sinks, 1)}
    assert len(digests) == 1
    copied = MemorySink()
    assert copy_image(LayoutSource(tmp_path / "layout"), "t", None, copied).digest in digests
    assert copied.manifest == sinks[0].manifest  # type: ignore[attr-defined]


def test_layers_go_in_order_when_one_goes_at_a_time(image: Image) -> None:
    sink, seen = MemorySink(parallel=1), Recorder()
    write_image(image, sink, parallel=4, on_layer=seen)
    manifest = json.loads(sink.manifest or b"")
    assert sink.sent == [layer["digest"] for layer in manifest["layers"]]
    assert seen.started[1:] == ["models/m/0", "models/m/1", "models/m/2"]
    assert seen.bytes == image.size


def test_several_layers_go_at_once_but_no_more_than_allowed(image: Image) -> None:
    meeting = threading.Barrier(2, timeout=10)
    running: list[int] = []
    most = 0

    class Meeting(MemorySink):
        def put_blob(self, blob: Blob, on_bytes: OnBytes) -> Digest:
            nonlocal most
            running.append(1)
            most = max(most, len(running))
            meeting.wait()
            running.pop()
            return super().put_blob(blob, on_bytes)

    write_image(image, Meeting(parallel=8), parallel=2)
    assert most == 2


def test_what_is_remembered_and_there_is_not_read_again(image: Image, tmp_path: Path) -> None:
    memo: dict[str, Digest] = {}
    sink = MemorySink()
    write_image(image, sink, remember=memo.__setitem__)
    assert len(memo) == 3

    class Unreadable(TarLayer):
        def read(self, offset: int = 0) -> Iterator[bytes]:
            raise AssertionError("read again")

    unread = image.layers[:1] + tuple(Layer(Unreadable(tar(number).entries)) for number in range(3))
    seen = Recorder()
    changed = Image(image.config, unread).with_layers([Layer.of(tar(9), created_by="new")])
    write_image(changed, sink, known=memo, on_layer=seen)
    assert seen.started == ["models/m/9"]
    assert len(seen.passed_by) == 4


def test_what_is_remembered_but_gone_is_sent_and_checked(image: Image) -> None:
    memo: dict[str, Digest] = {}
    write_image(image, MemorySink(), remember=memo.__setitem__)
    sink = MemorySink()
    write_image(image, sink, known=memo)
    assert len(sink.sent) == 4
    wrong = dict.fromkeys(memo, Digest("sha256:" + "0" * 64))
    with pytest.raises(DuopackError, match="not the promised one"):
        write_image(image, MemorySink(), known=wrong)


def test_equal_layers_move_once(image: Image) -> None:
    twice = image.with_layers([Layer.of(tar(1)), Layer(image.layers[0].blob, image.layers[0].diff_id)])
    sink = MemorySink()
    write_image(twice, sink)
    assert len(sink.sent) == 4
    assert len(json.loads(sink.manifest or b"")["layers"]) == 6


def test_a_blob_that_is_collected_before_the_manifest_is_sent_again(image: Image) -> None:
    class Collecting(MemorySink):
        collected = False

        def has(self, digest: Digest, size: int) -> bool:
            # When all were sent the garbage collector comes by once.
            if len(self.sent) == 4 and not self.collected:
                self.collected = True
                self.blobs.clear()
            return super().has(digest, size)

    sink = Collecting(parallel=1)
    write_image(image, sink)
    assert len(sink.sent) == 8
    assert sink.manifest


@dataclass(frozen=True)
class Endless:
    """A blob that never ends and says when it is being read."""

    reading: threading.Event
    media_type: str = "x"
    size: int = 1 << 50
    digest: Digest | None = None

    def read(self, offset: int = 0) -> Iterator[bytes]:
        while True:
            self.reading.set()
            time.sleep(0.001)
            yield b"x" * 100


@dataclass(frozen=True)
class Failing:
    """A blob that fails when the other one is under way."""

    reading: threading.Event
    media_type: str = "x"
    size: int = 10
    digest: Digest | None = None

    def read(self, offset: int = 0) -> Iterator[bytes]:
        self.reading.wait(10)
        raise DuopackError("the weights changed")
        yield b""


def test_the_first_failure_stops_the_others_and_gives_the_sink_up() -> None:
    reading = threading.Event()
    image = Image.scratch("linux/arm64").with_layers(
        [Layer(Endless(reading)), Layer(Failing(reading)), Layer.of(tar(1))]
    )
    sink = MemorySink(parallel=2)
    started = time.monotonic()
    with pytest.raises(DuopackError, match="the weights changed"):
        write_image(image, sink, parallel=2)
    assert time.monotonic() - started < 2
    assert sink.aborted
    assert sink.manifest is None
    assert sink.sent == []


def test_a_sink_that_hangs_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.oci.transfer._PATIENCE_SECONDS", 0.1)
    cut = threading.Event()

    class Hanging(MemorySink):
        def put_blob(self, blob: Blob, on_bytes: OnBytes) -> Digest:
            if blob.size == 10:
                raise DuopackError("no route")
            assert cut.wait(10)
            raise OSError("socket closed")

        def abort(self) -> None:
            cut.set()

    image = Image.scratch("linux/arm64").with_layers([Layer(Endless(cut)), Layer(Bytes(bytes(10)))])
    with pytest.raises(DuopackError, match="no route"):
        write_image(image, Hanging(), parallel=2)


@pytest.fixture
def _ctrl_c_is_heard() -> Iterator[None]:
    """A shell's background job starts with SIGINT ignored, and Python leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c_is_heard")
def test_ctrl_c_ends_the_transfer_and_its_threads() -> None:
    reading = threading.Event()

    def press() -> None:
        reading.wait(10)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    sink = MemorySink()
    with pytest.raises(KeyboardInterrupt):
        write_image(Image.scratch("linux/arm64").with_layers([Layer(Endless(reading))]), sink)
    presser.join()
    assert sink.aborted


def test_a_failing_abort_does_not_hide_the_cause(image: Image) -> None:
    class Bad(MemorySink):
        def put_manifest(self, manifest: bytes, config: bytes, layers: tuple[Descriptor, ...]) -> Descriptor:
            raise DuopackError("manifest refused")

        def abort(self) -> None:
            raise OSError("abort failed")

    with pytest.raises(DuopackError, match="manifest refused") as caught:
        write_image(image, Bad())
    assert "abort failed" in caught.value.__notes__[0]


def test_a_sink_may_plan_with_digests_and_diff_ids(image: Image) -> None:
    plans: list[list[tuple[Digest | None, Digest | None]]] = []

    class Planning(MemorySink):
        def plan(self, layers: list[tuple[Digest | None, Digest | None]]) -> None:
            assert not self.sent
            plans.append(layers)

    memo: dict[str, Digest] = {}
    write_image(image, Planning(), remember=memo.__setitem__)
    write_image(image, Planning(), known=memo)
    base = (image.layers[0].blob.digest, image.layers[0].diff_id)
    assert plans[0] == [base, (None, None), (None, None), (None, None)]
    assert plans[1] == [base, *((memo[tar(n).key],) * 2 for n in range(3))]


def test_a_copy_keeps_the_manifests_bytes_and_picks_the_platform(source: MemorySource) -> None:
    arm = small_base(source) | {"platform": {"os": "linux", "architecture": "arm64"}}
    amd = small_base(source, architecture="amd64", variant="") | {
        "platform": {"os": "linux", "architecture": "amd64"}
    }
    index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [amd, arm]}
    source.add_manifest(index, "multi", media_type=OCI_INDEX)
    sink = MemorySink()
    assert copy_image(source, "multi", "linux/arm64", sink).digest == arm["digest"]
    assert sink.manifest == source.manifests[arm["digest"]][1]
    with pytest.raises(DuopackError, match="several platforms: linux/amd64, linux/arm64"):
        copy_image(source, "multi", None, MemorySink())


def test_a_copy_of_a_damaged_blob_fails(source: MemorySource) -> None:
    layer = json.loads(source.manifests["t"][1])["layers"][0]
    source.blobs[layer["digest"]] = bytes(layer["size"])
    sink = MemorySink()
    with pytest.raises(DuopackError, match="not the promised one"):
        copy_image(source, "t", None, sink)
    assert sink.manifest is None
