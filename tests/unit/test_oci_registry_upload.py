"""Sending blobs and manifests to registries that behave, and to ones that do not."""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from support.fake_registry import BASIC, PASSWORD, FakeRegistry, Fault, Handler

from pipeline.errors import DuopackError, UsageError
from pipeline.oci.digest import Digest
from pipeline.oci.model import OCI_CONFIG, OCI_LAYER_TAR, OCI_MANIFEST, Descriptor
from pipeline.oci.reference import parse_reference
from pipeline.oci.registry.client import Client
from pipeline.oci.registry.failures import RegistryError
from pipeline.oci.registry.habits import Habits, Manner
from pipeline.oci.registry.journal import Journal
from pipeline.oci.registry.patience import Patience
from pipeline.oci.registry.settings import Settings
from pipeline.oci.registry.sink import RegistrySink

CHUNK = 300_000
DATA = random.Random(1).randbytes(1_000_000)
DIGEST = "sha256:" + hashlib.sha256(DATA).hexdigest()


@dataclass
class MemoryBlob:
    """Bytes in memory, given in pieces; counts how often it was opened and how much was read."""

    data: bytes = DATA
    digest: Digest | None = None
    media_type: str = OCI_LAYER_TAR
    piece: int = 70_000
    opened: list[int] = field(default_factory=list)
    given: int = 0

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int = 0) -> Iterator[bytes | memoryview]:
        self.opened.append(offset)
        for start in range(offset, len(self.data), self.piece):
            piece = self.data[start : start + self.piece]
            self.given += len(piece)
            yield piece


@dataclass
class Waits:
    """A sleep that takes no time, and remembers."""

    seconds: list[float] = field(default_factory=list)

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def login(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"auths": {"127.0.0.1": {}}}))
    return file


def sink_for(
    fake: FakeRegistry,
    waits: Waits,
    *,
    chunk: int = CHUNK,
    journal: Path | None = None,
    mount_from: tuple[str, ...] = (),
    login: Path | None = None,
    tag: str = ":v1",
) -> RegistrySink:
    settings = Settings(auth_files=(login,) if login else ())
    if login:
        login.write_text(json.dumps({"auths": {fake.host: {"auth": BASIC.removeprefix("Basic ")}}}))
    reference = parse_reference(f"{fake.host}/a/b{tag}")
    client = Client(
        fake.host, "a/b", settings, push=True, mount_from=mount_from, patience=Patience(sleep=waits)
    )
    return RegistrySink(client, reference, chunk=chunk, journal=journal, mount_from=mount_from)


def ranges(fake: FakeRegistry) -> list[str | None]:
    return [one.headers.get("Content-Range") for one in fake.seen if one.method == "PATCH"]


def test_a_small_blob_goes_in_one_patch_and_a_put_without_data(waits: Waits) -> None:
    moved: list[int] = []
    with FakeRegistry() as fake:
        digest = sink_for(fake, waits, chunk=1 << 20).put_blob(MemoryBlob(), moved.append)
    assert digest == DIGEST
    assert fake.blobs[DIGEST] == DATA
    assert sum(moved) == len(DATA)
    assert ranges(fake) == [None]
    assert [one.headers["Content-Length"] for one in fake.seen if one.method == "PUT"] == ["0"]


@pytest.mark.parametrize("absolute", [False, True])
def test_a_large_blob_goes_in_chunks_that_follow_the_changing_location(waits: Waits, absolute: bool) -> None:
    blob = MemoryBlob()
    with FakeRegistry(strict=True, absolute=absolute) as fake:
        assert sink_for(fake, waits).put_blob(blob, lambda _: None) == DIGEST
    assert fake.blobs[DIGEST] == DATA
    assert ranges(fake) == ["0-299999", "300000-599999", "600000-899999", "900000-999999"]
    assert blob.given == len(DATA)


