"""Reading from registries: what comes is checked, whatever the registry says of it."""

from __future__ import annotations

import json
import random

import pytest
from support.fake_registry import BASIC, FakeRegistry, Fault, Handler

from pipeline.errors import DuopackError
from pipeline.oci.digest import Digest
from pipeline.oci.model import MAX_MANIFEST, OCI_INDEX, OCI_LAYER_TAR, OCI_MANIFEST, Descriptor
from pipeline.oci.registry.client import Client
from pipeline.oci.registry.failures import RegistryError
from pipeline.oci.registry.patience import Patience
from pipeline.oci.registry.settings import Settings
from pipeline.oci.registry.source import RegistrySource

DATA = random.Random(1).randbytes(3_000_000)
MANIFEST = json.dumps({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "layers": []}).encode()


def source_for(fake: FakeRegistry) -> RegistrySource:
    return RegistrySource(Client(fake.host, "a/b", Settings(), patience=Patience(sleep=lambda _: None)))


def descriptor(data: bytes, size: int | None = None) -> Descriptor:
    return Descriptor(OCI_LAYER_TAR, Digest.of(data), len(data) if size is None else size)


def read(fake: FakeRegistry, wanted: Descriptor, offset: int = 0) -> bytes:
    return b"".join(source_for(fake).blob(wanted).read(offset))


def test_a_manifest_is_read_by_tag_and_by_digest_and_asks_for_every_type() -> None:
    with FakeRegistry(manifests={"v1": (OCI_MANIFEST, MANIFEST)}) as fake:
        fake.manifests[str(Digest.of(MANIFEST))] = fake.manifests["v1"]
        expected = (Descriptor(OCI_MANIFEST, Digest.of(MANIFEST), len(MANIFEST)), MANIFEST)
        assert source_for(fake).manifest("v1") == expected
        assert source_for(fake).manifest(str(Digest.of(MANIFEST))) == expected
    for part in ("oci.image.index", "oci.image.manifest", "manifest.list.v2", "distribution.manifest.v2"):
        assert part in fake.seen[0].headers["Accept"]


@pytest.mark.parametrize(
    ("media_type", "body", "says"),
    [
        (OCI_INDEX, MANIFEST, "calls itself"),
        ("application/vnd.docker.distribution.manifest.v1+json", b'{"schemaVersion":1}', "of a type"),
        ("application/json", b"not json", "of a type"),
        (OCI_MANIFEST, b"[" * 100_000, ""),
        (OCI_MANIFEST, b" " * (MAX_MANIFEST + 1), "larger than 4 MiB"),
    ],
)
def test_a_manifest_that_is_not_one_is_refused(media_type: str, body: bytes, says: str) -> None:
    with FakeRegistry(manifests={"v1": (media_type, body)}) as fake:
        if not says:
            assert source_for(fake).manifest("v1")[1] == body
            return
        with pytest.raises(RegistryError, match=says):
            source_for(fake).manifest("v1")


def test_a_manifest_of_another_digest_is_refused() -> None:
    wanted = str(Digest.of(b"something else"))
    lie = Fault(
        "GET",
        "manifests/v2",
        status=200,
        body=MANIFEST,
        headers={"Content-Type": OCI_MANIFEST, "Docker-Content-Digest": wanted},
    )
    with FakeRegistry(manifests={wanted: (OCI_MANIFEST, MANIFEST)}, faults=[lie]) as fake:
        with pytest.raises(RegistryError, match="the manifest that came is"):
            source_for(fake).manifest(wanted)
        with pytest.raises(RegistryError, match="the manifest that came is"):
            source_for(fake).manifest("v2")


def test_an_unknown_tag_and_a_web_site_are_told_apart() -> None:
    page = Fault("GET", "manifests/page", status=200, body=b"<!DOCTYPE html><p>hello")
    with FakeRegistry(faults=[page]) as fake:
        with pytest.raises(RegistryError, match="knows no such thing") as raised:
            source_for(fake).manifest("v9")
        assert raised.value.status == 404
        with pytest.raises(RegistryError, match="web page, not a registry"):
            source_for(fake).manifest("page")


def test_a_blob_is_read_whole_or_from_an_offset() -> None:
    with FakeRegistry() as fake:
        fake.add_blob(DATA)
        assert read(fake, descriptor(DATA)) == DATA
        assert read(fake, descriptor(DATA), 1_234_567) == DATA[1_234_567:]
        assert read(fake, descriptor(DATA), len(DATA)) == b""


def test_a_registry_without_ranges_is_read_from_the_start() -> None:
    def whole(handler: Handler) -> None:
        handler.answer(200, DATA)

    with FakeRegistry(faults=[Fault("GET", "blobs", act=whole)]) as fake:
        assert read(fake, descriptor(DATA), 2_000_001) == DATA[2_000_001:]


