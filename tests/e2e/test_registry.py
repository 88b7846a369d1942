"""Against Debian's docker-registry (distribution 2.8.2): what is written can be read, whatever is killed on the way."""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.registry import RegistryServer

from pipeline.errors import DuopackError
from pipeline.oci.digest import Digest
from pipeline.oci.model import OCI_CONFIG, OCI_LAYER_TAR, OCI_MANIFEST, Descriptor
from pipeline.oci.places import open_sink, open_source
from pipeline.oci.reference import parse_reference
from pipeline.oci.registry.client import Client
from pipeline.oci.registry.failures import RegistryError
from pipeline.oci.registry.settings import Settings
from pipeline.oci.registry.sink import RegistrySink

pytestmark = pytest.mark.e2e

MIB = 1 << 20
CHUNK = 8 * MIB
DATA = random.Random(1).randbytes(40 * MIB)
DIGEST = Digest.of(DATA)
# The password is "secret"; bcrypt is all that the registry takes.
LOGIN = ("user", "secret", "$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a")


@dataclass
class MemoryBlob:
    """Bytes in memory; `before` is told each offset before the piece there is given."""

    data: bytes = DATA
    digest: Digest | None = None
    before: Callable[[int], None] = lambda _: None
    media_type: str = OCI_LAYER_TAR
    given: int = 0
    opened: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int = 0) -> Iterator[bytes | memoryview]:
        self.opened.append(offset)
        for start in range(offset, len(self.data), MIB):
            self.before(start)
            piece = self.data[start : min(start + MIB, len(self.data))]
            self.given += len(piece)
            yield piece


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RegistryServer]:
    with RegistryServer(tmp_path / "registry") as server:
        yield server


def sink_for(registry: RegistryServer, repository: str = "a/b", journal: Path | None = None) -> RegistrySink:
    reference = parse_reference(f"{registry.host}/{repository}:v1")
    client = Client(registry.host, repository, Settings(), push=True)
    return RegistrySink(client, reference, chunk=CHUNK, journal=journal)


def image_of(data: bytes) -> tuple[bytes, bytes, tuple[Descriptor, ...]]:
    layer = Descriptor(OCI_LAYER_TAR, Digest.of(data), len(data))
    config = b"{}"
    value = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": Descriptor(OCI_CONFIG, Digest.of(config), len(config)).to_json(),
        "layers": [layer.to_json()],
    }
    return json.dumps(value).encode(), config, (layer,)


def requests_in(registry: RegistryServer, method: str) -> int:
    return sum(
        f"http.request.method={method}" in line and "response completed" in line
        for line in registry.log.read_text().splitlines()
    )


def once(action: Callable[[], None], at: int) -> Callable[[int], None]:
    """Runs `action` the first time that `at` is reached."""
    done: list[int] = []

    def before(offset: int) -> None:
        if offset >= at and not done:
            done.append(offset)
            action()

    return before


def restart_soon(registry: RegistryServer) -> None:
    registry.kill()
    threading.Timer(1.0, registry.start).start()


def test_an_image_that_was_written_is_read_back_whole(registry: RegistryServer) -> None:
    manifest, config, layers = image_of(DATA)
    sink = sink_for(registry)
    assert not sink.has(DIGEST, len(DATA))
    moved: list[int] = []
    assert sink.put_blob(MemoryBlob(), moved.append) == DIGEST
    assert sum(moved) == len(DATA)
    described = sink.put_manifest(manifest, config, layers)
    source = open_source(parse_reference(f"{registry.host}/a/b:v1"))
    assert source.manifest("v1") == (described, manifest)
    assert source.manifest(str(described.digest)) == (described, manifest)
    assert b"".join(source.blob(layers[0]).read()) == DATA
    assert b"".join(source.blob(layers[0]).read(39 * MIB)) == DATA[39 * MIB :]
    assert sink_for(registry).has(DIGEST, len(DATA))
    assert requests_in(registry, "PATCH") == len(DATA) // CHUNK + 1  # and one for the config


def test_an_empty_blob_is_taken(registry: RegistryServer) -> None:
    assert sink_for(registry).put_blob(MemoryBlob(b""), lambda _: None) == Digest.of(b"")


def test_a_blob_is_mounted_from_a_sister_repository(registry: RegistryServer) -> None:
    sink_for(registry, "base/image").put_blob(MemoryBlob(), lambda _: None)
    blob = MemoryBlob(digest=DIGEST)
    sink = open_sink(parse_reference(f"{registry.host}/a/b:v1"), mount_from=("base/image",))
    assert sink.put_blob(blob, lambda _: None) == DIGEST
    assert blob.given == 0
    assert sink.has(DIGEST, len(DATA))


def test_a_server_killed_inside_a_chunk_costs_the_blob_and_not_the_push(registry: RegistryServer) -> None:
    moved: list[int] = []
    blob = MemoryBlob(before=once(lambda: restart_soon(registry), 19 * MIB))
    assert sink_for(registry).put_blob(blob, moved.append) == DIGEST
    assert sum(moved) == len(DATA)
    assert sink_for(registry).has(DIGEST, len(DATA))