def test_the_registrys_least_chunk_is_honoured(waits: Waits) -> None:
    with FakeRegistry(minimum=450_000) as fake:
        assert sink_for(fake, waits).put_blob(MemoryBlob(), lambda _: None) == DIGEST
    assert ranges(fake) == ["0-449999", "450000-899999", "900000-999999"]


def test_an_empty_blob_can_be_sent(waits: Waits) -> None:
    with FakeRegistry() as fake:
        digest = sink_for(fake, waits).put_blob(MemoryBlob(b""), lambda _: None)
    assert fake.blobs[digest] == b""


def test_a_cut_connection_resumes_where_the_registry_says(waits: Waits) -> None:
    blob, moved = MemoryBlob(), list[int]()
    with FakeRegistry(faults=[Fault("PATCH", "session", skip=2, cut=123_456)]) as fake:
        assert sink_for(fake, waits).put_blob(blob, moved.append) == DIGEST
    assert fake.blobs[DIGEST] == DATA
    assert ranges(fake)[2:4] == ["600000-899999", "723456-999999"]
    assert sum(moved) == len(DATA)
    assert fake.count("POST") == 1
    assert blob.opened == [0, 600_000]


def test_a_cut_that_ends_the_session_starts_the_blob_again(waits: Waits) -> None:
    moved: list[int] = []
    with FakeRegistry(strict=True, faults=[Fault("PATCH", "session", skip=1, cut=5)]) as fake:
        assert sink_for(fake, waits).put_blob(MemoryBlob(), moved.append) == DIGEST
    assert fake.count("POST") == 2
    assert sum(moved) == len(DATA)
    assert min(moved) < 0


def test_cuts_without_progress_end_in_an_error_that_says_so(waits: Waits) -> None:
    faults = [Fault(method, "session", times=99, cut=0) for method in ("PATCH", "PUT")]
    with (
        FakeRegistry(strict=True, faults=faults) as fake,
        pytest.raises(RegistryError, match="cut") as raised,
    ):
        sink_for(fake, waits).put_blob(MemoryBlob(), lambda _: None)
    assert "same command again" in str(raised.value)
    assert 3 <= len(waits.seconds) < 20


def test_a_proxy_that_forgets_sessions_gets_one_patch_then_and_for_all_other_blobs(waits: Waits) -> None:
    with FakeRegistry(faults=[Fault("PATCH", "session", skip=1, act=_forget)]) as fake:
        sink = sink_for(fake, waits)
        assert sink.put_blob(MemoryBlob(), lambda _: None) == DIGEST
        other = MemoryBlob(DATA[::-1])
        sink.put_blob(other, lambda _: None)
    assert ranges(fake) == ["0-299999", "300000-599999", None, None]
    assert other.data in fake.blobs.values()


def test_a_proxy_that_forgets_every_session_gets_one_put(waits: Waits) -> None:
    moved: list[int] = []
    with FakeRegistry(forgetful=True) as fake:
        assert sink_for(fake, waits).put_blob(MemoryBlob(), moved.append) == DIGEST
    assert fake.blobs[DIGEST] == DATA
    assert fake.count("PATCH") == 3
    assert sum(moved) == len(DATA)


def test_a_registry_that_counts_other_bytes_is_not_trusted_with_chunks(waits: Waits) -> None:
    def lie(handler: Handler) -> None:
        handler.read_body()
        handler.answer(202, Location=handler.path, Range="0-299999")

    with FakeRegistry(faults=[Fault("PATCH", "session", skip=1, act=lie)]) as fake:
        assert sink_for(fake, waits).put_blob(MemoryBlob(), lambda _: None) == DIGEST
    assert ranges(fake)[-1] is None


def test_wrong_bytes_at_the_registry_are_sent_again_and_then_reported(waits: Waits) -> None:
    wrong = json.dumps({"errors": [{"code": "DIGEST_INVALID", "message": "no"}]}).encode()
    with FakeRegistry(faults=[Fault("PUT", "session", status=400, body=wrong)]) as fake:
        assert sink_for(fake, waits).put_blob(MemoryBlob(), lambda _: None) == DIGEST
        fake.blobs.clear()
        fake.faults.append(Fault("PUT", "session", times=9, status=400, body=wrong))
        with pytest.raises(RegistryError, match="other bytes than were sent"):
            sink_for(fake, waits).put_blob(MemoryBlob(), lambda _: None)