def test_a_cut_download_goes_on_where_it_broke() -> None:
    def cut(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(DATA)))
        handler.end_headers()
        handler.wfile.write(DATA[:2_000_000])
        handler.wfile.flush()
        handler.close_connection = True

    with FakeRegistry(faults=[Fault("GET", "blobs", act=cut)]) as fake:
        fake.add_blob(DATA)
        assert read(fake, descriptor(DATA)) == DATA
    assert fake.seen[1].headers["Range"].startswith("bytes=")
    assert fake.seen[1].headers["Range"] != "bytes=0-"


def test_a_download_that_is_cut_again_and_again_ends_in_an_error() -> None:
    faults = [Fault("GET", "blobs", times=50, cut=0)]
    with FakeRegistry(faults=faults) as fake, pytest.raises(RegistryError, match="cut"):
        read(fake, descriptor(DATA))
    assert len(fake.seen) < 30


@pytest.mark.parametrize("body", [DATA[:-1] + b"?", DATA[:-5], DATA + b"more", b""])
def test_other_bytes_than_the_digests_are_refused(body: bytes) -> None:
    faults = [Fault("GET", "blobs", times=50, status=200, body=body)]
    with FakeRegistry(faults=faults) as fake, pytest.raises(DuopackError):
        read(fake, descriptor(DATA))


def test_a_size_that_is_not_the_blobs_is_not_believed() -> None:
    with FakeRegistry() as fake:
        fake.add_blob(DATA)
        for size in (len(DATA) - 1, len(DATA) + 1):
            with pytest.raises(DuopackError):
                read(fake, descriptor(DATA, size))


def test_more_bytes_than_promised_are_not_handed_on() -> None:
    with FakeRegistry() as fake:
        fake.add_blob(DATA)
        blob = source_for(fake).blob(descriptor(DATA, 1_500_000))
        given: list[int] = []
        with pytest.raises(DuopackError):
            given.extend(len(piece) for piece in blob.read())
    assert sum(given) <= 1_500_000


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_redirect_to_another_host_does_not_carry_the_login(host: str, tmp_path) -> None:
    with FakeRegistry() as store, FakeRegistry(login="basic") as fake:
        digest = store.add_blob(DATA)
        target = f"http://{host}:{store.host.rpartition(':')[2]}/v2/a/b/blobs/{digest}"

        def redirect(handler: Handler) -> None:
            if handler._authorized():
                handler.answer(307, Location=target)

        fake.faults.append(Fault("GET", "blobs", times=9, act=redirect))
        login = tmp_path / "config.json"
        login.write_text(json.dumps({"auths": {fake.host: {"auth": BASIC.removeprefix("Basic ")}}}))
        client = Client(fake.host, "a/b", Settings(auth_files=(login,)))
        assert b"".join(RegistrySource(client).blob(descriptor(DATA)).read()) == DATA
    assert fake.seen[-1].headers["Authorization"] == BASIC
    assert all("Authorization" not in one.headers for one in store.seen)


@pytest.mark.parametrize(
    "location", ["/v2/a/b/blobs/x", "file:///etc/passwd", "", "http://[bad", "http://h:99999/"]
)
def test_redirects_without_end_or_to_nowhere_are_errors(location: str) -> None:
    faults = [Fault("GET", "blobs", times=99, status=302, headers={"Location": location})]
    with FakeRegistry(faults=faults) as fake, pytest.raises(RegistryError, match="redirects"):
        read(fake, descriptor(DATA))
    assert len(fake.seen) < 10


def test_tags_are_read_page_by_page() -> None:
    with FakeRegistry(manifests={f"v{n}": (OCI_MANIFEST, MANIFEST) for n in range(5)}) as fake:
        assert source_for(fake).tags() == ("v0", "v1", "v2", "v3", "v4")
    assert fake.count("GET", "tags") == 3


def test_a_list_of_tags_that_never_ends_is_left() -> None:
    count = 0

    def page(handler: Handler) -> None:
        nonlocal count
        count += 1
        body = json.dumps({"tags": [f"t{count}"]}).encode()
        handler.answer(200, body, Link=f'</v2/a/b/tags/list?last={count}>; rel="next"')

    with FakeRegistry(faults=[Fault("GET", "tags", times=10_000, act=page)]) as fake:
        assert len(source_for(fake).tags()) == count <= 200


def test_a_list_of_tags_does_not_lead_to_another_host() -> None:
    with FakeRegistry() as other, FakeRegistry() as fake:
        headers = {"Link": f'<{other.url}/v2/a/b/tags/list>; rel="next"'}
        fake.faults.append(Fault("GET", "tags", status=200, body=b'{"tags":["a"]}', headers=headers))
        assert source_for(fake).tags() == ("a",)
    assert not other.seen


def test_text_from_a_registry_cannot_write_to_the_terminal() -> None:
    body = json.dumps({"errors": [{"code": "DENIED", "message": "\x1b[31mred\n" + "x" * 5000}]}).encode()
    faults = [Fault("GET", "manifests", status=403, body=body)]
    with FakeRegistry(faults=faults) as fake, pytest.raises(RegistryError) as raised:
        source_for(fake).manifest("v1")
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1000
