"""Images made to hurt whoever looks into them: bounded memory and time, and a finding instead of a traceback."""

from __future__ import annotations

import gzip
import json
import tarfile
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.images import TAG, gzipped, image_of, member, tar_of, tar_with, weights_of
from support.oci_memory import MemorySource

from pipeline.errors import DuopackError
from pipeline.oci.digest import Digest
from pipeline.oci.limits import DEFAULT, Limits
from pipeline.oci.model import OCI_INDEX
from pipeline.stages.inside.image import Asking, platforms, see
from pipeline.stages.inspect.parts import take_inventory
from pipeline.stages.verify.report import Report, verify

MEMORY = 200 << 20


@contextmanager
def bounded(seconds: float = 30, memory: int = MEMORY) -> Iterator[None]:
    """Memory that Python allocates beyond what is there already, and time."""
    tracemalloc.start()
    before, begun = tracemalloc.get_traced_memory()[0], time.monotonic()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] - before < memory
    finally:
        tracemalloc.stop()
    assert time.monotonic() - begun < seconds


def judged(source: MemorySource, *, deep: bool = False, limits: Limits = DEFAULT) -> Report:
    [report] = verify(source, TAG, Asking(deep=deep, limits=limits))
    [found] = platforms(source, TAG, None)
    take_inventory(see(source, TAG, found, Asking(deep=deep, limits=limits)))
    return report


def errors(report: Report) -> set[str]:
    return {one.id for one in report.findings if one.severity == "error"}