def test_a_server_killed_between_chunks_costs_nothing(registry: RegistryServer) -> None:
    blob = MemoryBlob(before=once(lambda: restart_soon(registry), 2 * CHUNK))
    assert sink_for(registry).put_blob(blob, lambda _: None) == DIGEST
    assert requests_in(registry, "POST") == 1
    assert blob.given <= len(DATA) + MIB


class Killed(BaseException):
    """Nothing may catch it, as nothing catches a kill."""


def test_a_push_killed_between_chunks_goes_on_in_its_session(
    registry: RegistryServer, tmp_path: Path
) -> None:
    def kill() -> None:
        raise Killed

    sink = sink_for(registry, journal=tmp_path / "journal")
    with pytest.raises(Killed):
        sink.put_blob(MemoryBlob(before=once(kill, 3 * CHUNK)), lambda _: None)
    sink.close()
    registry.kill()
    registry.start()
    sent = requests_in(registry, "PATCH")
    again = sink_for(registry, journal=tmp_path / "journal")
    assert again.put_blob(MemoryBlob(), lambda _: None) == DIGEST
    assert requests_in(registry, "POST") == 1
    assert requests_in(registry, "PATCH") - sent == 2


def test_a_process_killed_at_any_time_is_followed_by_one_that_succeeds(
    registry: RegistryServer, tmp_path: Path
) -> None:
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]!r}
from pathlib import Path
from e2e.test_registry import *
class Server: host = {registry.host!r}
def slow(offset):
    print(offset, flush=True)
    time.sleep(0.01)
sink_for(Server, journal=Path({str(tmp_path / "journal")!r})).put_blob(MemoryBlob(before=slow), lambda _: None)
"""
    for stop_at in (11, 26, 33):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout
        for line in process.stdout:
            if int(line) >= stop_at * MIB:
                os.kill(process.pid, signal.SIGKILL)
                break
        process.wait(20)
        assert process.returncode == -signal.SIGKILL
        process.stdout.close()
    assert not sink_for(registry).has(DIGEST, len(DATA))
    assert sink_for(registry, journal=tmp_path / "journal").put_blob(MemoryBlob(), lambda _: None) == DIGEST
    assert sink_for(registry).has(DIGEST, len(DATA))


def test_a_server_that_stays_away_is_an_error_and_not_a_hang(registry: RegistryServer) -> None:
    sink = sink_for(registry)
    sink._client.patience = type(sink._client.patience)(attempts=2, sleep=lambda _: None)
    began = time.monotonic()
    with pytest.raises(RegistryError, match=r"nothing answers|cut"):
        sink.put_blob(MemoryBlob(before=once(registry.kill, 5 * MIB)), lambda _: None)
    assert time.monotonic() - began < 30


def test_a_blob_lost_before_the_manifest_is_noticed(registry: RegistryServer) -> None:
    manifest, config, layers = image_of(DATA)
    sink = sink_for(registry)
    sink.put_blob(MemoryBlob(), lambda _: None)
    shutil.rmtree(registry.root / "data/docker/registry/v2/repositories/a/b/_layers/sha256" / DIGEST.hex)
    with pytest.raises(RegistryError, match="a blob of the image is not in the registry"):
        sink.put_manifest(manifest, config, layers)
    with pytest.raises(RegistryError, match="is not in the registry, or no longer"):
        sink_for(registry).put_manifest(manifest, config, layers)


def test_a_registry_with_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with RegistryServer(tmp_path / "registry", login=LOGIN) as server:
        reference = parse_reference(f"{server.host}/a/b:v1")
        with pytest.raises(RegistryError, match=f"docker login {server.host}"):
            open_sink(reference).put_blob(MemoryBlob(), lambda _: None)
        secret = base64.b64encode(f"{LOGIN[0]}:{LOGIN[1]}".encode()).decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {server.host: {"auth": secret}}}))
        manifest, config, layers = image_of(DATA)
        sink = open_sink(reference)
        assert sink.put_blob(MemoryBlob(), lambda _: None) == DIGEST
        described = sink.put_manifest(manifest, config, layers)
        assert open_source(reference).manifest("v1") == (described, manifest)
        wrong = base64.b64encode(b"user:wrong-password").decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {server.host: {"auth": wrong}}}))
        with pytest.raises(RegistryError, match="docker login") as raised:
            open_source(reference).manifest("v1")
    assert "wrong-password" not in str(raised.value)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", path], capture_output=True
    ).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_at_the_registry_is_told_as_that(small_disk: Path) -> None:
    with RegistryServer(small_disk / "registry") as server:
        blob = MemoryBlob()
        with pytest.raises(DuopackError, match="disk is full") as raised:
            sink_for(server).put_blob(blob, lambda _: None)
    assert "free space at the registry" in str(raised.value)
    assert blob.given < len(DATA)