def test_a_registry_that_names_another_digest_is_reported(waits: Waits) -> None:
    other = "sha256:" + "0" * 64
    with (
        FakeRegistry(
            faults=[Fault("PUT", "session", status=201, headers={"Docker-Content-Digest": other})]
        ) as fake,
        pytest.raises(RegistryError, match="stored a layer as sha256:000"),
    ):
        sink_for(fake, waits).put_blob(MemoryBlob(), lambda _: None)


def test_bytes_that_are_not_the_promised_ones_never_become_a_blob(waits: Waits) -> None:
    blob = MemoryBlob(digest=Digest("sha256:" + "1" * 64))
    with FakeRegistry() as fake, pytest.raises(DuopackError, match="the bytes have the digest"):
        sink_for(fake, waits).put_blob(blob, lambda _: None)
    # Once on trust, and once more to see whether it is the bytes or the registry that is wrong.
    assert len(blob.opened) == 2
    assert not fake.blobs
    assert not fake.sessions


def test_a_known_digest_that_is_right_survives_a_refusal(waits: Waits) -> None:
    wrong = json.dumps({"errors": [{"code": "DIGEST_INVALID", "message": "no"}]}).encode()
    with FakeRegistry(faults=[Fault("PUT", "session", status=400, body=wrong)]) as fake:
        blob = MemoryBlob(digest=Digest(DIGEST))
        assert sink_for(fake, waits).put_blob(blob, lambda _: None) == DIGEST
    assert fake.blobs[DIGEST] == DATA
    assert len(blob.opened) == 2


@pytest.mark.parametrize("change", [-1, 1])
def test_a_blob_of_another_size_than_promised_is_refused(waits: Waits, change: int) -> None:
    class Changed(MemoryBlob):
        @property
        def size(self) -> int:
            return len(self.data) + change

    with FakeRegistry() as fake, pytest.raises(DuopackError, match="not what it was said to be"):
        sink_for(fake, waits).put_blob(Changed(), lambda _: None)
    assert not fake.blobs


def test_a_busy_registry_is_given_the_time_it_asks_for(waits: Waits) -> None:
    with FakeRegistry(
        faults=[
            Fault("POST", "uploads", status=429, headers={"Retry-After": "7"}),
            Fault("PATCH", "session", skip=1, status=503, headers={"Retry-After": "9"}),
            Fault("PUT", "session", status=500),
        ]
    ) as fake:
        assert sink_for(fake, waits).put_blob(MemoryBlob(), lambda _: None) == DIGEST
    assert 7.0 in waits.seconds
    assert 9.0 in waits.seconds


def test_a_registry_that_asks_for_hours_is_not_waited_for(waits: Waits) -> None:
    fault = Fault("POST", "uploads", status=429, headers={"Retry-After": "7200"})
    with FakeRegistry(faults=[fault]) as fake, pytest.raises(RegistryError, match="limits the rate"):
        sink_for(fake, waits).put_blob(MemoryBlob(), lambda _: None)
    assert waits.seconds == []


def test_a_put_whose_answer_was_lost_counts_when_the_blob_is_there(waits: Waits) -> None:
    def store_and_hang_up(handler: Handler) -> None:
        handler.fake.add_blob(DATA)
        handler.fake.sessions.clear()
        handler.reset()

    blob = MemoryBlob()
    with FakeRegistry(faults=[Fault("PUT", "session", act=store_and_hang_up)]) as fake:
        assert sink_for(fake, waits).put_blob(blob, lambda _: None) == DIGEST
    assert blob.given == len(DATA)
    assert fake.count("POST") == 1