def bomb(size: int) -> bytes:
    """A gzip of so many zeros, made without holding them."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    parts = [packer.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return b"".join([*parts, packer.flush()])


def bomb_layer(size: int) -> bytes:
    """A gzip layer of one file of so many zeros."""
    info = member("models/m/zeros.bin")
    info.size = size
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    parts = [packer.compress(info.tobuf())]
    parts += [packer.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return b"".join([*parts, packer.flush()])


@pytest.mark.parametrize("deep", [False, True])
def test_a_zip_bomb_layer_ends_at_its_ratio(deep, monkeypatch):
    monkeypatch.setattr("pipeline.oci.unpack.RATIO_FREE", 32 << 20)
    packed = bomb_layer(300 << 20)
    with bounded():
        report = judged(image_of((packed, b"")), deep=deep)
    assert "limit-ratio" in errors(report)


def test_a_bomb_that_is_no_tar_ends_at_its_first_header():
    with bounded(5):
        assert "layer-broken" in errors(judged(image_of((bomb(16 << 20)[:-20], b"")), deep=True))


def test_the_sum_of_what_layers_unpack_to_is_bounded():
    layers = [gzipped(tar_of({f"f{n}": bytes(3 << 20) + bytes([n])})) for n in range(4)]
    report = judged(image_of(*layers), deep=True, limits=replace(DEFAULT, unpacked=8 << 20))
    assert "limit-unpacked" in errors(report)


def test_members_without_number_end_at_the_limit():
    one = member("x").tobuf()
    with bounded():
        report = judged(image_of(one * 12_000), limits=replace(DEFAULT, members=10_000))
    assert "limit-members" in errors(report)


def test_names_are_remembered_up_to_a_limit_and_the_rest_is_still_checked():
    tar = tar_with(*(member(f"f{n}") for n in range(300)), member("../../escape"))
    report = judged(image_of(tar), limits=replace(DEFAULT, kept=100))
    assert {"limit-kept", "entry-outside"} <= errors(report)
    report = judged(image_of(tar), limits=replace(DEFAULT, names=100))
    assert "limit-kept" in errors(report)


def test_time_is_bounded_also_for_a_place_that_drips():
    class Dripping(MemorySource):
        def blob(self, descriptor):
            blob = super().blob(descriptor)
            if descriptor.size < 5000:
                return blob

            class Slow(type(blob)):
                def read(self, offset=0):
                    for byte in self.data[offset:]:
                        time.sleep(0.01)
                        yield bytes([byte])

            return Slow(blob.data, blob.media_type, blob.promised)

    source = Dripping()
    image_of(gzipped(tar_of({"x": bytes(range(256)) * 400})), source=source)
    big = (gzip.compress(b"".join(bytes([n % 251]) * 7 for n in range(90_000)), 1), b"")
    image_of(big, source=source)
    with bounded(10):
        report = judged_verify(source, Asking(deep=True, limits=replace(DEFAULT, seconds=1.0)))
    assert errors(report) & {"limit-seconds", "layer-broken"}


def judged_verify(source: MemorySource, asking: Asking) -> Report:
    [report] = verify(source, TAG, asking)
    return report


@pytest.mark.parametrize("size", [1 << 42, 1 << 62, -1, "9", None, True, 1e300])
def test_absurd_sizes_in_a_manifest_are_refused_or_found(size):
    source = image_of(tar_of({"x": b"1"}))
    manifest = json.loads(source.manifests[TAG][1])
    manifest["layers"][0]["size"] = size
    source.add_manifest(manifest, TAG)
    with bounded(5):
        try:
            assert errors(judged(source))
        except DuopackError as error:
            assert "size" in str(error)  # noqa: PT017


def test_a_manifest_of_very_many_layers_is_looked_into_once_each():
    source = image_of(tar_of({"x": b"1"}))
    manifest = json.loads(source.manifests[TAG][1])
    manifest["layers"] *= 5_000
    source.add_manifest(manifest, TAG)
    with bounded(30):
        assert {"layers-many", "diff-ids"} <= errors(judged(source))


def test_indexes_that_go_round_or_on_and_on_are_refused():
    source = MemorySource()
    entry = {"mediaType": OCI_INDEX, "digest": "sha256:" + "1" * 64, "size": 10}
    data = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    source.manifests[entry["digest"]] = source.manifests[TAG] = (OCI_INDEX, data)
    with pytest.raises(DuopackError, match="nested too deeply"):
        verify(source, TAG, Asking())
    many = {"schemaVersion": 2, "manifests": [{**entry, "digest": f"sha256:{n:064}"} for n in range(5000)]}
    source.add_manifest(many, TAG, media_type=OCI_INDEX)
    with pytest.raises(DuopackError, match="the index has 5000 images"):
        verify(source, TAG, Asking())
    source.add_manifest({"schemaVersion": 2, "manifests": []}, TAG, media_type=OCI_INDEX)
    with pytest.raises(DuopackError, match="the index has 0 images"):
        verify(source, TAG, Asking())


@pytest.mark.parametrize(
    "value",
    [
        b"[" * 300_000,
        b'{"a":' * 100_000,
        b"[" + b"[]," * 2_000_000 + b"[]]",
        b'{"x": ' + b"9" * 100_000 + b"}",
        b'{"weight_map": {' + b",".join(b'"%d": 1' % n for n in range(50_000)) + b"}}",
        b"\xff\xfe{}",
        b'"\\ud800"',
        b"NaN",
    ],
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "duopack-shards.json"])
def test_json_bombs_are_findings(value, name):
    files = {"m/config.json": b"{}", "m/model-rank-0-part-0.safetensors": weights_of(), f"m/{name}": value}
    with bounded(30, 250 << 20):
        report = judged(image_of(gzipped(tar_of(files))))
    assert report.findings
    assert all(one.mend for one in report.findings)


def test_launch_json_of_any_kind_is_a_finding():
    for value in (
        b"[" * 300_000,
        b"{}",
        b"3",
        b'{"version": 1}',
        b'{"version": 1, "base": [], "models": 1}',
        bytes(2 << 20),
    ):
        report = judged(image_of(tar_of({"models/launch.json": value})))
        assert "launch-broken" in errors(report)


def test_headers_that_claim_much_are_not_read():
    header = (90_000_000).to_bytes(8, "little")
    sparse = member("m/w.safetensors")
    sparse.size = 95_000_000
    tar = tar_of({"m/config.json": b"{}"})[:1024] + sparse.tobuf() + header + bytes(95_000_000 - 8 + 512 * 2)
    with bounded(20, 400 << 20):
        report = judged(image_of(tar))
    assert "limit-document" in errors(report)


def test_tensors_without_number_are_bounded():
    entry = b'"%d":{"dtype":"U8","shape":[0,0,0,0,0,0,0,0],"data_offsets":[0,0]}'
    text = b"{" + b",".join(entry % n for n in range(300_000)) + b"}"
    tar = tar_of({"m/config.json": b"{}", "m/w.safetensors": len(text).to_bytes(8, "little") + text})
    for pack in (lambda data: data, gzipped):
        with bounded(60, 400 << 20):
            assert "limit-values" in errors(judged(image_of(pack(tar))))


def test_documents_together_are_bounded():
    files = {f"m{n}/config.json": b'{"x":"' + b"y" * (1 << 20) + b'"}' for n in range(12)}
    report = judged(image_of(gzipped(tar_of(files))), limits=replace(DEFAULT, documents=4 << 20))
    assert "limit-documents" in errors(report)


def test_entries_of_every_evil_kind_have_a_finding():
    tar = tar_with(
        member("../../etc/cron.d/x"), member("/etc/passwd"), member("a\x1b]0;x\x07"), member("d/" * 300),
        member("dev/sda", tarfile.BLKTYPE), member("p", tarfile.FIFOTYPE), member("odd", b"Z"),
        member("l", tarfile.SYMTYPE, linkname="../../../../root/.ssh"),
    )  # fmt: skip
    for layer in (tar, gzipped(tar)):
        report = judged(image_of(layer))
        found = {one.id for one in report.findings}
        assert {"entry-outside", "entry-absolute", "entry-unprintable", "entry-too-long", "entry-device",
                "entry-fifo", "entry-unknown", "link-outside"} <= found  # fmt: skip
        shown = "".join(f"{one.where}{one.sentence}" for one in report.findings)
        assert shown.isprintable()


def test_links_and_whiteouts_that_go_round_end():
    tar = tar_with(
        member("m/a.safetensors", tarfile.SYMTYPE, linkname="b.safetensors"),
        member("m/b.safetensors", tarfile.SYMTYPE, linkname="a.safetensors"),
        member("m/h", tarfile.LNKTYPE, linkname="m/h"),
        member("loop", tarfile.SYMTYPE, linkname="loop/loop"),
        member("x/.wh..wh..opq"), member(".wh."), member(".wh..wh."), member("y/.wh.../z"),
    )  # fmt: skip
    with bounded(10):
        report = judged(image_of(tar, tar))
    assert "link-broken" in errors(report)


def test_very_many_whiteouts_over_very_many_files_take_no_square_of_time():
    files = tar_with(*(member(f"d{n % 100}/f{n}") for n in range(6_000)))
    gone = tar_with(*(member(f"d{n % 100}/.wh.f{n}") for n in range(6_000)))
    with bounded(40):
        [found] = platforms(source := image_of(files, gone), TAG, None)
        inside = see(source, TAG, found, Asking())
    assert not list(inside.tree.files())


def test_hidden_bytes_behind_an_archive_are_found():
    tar = tar_of({"x": b"1"})
    report = judged(image_of(tar + b"secret data" * 100))
    assert "layer-trailing" in {one.id for one in report.findings}
    assert "layer-trailing" not in {one.id for one in judged(image_of(tar + bytes(9000))).findings}


def test_a_registry_that_cannot_give_a_blob_is_a_finding():
    source = image_of(tar_of({"x": b"1"}))
    layer = json.loads(source.manifests[TAG][1])["layers"][0]["digest"]

    class Failing(MemorySource):
        def blob(self, descriptor):
            if descriptor.digest == layer:
                raise DuopackError("it is gone", mend="push it again")
            return super().blob(descriptor)

    failing = Failing(source.blobs, source.manifests)
    report = judged(failing)
    assert "layer-unreadable" in errors(report)
    assert "it is gone" in str(report.findings[0])


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_damage_to_an_image_gives_a_report_or_a_sentence(data):
    files = {
        "models/m/config.json": b"{}",
        "models/m/a.safetensors": weights_of(),
        "models/launch.json": b"{}",
    }
    layer = tar_of(files)
    source = image_of(gzipped(layer) if data.draw(st.booleans()) else layer)
    for digest in list(source.blobs):
        damaged = bytearray(source.blobs[digest])
        for _ in range(data.draw(st.integers(0, 4))):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        cut = bytes(damaged[: data.draw(st.sampled_from([len(damaged), len(damaged) // 2, 1, 0]))])
        source.blobs[digest] = cut if data.draw(st.booleans()) else bytes(damaged)
    for deep in (False, True):
        report = judged_or_none(source, deep)
        if report and deep and report.is_sound:
            for digest, blob in source.blobs.items():
                assert Digest.of(blob) == digest


def judged_or_none(source: MemorySource, deep: bool) -> Report | None:
    try:
        return judged(source, deep=deep)
    except DuopackError:
        return None


@settings(max_examples=80, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=3)
       | st.dictionaries(st.sampled_from(["config", "Labels", "Env", "Cmd", "history", "rootfs", "diff_ids", "os",
                                          "architecture", "empty_layer", "Healthcheck", "Test"]), x, max_size=5),
                    max_leaves=20))  # fmt: skip
def test_any_config_gives_a_report_or_a_sentence(value):
    source = image_of(tar_of({"x": b"1"}))
    manifest = json.loads(source.manifests[TAG][1])
    manifest["config"] = source.add_blob(json.dumps(value).encode(), manifest["config"]["mediaType"])
    source.add_manifest(manifest, TAG)
    judged_or_none(source, False)


def test_an_empty_layer_and_an_empty_image_are_told_so():
    assert "layer-broken" in errors(judged(image_of(b"")))
    source = image_of()
    assert "layers-none" in errors(judged(source))
