"""Images judged where they lie: ours are sound, and each kind of damage has its finding."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from support.images import (
    DIRECTORY,
    TAG,
    base_digest,
    gzipped,
    image_of,
    lock_of,
    member,
    model_files,
    our_image,
    tar_of,
    tar_with,
    weights_of,
)
from support.oci_memory import MemorySource

from pipeline.errors import DuopackError
from pipeline.oci.digest import Digest
from pipeline.oci.limits import DEFAULT, Limits
from pipeline.oci.model import OCI_INDEX, OCI_MANIFEST
from pipeline.stages.inside.image import Asking
from pipeline.stages.verify.finding import Finding, lines
from pipeline.stages.verify.report import Report, verify

INDEX = "model.safetensors.index.json"
N9 = "models/scripts/n9.sh"
FIRST = "model.safetensors-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model") / "Tiny"


@pytest.fixture(scope="module")
def tiny(directory: Path) -> dict[str, bytes]:
    return model_files(directory)


def judged(source: MemorySource, *, deep: bool = False, **more) -> Report:
    [report] = verify(source, TAG, Asking(deep=deep), **more)
    return report


def ids(report: Report, *severities: str) -> set[str]:
    return {one.id for one in report.findings if one.severity in (severities or ("error", "warning"))}


def only(report: Report, id_: str) -> Finding:
    [found] = [one for one in report.findings if one.id == id_]
    assert found.mend
    return found


@pytest.mark.parametrize("deep", [False, True])
def test_an_image_of_ours_is_sound(tiny, directory, deep):
    report = judged(our_image(tiny), deep=deep, lock=lock_of(directory, base_digest()), locked=True)
    assert ids(report) == set(), "\n".join(lines(report.findings))
    assert report.is_sound
    assert report.layers == 3
    assert (report.base_layers, report.base_told_by) == (1, "history")
    [model] = report.models
    assert model.summary
    assert model.summary.files == (FIRST, FIRST.replace("00001-of", "00002-of"))
    assert model.directory.key == "tiny"
    assert {one.id for one in report.findings} == (set() if deep else {"unread"})


def test_only_headers_are_read_of_large_weights(tiny):
    big = {**tiny, "mtp.bin": b"\1" * (50 << 20)}
    report = judged(our_image(big))
    assert report.is_sound
    assert report.read < 2 << 20


@pytest.mark.parametrize(
    ("change", "id_"),
    [
        (lambda files: files.pop(f"{DIRECTORY}/{FIRST}"), "weights"),
        (lambda files: files.pop(f"{DIRECTORY}/config.json"), "weights"),
        (lambda files: files.__setitem__(f"{DIRECTORY}/config.json", (0o644, b"{")), "weights"),
        (lambda files: files.__setitem__(f"{DIRECTORY}/{FIRST}", (0o644, weights_of()[:-9])), "weights"),
        (lambda files: files.__setitem__(f"{DIRECTORY}/x.safetensors", (0o644, weights_of())), "weights"),
        (lambda files: files.__setitem__("models/launch.json", (0o644, b"{}")), "launch-broken"),
        (lambda files: files.__setitem__("models/launch.json", (0o644, b"[" * 9999)), "launch-broken"),
        (lambda files: files.pop("models/launch.json"), "launch-missing"),
        (lambda files: files.pop("models/scripts/n9.sh"), "script-missing"),
        (lambda files: files.pop("models/scripts/healthcheck.sh"), "script-missing"),
        (lambda files: files.update({N9: (0o644, files[N9][1])}), "script-mode"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("deep", [False, True])
def test_each_damage_is_an_error_with_a_mend(tiny, change, id_, deep):
    report = judged(our_image(tiny, change_files=change), deep=deep)
    assert id_ in ids(report, "error"), "\n".join(lines(report.findings))
    assert not report.is_sound
    assert all(one.sentence and one.mend for one in report.findings)


def edit(path: str, old: bytes, new: bytes):
    def change(files):
        mode, data = files[path]
        assert old in data
        files[path] = (mode, data.replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "id_", "says"),
    [
        (edit("models/scripts/n9.sh", b"TP=${TP:-2}", b"TP=${TP:-4}"), "script-setting", "its TP is '4'"),
        (edit("models/scripts/n9.sh", b"PORT=${PORT:-", b"PORT=${PORT:-1"), "script-setting", "its PORT is"),
        (
            edit("models/scripts/n9.sh", b"--max-model-len", b"--max-model-length"),
            "option",
            "--max-model-length",
        ),
        (edit("models/launch.json", b'"default": "n9"', b'"default": "n8"'), "launch-default", "'n8'"),
        (edit("models/launch.json", b'"port": 12', b'"port": 13'), "label", "port"),
        (edit("models/launch.json", b'"n9"', b'"n9\\u001b[31m"'), "label", "default-profile"),
    ],
)
def test_what_launch_json_says_is_held_against_scripts_and_labels(tiny, change, id_, says):
    report = judged(our_image(tiny, change_files=change))
    found = [one for one in report.findings if one.id == id_]
    assert found, "\n".join(lines(report.findings))
    assert any(says in one.sentence for one in found)
    assert all(one.sentence.isprintable() for one in report.findings)


def test_a_script_that_somebody_rewrote_is_judged_as_any_script(tiny):
    script = b"#!/bin/bash\nexport X=1\nexec vllm serve /models/Tiny --no-such-option 1 --port 1\n"
    report = judged(
        our_image(tiny, change_files=lambda f: f.__setitem__("models/scripts/n9.sh", (0o755, script)))
    )
    assert {"script-changed", "option"} <= ids(report)
    assert "--no-such-option" in only(report, "option").sentence


@pytest.mark.parametrize(
    ("change", "id_"),
    [
        (lambda c: c["config"].update(Cmd=["bash"]), "command"),
        (lambda c: c["config"].pop("Healthcheck"), "health"),
        (lambda c: c["config"].pop("ExposedPorts"), "port"),
        (lambda c: c["config"]["Labels"].update({"io.duopack.served-name": "other"}), "label"),
        (lambda c: c["config"]["Labels"].update({"io.duopack.launch": "{}"}), "label-launch"),
        (lambda c: c["config"]["Labels"].update({"io.duopack.launch": "[" * 9999}), "label-launch"),
        (lambda c: c["config"].update(Env=["HF_TOKEN=hf_abcdef"]), "secret"),
        (lambda c: c["config"].update(Env=["REGISTRY_PASSWORD=x1"]), "secret"),
    ],
)
def test_the_config_is_held_against_launch_json(tiny, change, id_):
    report = judged(our_image(tiny, change_config=change))
    assert id_ in ids(report), "\n".join(lines(report.findings))
    assert "hf_abcdef" not in json.dumps([str(one) for one in report.findings])


@pytest.mark.parametrize(
    "config",
    [
        {"config": None}, {"config": []}, {"config": {"Labels": [], "Env": {}, "Cmd": "x", "Healthcheck": 3}},
        {"config": {"Labels": {"io.duopack.x": None}, "Env": [1, None], "ExposedPorts": []}},
        {"history": 5}, {"history": [None, {"empty_layer": "x"}]}, {"rootfs": None}, {"rootfs": {"diff_ids": 4}},
        {"os": 3, "architecture": None}, {"rootfs": {"diff_ids": [None]}},
    ],
)  # fmt: skip
def test_a_malformed_config_gives_findings_and_no_traceback(config):
    source = image_of(tar_of({"models/m/config.json": b"{}", "models/m/a.safetensors": weights_of()}))
    [(_, data)] = {source.manifests[TAG]}
    manifest = json.loads(data)
    document = json.loads(source.blobs[manifest["config"]["digest"]]) | config
    manifest["config"] = source.add_blob(json.dumps(document).encode(), manifest["config"]["mediaType"])
    source.add_manifest(manifest, TAG)
    assert all(one.sentence for one in judged(source).findings)


# --- The lock ---------------------------------------------------------------------------------------------------


def test_a_changed_byte_is_found_by_reading_every_byte_only(tiny, directory):
    data = bytearray(tiny[FIRST])
    data[-1] ^= 1
    source = our_image({**tiny, FIRST: bytes(data)})
    lock = lock_of(directory, base_digest())
    assert judged(source, lock=lock).is_sound
    report = judged(source, lock=lock, deep=True)
    assert ids(report) == {"lock-sha256"}
    assert only(report, "lock-sha256").severity == "error"


@pytest.mark.parametrize(
    ("change", "id_"),
    [
        (lambda f: f.__setitem__(f"{DIRECTORY}/tokenizer.json", (0o644, b"{ }")), "lock-size"),
        (lambda f: f.pop(f"{DIRECTORY}/tokenizer.json"), "lock-missing"),
        (lambda f: f.__setitem__(f"{DIRECTORY}/notes.txt", (0o644, b"x")), "lock-extra"),
    ],
)
def test_differences_from_the_lock_are_warnings_and_errors_when_asked(tiny, directory, change, id_):
    source = our_image(tiny, change_files=change)
    lock = lock_of(directory, base_digest())
    assert only(judged(source, lock=lock), id_).severity == "warning"
    assert only(judged(source, lock=lock, locked=True), id_).severity == "error"


def test_another_base_than_the_locks_and_a_lock_without_the_model(tiny, directory):
    lock = lock_of(directory, "sha256:" + "0" * 64)
    assert "lock-base" in ids(judged(our_image(tiny), lock=lock), "warning")
    absent = judged(our_image(tiny), lock=replace(lock, models={}, bases={}), locked=True)
    assert ids(absent, "error") == {"lock-absent"}


# --- Images of others --------------------------------------------------------------------------------------------


def foreign(tiny, pack=gzipped, **more) -> MemorySource:
    """As `docker build` makes it: a base, one COPY of weights, a script."""
    weights = tar_of({f"opt/weights/tiny/{name}": data for name, data in tiny.items()})
    script = b"vllm serve /opt/weights/tiny \\\n  --port 12320 --tool-call-parser qwen3_code\n"
    return image_of(
        gzipped(tar_of({"etc/os-release": b"x"})),
        pack(weights),
        gzipped(tar_of({"start.sh": script})),
        **more,
    )


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("pack", [gzipped, lambda tar: tar])
def test_an_image_of_copied_weights_is_understood(tiny, pack, deep):
    report = judged(foreign(tiny, pack), deep=deep)
    [model] = report.models
    assert model.directory.path == "opt/weights/tiny"
    assert model.summary
    assert ids(report) == {"option"}
    assert only(report, "option").where == "/start.sh"
    assert report.base_told_by == "guess"


def test_a_large_compressed_layer_is_begun_and_said_to_be_unread(tiny):
    limits = replace(DEFAULT, whole=1000, peek=1 << 20)
    [report] = verify(foreign(tiny), TAG, Asking(limits=limits))
    notes = ids(report, "note")
    assert {"unread", "weights-unread"} <= notes
    assert ids(report, "error") == {"option"}
    assert "--deep reads all" in only(report, "unread").sentence
    [deep] = verify(foreign(tiny), TAG, Asking(limits=limits, deep=True))
    assert deep.models[0].summary
    assert ids(deep, "note", "error") == {"option"}


def test_shards_are_held_to_their_number_of_ranks():
    def shards(ranks, parts=(0,), **extra):
        files = {
            f"m/TP{ranks}/model-rank-{r}-part-{p}.safetensors": weights_of()
            for r in range(ranks)
            for p in parts
        }
        return image_of(tar_of(files | {f"m/TP{ranks}/config.json": b"{}"} | extra))

    sound = judged(shards(2))
    assert sound.models[0].summary
    assert sound.models[0].summary.ranks == 2
    assert {"shards-no-plan"} <= {one.id for one in sound.findings}
    broken = tar_of({"m/config.json": b"{}", "m/model-rank-1-part-0.safetensors": weights_of()})
    assert "rank 0 of 2 has no weights" in only(judged(image_of(broken)), "weights").sentence


def test_a_wrong_total_in_an_index_is_only_a_warning(tiny):
    index = json.loads(tiny[INDEX])
    index["metadata"]["total_size"] += 1
    report = judged(our_image({**tiny, INDEX: json.dumps(index).encode()}))
    assert report.is_sound
    assert "total_size" in only(report, "index-total").sentence
    assert report.models[0].summary


# --- Files --------------------------------------------------------------------------------------------------------


def test_copies_removals_and_leftovers_are_weighed():
    big = {
        "models/m/a.bin": bytes(2 << 20),
        "models/m/config.json": b"{}",
        "models/m/w.safetensors": weights_of(),
    }
    left = {
        "models/m/.msc": b"x", "models/m/._____temp/part": b"xx", "models/m/b.safetensors.incomplete": b"x" * 5,
        "root/.cache/huggingface/hub/models--a--b/blobs/0": b"x" * 7, "models/m/.git/config": b"g",
    }  # fmt: skip
    copied = tar_with((member("models/m/a.bin", mode=0o755), bytes(2 << 20)))
    removed = tar_of({"models/m/.wh.a.bin": b""})
    report = judged(image_of(tar_of(big), copied, removed, tar_of(left)))
    assert {one.id: one.where for one in report.findings if one.id == "removed"} == {
        "removed": "/models/m/a.bin"
    }
    assert "copy-up" not in ids(report)  # it is gone in the end, both times
    assert {one.where for one in report.findings if one.id == "leftover"} == {
        "/models/m/.msc", "/models/m/._____temp", "/models/m/b.safetensors.incomplete",
        "/root/.cache/huggingface", "/models/m/.git",
    }  # fmt: skip


def test_a_chmod_in_a_later_layer_is_a_copy_up():
    files = {"m/config.json": b"{}", "m/w.safetensors": weights_of(size=1 << 20)}
    again = tar_with((member("m/w.safetensors", mode=0o755), files["m/w.safetensors"]))
    found = only(judged(image_of(tar_of(files), again)), "copy-up")
    assert "2 MiB of it lie in layer 0, and layer 1 has the whole file again" in found.sentence


def test_modes_and_links_of_models():
    tar = tar_with(
        (member("m/config.json", mode=0o600), b"{}"),
        (member("m/w.safetensors", mode=0o666), weights_of()),
        member("m/gone", b"2", linkname="nowhere"),
        member("m/out", b"2", linkname="../../../etc/passwd"),
        (member("elsewhere"), b"x"),
        member("m/away", b"2", linkname="/elsewhere"),
    )
    report = judged(image_of(tar))
    assert {"mode-closed", "mode-open", "link-broken", "link-outside", "link-leaves"} <= ids(report)


def test_weights_behind_links_are_read_as_a_container_would():
    tar = tar_with(
        (member("c/blobs/1"), b"{}"),
        (member("c/blobs/2"), weights_of()),
        member("c/snapshots/x/config.json", b"2", linkname="../../blobs/1"),
        member("c/snapshots/x/model.safetensors", b"2", linkname="../../blobs/2"),
    )
    [model] = judged(image_of(tar)).models
    assert model.directory.path == "c/snapshots/x"
    assert model.summary


# --- Documents ----------------------------------------------------------------------------------------------------


def test_a_layer_that_is_not_its_diff_id_is_found_at_once():
    tar = tar_of({"x": b"1"})
    assert "diff-id" in ids(judged(image_of((tar, tar + bytes(512)))), "error")
    packed = gzipped(tar)[0]
    assert "diff-id" not in ids(judged(image_of((packed, b"other"))), "error")
    assert "diff-id" in ids(judged(image_of((packed, b"other")), deep=True), "error")


def test_a_layer_whose_bytes_are_not_its_digest_is_found_by_reading_them(tiny):
    source = our_image(tiny)
    manifest = json.loads(source.manifests[TAG][1])
    digest = manifest["layers"][1]["digest"]
    data = bytearray(source.blobs[digest])
    data[len(data) // 2] ^= 1
    source.blobs[digest] = bytes(data)
    assert "layer-digest" in ids(judged(source, deep=True), "error")


def test_a_config_with_other_bytes_than_its_digest_is_refused(tiny):
    source = our_image(tiny)
    manifest = json.loads(source.manifests[TAG][1])
    source.blobs[manifest["config"]["digest"]] += b" "
    report = judged(source)
    assert not report.is_sound
    assert "sha256" in only(report, "image").sentence


def test_too_many_layers_the_same_layer_twice_and_mixed_families():
    tar = tar_of({"x": bytes(9000)})
    assert {"layers-many", "layer-twice"} <= ids(judged(image_of(*[tar] * 121)))
    source = image_of(tar)
    manifest = json.loads(source.manifests[TAG][1])
    manifest["layers"][0]["mediaType"] = "application/vnd.docker.image.rootfs.diff.tar.gzip"
    source.add_manifest(manifest, TAG)
    assert {"manifest-mixed", "layer-type"} <= ids(judged(source))


def test_each_image_of_an_index_is_judged_and_one_when_asked(tiny):
    source = our_image(tiny)
    arm = {"mediaType": OCI_MANIFEST, "digest": str(Digest.of(source.manifests[TAG][1])), "size": 1,
           "platform": {"os": "linux", "architecture": "arm64"}}  # fmt: skip
    other = image_of(tar_of({"x": b""}), source=source, architecture="amd64")
    amd = {**arm, "digest": str(Digest.of(other.manifests[TAG][1])),
           "platform": {"os": "linux", "architecture": "riscv64"}}  # fmt: skip
    source.add_manifest({"schemaVersion": 2, "manifests": [arm, amd]}, "both", media_type=OCI_INDEX)
    first, second = verify(source, "both", Asking())
    assert first.is_sound
    assert "platform" in ids(second, "error")
    [only_one] = verify(source, "both", Asking(platform="linux/arm64"))
    assert only_one.digest == first.digest


def test_another_platform_than_was_asked_for_is_an_error(tiny):
    [report] = verify(our_image(tiny), TAG, Asking(platform="linux/amd64"))
    assert "platform" in ids(report, "error")


def test_an_image_without_weights_is_said_to_be_one():
    assert "no-weights" in ids(judged(image_of(tar_of({"etc/x": b""}))))


def test_the_base_given_by_name_tells_its_layers(tiny):
    source = our_image(tiny)
    [report] = verify(source, TAG, Asking(base=(source, "base")))
    assert (report.base_layers, report.base_told_by) == (1, "manifest")
    other = image_of(tar_of({"etc/other": b""}))
    [stranger] = verify(source, TAG, Asking(base=(other, TAG)))
    assert "base-other" in ids(stranger, "error")


def test_no_manifest_is_an_error_and_not_a_report():
    source = MemorySource()
    source.add_manifest({"schemaVersion": 1}, TAG)
    with pytest.raises(DuopackError, match="schemaVersion"):
        verify(source, TAG, Asking())


def test_many_findings_of_a_kind_are_summed_up_for_people():
    many = [Finding("x", "error", f"number {n}") for n in range(30)]
    shown = lines(many)
    assert len(shown) == 6
    assert "and 25 more" in shown[-1]


def test_every_finding_is_explained_in_the_documentation():
    root = Path(__file__).parents[2]
    explained = (root / "docs/verify.md").read_text("utf-8")
    source = "".join(path.read_text("utf-8") for path in (root / "pipeline/stages/verify").glob("*.py"))
    source += (root / "pipeline/oci/contents.py").read_text("utf-8")
    found = set(re.findall(r'(?:Finding|of_error|of_unread|self\.fault)\(\s*"([a-z0-9-]+)"', source))
    found |= set(re.findall(r'"((?:layer|entry)-[a-z-]+)"', source))
    assert len(found) > 40
    assert {
        one for one in found if f"`{one}`" not in explained and not one.startswith(("shards-", "limit-"))
    } == set()
    for limit in fields(Limits):
        assert f"`{limit.name}`" in explained