def test_a_refusal_while_the_body_is_being_sent_is_told_as_what_it_is(waits: Waits) -> None:
    big = MemoryBlob(random.Random(2).randbytes(30 << 20), piece=1 << 20)
    fault = Fault("PATCH", "session", status=403, body=b'{"errors":[{"code":"DENIED"}]}', early=True)
    with FakeRegistry(faults=[fault]) as fake, pytest.raises(RegistryError) as raised:
        sink_for(fake, waits, chunk=64 << 20).put_blob(big, lambda _: None)
    assert raised.value.status == 403
    assert "docker login" in str(raised.value)
    assert big.given < len(big.data)


def test_a_proxys_size_limit_is_met_with_smaller_chunks(waits: Waits) -> None:
    blob = MemoryBlob(random.Random(3).randbytes(20 << 20), piece=1 << 20)
    with FakeRegistry(largest_body=6 << 20) as fake:
        digest = sink_for(fake, waits, chunk=64 << 20).put_blob(blob, lambda _: None)
    assert fake.blobs[digest] == blob.data


def test_a_size_limit_below_the_smallest_chunk_names_the_proxys_setting(waits: Waits) -> None:
    blob = MemoryBlob(random.Random(3).randbytes(20 << 20), piece=1 << 20)
    with FakeRegistry(largest_body=1 << 20) as fake, pytest.raises(RegistryError) as raised:
        sink_for(fake, waits, chunk=64 << 20).put_blob(blob, lambda _: None)
    assert "client_max_body_size" in str(raised.value)


def test_the_registrys_own_layer_limit_is_told_apart_from_a_proxys(waits: Waits) -> None:
    body = b'{"errors":[{"code":"SIZE_INVALID","message":"layer too big"}]}'
    fault = Fault("PATCH", "session", status=413, body=body)
    with FakeRegistry(faults=[fault]) as fake, pytest.raises(RegistryError) as raised:
        sink_for(fake, waits).put_blob(MemoryBlob(), lambda _: None)
    assert "limit for one layer" in str(raised.value)
    assert fake.count("PATCH") == 1


def test_a_full_disk_at_the_registry_is_named(waits: Waits) -> None:
    body = b'{"errors":[{"code":"UNKNOWN","detail":{"Err":28}}]}'
    fault = Fault("PATCH", "session", times=9, status=500, body=body)
    with FakeRegistry(faults=[fault]) as fake, pytest.raises(RegistryError, match="disk is full"):
        sink_for(fake, waits).put_blob(MemoryBlob(), lambda _: None)
    assert fake.count("PATCH") == 1


def test_a_token_that_ends_in_mid_push_is_renewed(waits: Waits, login: Path) -> None:
    def end_tokens(handler: Handler) -> None:
        handler.fake.ended |= set(handler.fake.tokens)
        handler._authorized()  # answers 401 with a challenge

    blob = MemoryBlob()
    with FakeRegistry(login="bearer", faults=[Fault("PATCH", "session", skip=2, act=end_tokens)]) as fake:
        assert sink_for(fake, waits, login=login).put_blob(blob, lambda _: None) == DIGEST
    assert fake.blobs[DIGEST] == DATA
    assert len(fake.tokens) == 2
    assert fake.count("POST", "uploads") == 2  # one of them met the first 401


def test_a_short_lived_token_is_fetched_again_before_it_ends(waits: Waits, login: Path) -> None:
    with FakeRegistry(login="bearer", token_life=1) as fake:
        sink = sink_for(fake, waits, login=login)
        clock = [0.0]
        sink._client._auth._clock = lambda: clock[0]
        sink.put_blob(MemoryBlob(b"one"), lambda _: None)
        clock[0] = 10.0
        fake.seen.clear()
        sink.put_blob(MemoryBlob(b"two"), lambda _: None)
    assert "/token" in fake.seen[0].path
    assert len(fake.tokens) >= 2


def test_without_a_right_login_the_error_says_how_to_log_in_and_no_secret(waits: Waits, login: Path) -> None:
    with FakeRegistry(login="bearer") as fake:
        with pytest.raises(RegistryError, match="docker login 127"):
            sink_for(fake, waits).put_blob(MemoryBlob(), lambda _: None)
        fake.faults.append(Fault("GET", "/token", times=9, status=401))
        with pytest.raises(RegistryError, match="login is not accepted") as raised:
            sink_for(fake, waits, login=login).put_blob(MemoryBlob(), lambda _: None)
    assert PASSWORD not in str(raised.value)


def test_a_sister_repositorys_blob_is_mounted_and_not_sent(waits: Waits, login: Path) -> None:
    moved: list[int] = []
    blob = MemoryBlob(digest=Digest(DIGEST))
    with FakeRegistry(login="bearer", mountable={DIGEST: DATA}) as fake:
        sink = sink_for(fake, waits, mount_from=("base/image",), login=login)
        assert sink.put_blob(blob, moved.append) == DIGEST
    assert blob.opened == []
    assert sum(moved) == len(DATA)
    asked = next(one.path for one in fake.seen if "/token" in one.path)
    assert "repository%3Aa%2Fb%3Apull%2Cpush" in asked
    assert "repository%3Abase%2Fimage%3Apull" in asked


def test_a_blob_that_cannot_be_mounted_is_sent_in_the_session_that_came_of_it(waits: Waits) -> None:
    blob = MemoryBlob(digest=Digest(DIGEST))
    with FakeRegistry() as fake:
        assert sink_for(fake, waits, mount_from=("x",)).put_blob(blob, lambda _: None) == DIGEST
        assert fake.count("POST") == 1
        fake.faults.append(Fault("POST", "mount=", status=403))
        fake.blobs.clear()
        assert sink_for(fake, waits, mount_from=("x",)).put_blob(blob, lambda _: None) == DIGEST


class Killed(BaseException):
    """Stands for a kill: nothing may catch it."""


def killed_after(count: int) -> object:
    total = 0

    def on_bytes(moved: int) -> None:
        nonlocal total
        total += moved
        if total > count:
            raise Killed

    return on_bytes


@pytest.mark.parametrize("digest", [None, Digest(DIGEST)])
def test_a_killed_push_goes_on_at_the_last_chunk(waits: Waits, tmp_path: Path, digest: Digest | None) -> None:
    journal = tmp_path / "journal"
    with FakeRegistry() as fake:
        first = sink_for(fake, waits, journal=journal)
        with pytest.raises(Killed):
            first.put_blob(MemoryBlob(digest=digest), killed_after(650_000))
        first.close()
        fake.settle()
        fake.seen.clear()
        moved: list[int] = []
        second = sink_for(fake, waits, journal=journal)
        assert second.put_blob(MemoryBlob(digest=digest), moved.append) == DIGEST
    assert fake.blobs[DIGEST] == DATA
    assert fake.count("POST") == 0
    assert int((ranges(fake)[0] or "0").partition("-")[0]) >= 600_000
    assert sum(moved) == len(DATA)
    assert [path.name for path in journal.iterdir()] == ["lock"]


def test_other_bytes_do_not_go_on_with_a_killed_push(waits: Waits, tmp_path: Path) -> None:
    with FakeRegistry() as fake:
        first = sink_for(fake, waits, journal=tmp_path)
        with pytest.raises(Killed):
            first.put_blob(MemoryBlob(), killed_after(650_000))
        first.close()
        fake.settle()
        changed = DATA[:400_000] + b"!" + DATA[400_001:]
        digest = sink_for(fake, waits, journal=tmp_path).put_blob(MemoryBlob(changed), lambda _: None)
    assert fake.blobs[digest] == changed


def test_a_session_that_the_registry_has_forgotten_is_begun_again(waits: Waits, tmp_path: Path) -> None:
    with FakeRegistry() as fake:
        first = sink_for(fake, waits, journal=tmp_path)
        with pytest.raises(Killed):
            first.put_blob(MemoryBlob(), killed_after(650_000))
        first.close()
        fake.settle()
        fake.sessions.clear()
        assert sink_for(fake, waits, journal=tmp_path).put_blob(MemoryBlob(), lambda _: None) == DIGEST
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"location": "http://evil.example/", "offset": 300000, "sha256": "x"}']
)
def test_a_broken_journal_entry_costs_nothing(waits: Waits, tmp_path: Path, text: str) -> None:
    with FakeRegistry() as fake:
        first = sink_for(fake, waits, journal=tmp_path)
        with pytest.raises(Killed):
            first.put_blob(MemoryBlob(), killed_after(650_000))
        first.close()
        fake.settle()
        for entry in tmp_path.glob("*.json"):
            entry.write_text(text)
        assert sink_for(fake, waits, journal=tmp_path).put_blob(MemoryBlob(), lambda _: None) == DIGEST


def test_two_processes_do_not_share_a_journal(tmp_path: Path) -> None:
    from pipeline.oci.registry.journal import OpenUpload

    first, second = Journal(tmp_path, "place"), Journal(tmp_path, "place")
    first.record("key", OpenUpload("http://h/", 5, "x"))
    assert first.find("key") is not None
    assert second.find("key") is None
    first.close()
    assert Journal(tmp_path, "other place").find("key") is None


def test_a_stopped_sink_ends_its_uploads_soon(waits: Waits) -> None:
    with FakeRegistry() as fake:
        sink = sink_for(fake, waits)
        errors: list[BaseException] = []

        def on_bytes(_: int) -> None:
            sink.abort()

        def push() -> None:
            try:
                sink.put_blob(MemoryBlob(), on_bytes)
            except DuopackError as error:
                errors.append(error)

        thread = threading.Thread(target=push)
        thread.start()
        thread.join(10)
    assert not thread.is_alive()
    assert "stopped" in str(errors[0])
    assert not fake.blobs


def test_aborting_ends_an_upload_to_a_registry_that_says_nothing(waits: Waits) -> None:
    silence = threading.Event()
    with FakeRegistry(faults=[Fault("PATCH", "session", act=lambda _: silence.wait(20))]) as fake:
        sink = sink_for(fake, waits)
        threading.Timer(0.2, sink.abort).start()
        began = time.monotonic()
        with pytest.raises(DuopackError):
            sink.put_blob(MemoryBlob(random.Random(4).randbytes(20 << 20)), lambda _: None)
        assert time.monotonic() - began < 5
        silence.set()


def manifest_of(*layers: bytes) -> tuple[bytes, bytes, tuple[Descriptor, ...]]:
    described = tuple(Descriptor(OCI_LAYER_TAR, Digest.of(data), len(data)) for data in layers)
    config = b'{"os":"linux"}'
    value = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": Descriptor(OCI_CONFIG, Digest.of(config), len(config)).to_json(),
        "layers": [one.to_json() for one in described],
    }
    return json.dumps(value).encode(), config, described


def test_an_image_is_visible_under_its_tag_after_its_blobs_and_read_back(waits: Waits) -> None:
    manifest, config, layers = manifest_of(DATA)
    with FakeRegistry() as fake:
        sink = sink_for(fake, waits)
        assert not sink.has(layers[0].digest, len(DATA))
        sink.put_blob(MemoryBlob(), lambda _: None)
        assert sink.has(layers[0].digest, len(DATA))
        assert not sink.has(layers[0].digest, len(DATA) + 1)
        descriptor = sink.put_manifest(manifest, config, layers)
    assert descriptor == Descriptor(OCI_MANIFEST, Digest.of(manifest), len(manifest))
    assert fake.manifests["v1"] == (OCI_MANIFEST, manifest)
    assert config in fake.blobs.values()


def test_a_layer_that_is_gone_is_found_before_the_manifest_is_written(waits: Waits) -> None:
    manifest, config, layers = manifest_of(DATA, b"other")
    with FakeRegistry() as fake:
        sink = sink_for(fake, waits)
        sink.put_blob(MemoryBlob(), lambda _: None)
        with pytest.raises(RegistryError, match="is not in the registry"):
            sink.put_manifest(manifest, config, layers)
    assert not fake.manifests


def test_a_blob_unknown_at_the_manifest_is_named(waits: Waits) -> None:
    manifest, config, layers = manifest_of(DATA)
    with FakeRegistry() as fake:
        sink = sink_for(fake, waits)
        sink.put_blob(MemoryBlob(), lambda _: None)
        fake.blobs.clear()
        with pytest.raises(RegistryError, match="a blob of the image is not"):
            sink.put_manifest(manifest, config, layers)


def test_a_tag_that_reads_back_otherwise_is_an_error(waits: Waits) -> None:
    manifest, config, layers = manifest_of()
    other = manifest.replace(b" ", b"  ")

    def swap(handler: Handler) -> None:
        handler.read_body()
        handler.fake.manifests["v1"] = (OCI_MANIFEST, other)
        handler.answer(201)

    with (
        FakeRegistry(faults=[Fault("PUT", "manifests", act=swap)]) as fake,
        pytest.raises(RegistryError, match="read back"),
    ):
        sink_for(fake, waits).put_manifest(manifest, config, layers)


def test_a_pinned_destination_takes_only_its_own_image(waits: Waits) -> None:
    manifest, config, layers = manifest_of()
    with FakeRegistry() as fake:
        sink_for(fake, waits, tag=f"@{Digest.of(manifest)}").put_manifest(manifest, config, layers)
        with pytest.raises(DuopackError, match="not the one in its name"):
            sink_for(fake, waits, tag="@sha256:" + "2" * 64).put_manifest(manifest, config, layers)
    assert set(fake.manifests) == {str(Digest.of(manifest))}


def test_a_destination_needs_a_tag() -> None:
    reference = replace(parse_reference("127.0.0.1:5000/a/b"), tag=None)
    client = Client(reference.registry, reference.repository, Settings())
    with pytest.raises(UsageError):
        RegistrySink(client, reference)


def test_public_registries_that_want_one_put_get_it() -> None:
    for host in ("ghcr.io", "europe-docker.pkg.dev", "eu.gcr.io", "1.dkr.ecr.us-east-1.amazonaws.com"):
        assert Habits.of(host).manner is Manner.WHOLE
    for host in ("quay.io", "ghcr.io.evil.example", "harbor.internal:5000"):
        assert Habits.of(host).manner is Manner.CHUNKS


def test_one_put_hashes_first_and_sends_nothing_that_is_there(waits: Waits) -> None:
    blob = MemoryBlob()
    with FakeRegistry() as fake:
        sink = sink_for(fake, waits)
        sink._habits = Habits([Manner.WHOLE, Manner.STREAM])
        fake.faults.append(Fault("PUT", "session", cut=1000))
        assert sink.put_blob(blob, lambda _: None) == DIGEST
        assert fake.count("PATCH") == 0
        assert fake.blobs[DIGEST] == DATA
        fake.seen.clear()
        assert sink.put_blob(MemoryBlob(), lambda _: None) == DIGEST
    assert {one.method for one in fake.seen} == {"HEAD"}


def test_one_put_that_is_too_large_becomes_a_stream(waits: Waits) -> None:
    with FakeRegistry(faults=[Fault("PUT", "session", status=413)]) as fake:
        sink = sink_for(fake, waits)
        sink._habits = Habits([Manner.WHOLE, Manner.STREAM])
        assert sink.put_blob(MemoryBlob(), lambda _: None) == DIGEST
    assert ranges(fake) == [None]


def _forget(handler: Handler) -> None:
    handler.fake.sessions.clear()
    handler.error(404, "BLOB_UPLOAD_UNKNOWN")
