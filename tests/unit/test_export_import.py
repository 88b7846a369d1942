"""`duopack export` and `duopack import` between layouts, archives and parts: no engine, no registry."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.archives import untar
from support.fake_registry import FakeRegistry
from support.hub import FaultyHub, isolate_clients
from support.project import Project, duopack, open_project, refused

from pipeline.commands.export import parse_size
from pipeline.errors import DuopackError, UsageError
from pipeline.oci.bundle_source import BundleSource
from pipeline.oci.digest import Digest
from pipeline.oci.documents import resolve
from pipeline.oci.layout import LayoutSource
from pipeline.oci.model import OCI_LAYER_TAR, Descriptor
from pipeline.oci.split import Parts, PartWriter
from pipeline.stages import export as export_stage


@pytest.fixture(scope="module")
def origin(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """`one` and `both` built once."""
    directory = tmp_path_factory.mktemp("origin")
    shutil.copytree(models, directory / "hub", copy_function=os.link)
    with FaultyHub(directory / "hub") as hub, pytest.MonkeyPatch.context() as patch:
        project = open_project(directory, hub, patch)
        for key in ("one", "both"):
            project.built(key)
        yield project


@pytest.fixture
def built(origin: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The same in a directory of the test's own."""
    shutil.copytree(origin.directory, tmp_path / "project", copy_function=os.link)
    isolate_clients(monkeypatch, origin.hub.url, tmp_path / "home")
    return Project(tmp_path / "project", origin.hub)


def export(project: Project, *arguments: str | Path) -> dict:
    ran = project.run("export", *arguments, "--json")
    assert ran.code == 0, ran.err
    return ran.json


def names_in(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        return [one.name for one in archive if one.isfile()]


def digest_of(layout: Path, tag: str = "latest") -> str:
    return str(LayoutSource(layout).manifest(tag)[0].digest)


def test_an_archive_is_docker_s_and_oci_s_and_holds_each_blob_once(built, tmp_path):
    made = export(built, "one", "both", tmp_path / "x.tar")
    with tarfile.open(tmp_path / "x.tar") as archive:
        content = {one.name: archive.extractfile(one).read() for one in archive if one.isfile()}
    assert len(content) == len(names_in(tmp_path / "x.tar"))
    for name, data in content.items():
        if name.startswith("blobs/sha256/"):
            assert hashlib.sha256(data).hexdigest() == name.rpartition("/")[2]
    one, both = json.loads(content["manifest.json"])
    assert one["RepoTags"] == ["tiny-one:stand-in-n1"]
    assert set(one["Layers"][:-1]) < set(both["Layers"])
    config = json.loads(content[one["Config"]])
    assert [f"sha256:{name.rpartition('/')[2]}" for name in one["Layers"]] == config["rootfs"]["diff_ids"]
    listed = json.loads(content["index.json"])["manifests"]
    assert [entry["digest"] for entry in listed] == [image["digest"] for image in made["images"]]
    assert listed[0]["annotations"]["io.containerd.image.name"] == "docker.io/library/tiny-one:stand-in-n1"
    assert made["sha256"] == hashlib.sha256((tmp_path / "x.tar").read_bytes()).hexdigest()
    assert made["size"] == (tmp_path / "x.tar").stat().st_size


def test_the_same_images_give_the_same_bytes_in_every_form(built, tmp_path):
    export(built, "one", "both", tmp_path / "a.tar")
    export(built, "one", "both", tmp_path / "b.tar")
    export(built, "one", "both", tmp_path / "parts", "--split", "1M")
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    parts = sorted((tmp_path / "parts").glob("images.tar.*"))
    assert len(parts) > 1
    assert {path.stat().st_size for path in parts[:-1]} == {1 << 20}
    assert b"".join(path.read_bytes() for path in parts) == (tmp_path / "a.tar").read_bytes()
    untar(tmp_path / "a.tar", tmp_path / "unpacked")
    export(built, "one", "both", tmp_path / "layout")
    for name in ("unpacked", "layout"):
        for key, one in zip(("one", "both"), LayoutSource(tmp_path / name).entries(), strict=True):
            assert one.digest == digest_of(built.work / key)


@pytest.mark.parametrize("form", ["archive", "parts", "layout"])
def test_what_was_exported_arrives_with_the_same_digests(built, tmp_path, form):
    place = {"archive": "x.tar", "parts": "parts", "layout": "layout"}[form]
    export(built, "one", "both", tmp_path / place, *(["--split", "1M"] if form == "parts" else []))
    with FakeRegistry() as registry:
        ran = built.run("import", tmp_path / place, "--under", f"{registry.host}/far", "--json")
        assert ran.code == 0, ran.err
        one, both = ran.json
        assert one["destination"] == f"docker://{registry.host}/far/tiny-one:stand-in-n1"
        assert [one["digest"], both["digest"]] == [digest_of(built.work / key) for key in ("one", "both")]
        again = built.run("import", tmp_path / place, "--under", f"{registry.host}/far", "--json")
    assert [(image["layers_sent"], image["sent"]) for image in again.json] == [(0, 0), (0, 0)]


def test_an_import_chooses_by_name_and_goes_to_a_layout(built, tmp_path):
    export(built, "one", "both", tmp_path / "x.tar")
    name = "both:stand-in-both"
    ran = built.run(
        "import", tmp_path / "x.tar", "--image", name, "--to", f"oci:{tmp_path}/there:v1", "--json"
    )
    assert ran.code == 0, ran.err
    assert digest_of(tmp_path / "there", "v1") == digest_of(built.work / "both")
    ran = built.run("import", tmp_path / "x.tar", "--to", f"oci:{tmp_path}/all")
    assert ran.code == 0, ran.err
    assert len(LayoutSource(tmp_path / "all").entries()) == 2
    refused(built.run("import", tmp_path / "x.tar", "--image", "three:1"), 2, "no image 'three:1'", name)
    refused(built.run("import", tmp_path / "x.tar", "--to", f"oci:{tmp_path}/all:v1"), 2, "cannot all go to")


def test_what_the_other_side_has_is_left_out_and_missed_by_name_when_it_has_not(built, tmp_path):
    built.profile()["max_model_len"] = 2048
    built.write()
    shutil.move(built.work / "one", tmp_path / "old")
    built.built("one")
    old = f"oci:{tmp_path}/old"
    made = export(built, "one", tmp_path / "x.tar", "--since", old)
    # All but the start scripts.
    assert made["images"][0]["left_out"] == made["images"][0]["layers"] - 1
    assert made["size"] < 100_000 < made["left_out"]
    new = digest_of(built.work / "one")
    ran = built.run("import", tmp_path / "x.tar", "--to", f"oci:{tmp_path}/there:new")
    refused(ran, 1, "2 of 3 layers", "neither in the export nor there", "it is built on oci:base:demo")
    assert not (tmp_path / "there").exists()
    assert built.run("publish", old, "--to", f"oci:{tmp_path}/there:old").code == 0
    assert built.run("import", tmp_path / "x.tar", "--to", f"oci:{tmp_path}/there:new").code == 0
    assert digest_of(tmp_path / "there", "new") == new


def test_a_layout_leaves_out_what_is_anywhere_in_the_other_image(built, tmp_path):
    made = export(built, "both", tmp_path / "more", "--since", "one")
    assert made["images"][0]["left_out"] == 2
    kept = {path.name for path in (tmp_path / "more" / "blobs" / "sha256").iterdir()}
    layers = {
        one.digest.hex for one in resolve(LayoutSource(built.work / "one"), "latest", None).manifest.layers
    }
    assert len(layers & kept) == 0
    with FakeRegistry() as registry:
        under = ("--under", f"{registry.host}/far")
        refused(built.run("import", tmp_path / "more", *under), 1, "2 of 4 layers")
        assert built.run("publish", "one", "--to", f"docker://{registry.host}/elsewhere/one:1").code == 0
        ran = built.run(
            "import", tmp_path / "more", *under, "--have", f"{registry.host}/elsewhere/one:1", "--json"
        )
        assert ran.code == 0, ran.err
        assert ran.json[0]["layers_sent"] == 2


def test_an_engine_needs_a_layer_that_lies_above_another_one(built, tmp_path):
    # `both` has the layers of `two` above those of `one`: an engine with `two` alone can use none but the base's.
    built.built("two")
    made = export(built, "both", tmp_path / "x.tar", "--since", "two")
    assert made["images"][0]["left_out"] == 1


def test_a_damaged_byte_anywhere_in_a_layer_is_found(built, tmp_path):
    export(built, "one", tmp_path / "parts", "--split", "1M")
    part = tmp_path / "parts" / "images.tar.002"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    ran = built.run("import", tmp_path / "parts", "--to", f"oci:{tmp_path}/there")
    refused(ran, 1, "other bytes than its digest says")
    assert not LayoutSource(tmp_path / "there").entries()


@pytest.mark.parametrize("lost", ["001", "002", "last"])
def test_a_missing_part_is_named(built, tmp_path, lost):
    export(built, "both", tmp_path / "parts", "--split", "1M")
    parts = sorted((tmp_path / "parts").glob("images.tar.*"))
    gone = parts[-1] if lost == "last" else tmp_path / "parts" / f"images.tar.{lost}"
    gone.unlink()
    refused(built.run("import", tmp_path / "parts"), 1, f"the part {gone.name} is missing")


def test_a_cut_off_archive_is_refused(built, tmp_path):
    export(built, "one", tmp_path / "x.tar")
    with (tmp_path / "x.tar").open("r+b") as file:
        file.truncate(2 << 20)
    refused(
        built.run("import", tmp_path / "x.tar", "--to", f"oci:{tmp_path}/there"),
        1,
        "beyond the end of the archive",
    )


def test_an_archive_of_the_builder_s_own_can_be_imported_too(built, tmp_path):
    assert built.run("publish", "one", "--to", f"docker-archive:{tmp_path}/a.tar:local/one:1").code == 0
    ran = built.run("import", tmp_path / "a.tar", "--to", f"oci:{tmp_path}/there", "--json")
    assert ran.code == 0, ran.err
    config = resolve(LayoutSource(tmp_path / "there"), "latest", None).manifest.config
    assert config.digest == resolve(LayoutSource(built.work / "one"), "latest", None).manifest.config.digest


def test_names_follow_the_catalog_the_directory_or_the_user(built, tmp_path, monkeypatch):
    assert built.run("publish", "one", "--to", f"oci:{tmp_path}/My Images:v1").code == 0
    assert (
        export(built, f"oci:{tmp_path}/My Images:v1", tmp_path / "a.tar")["images"][0]["name"]
        == "my-images:v1"
    )
    made = export(built, "one", tmp_path / "b.tar", "--as", "reg.example/team/x:2")
    assert made["images"][0]["name"] == "reg.example/team/x:2"
    with FakeRegistry() as registry:
        # A key's image is where `build` puts it.
        monkeypatch.setenv("DUOPACK_REGISTRY", f"{registry.host}/llm")
        built.built("one")
        name = f"{registry.host}/llm/tiny-one:stand-in-n1"
        assert export(built, "one", tmp_path / "c.tar")["images"][0]["name"] == name


def test_wrong_use_is_told_before_anything_is_written(built, tmp_path):
    out = tmp_path / "out"
    refused(built.run("export", "one", "both", out, "--as", "x:1"), 2, "--as names one image")
    refused(built.run("export", "one", tmp_path / "x.tar", "--split", "4G"), 2, "parts lie in a directory")
    refused(built.run("export", "one", out, "--split", "4X"), 2, "'4X' is not a size")
    refused(built.run("export", "one", out, "--split", "10K"), 2, "too small")
    refused(built.run("export", "one", "one", tmp_path / "x.tar"), 1, "two images would have the name")
    refused(built.run("export", "one", f"docker://{tmp_path.name}.example/x"), 2, "duopack publish")
    refused(built.run("export", "oci:nowhere", out), 1, "not an OCI image layout")
    refused(built.run("import", tmp_path / "nothing"), 2, "no such file")
    refused(built.run("import", built.directory / "hub"), 1, "neither an OCI layout nor a part")
    refused(built.run("import", built.work / "one", "--to", "x:1", "--under", "y"), 2, "exclude each other")
    refused(built.run("import", built.work / "one"), 2, "has no name in the export")
    assert not out.exists()
    assert not (tmp_path / "x.tar").exists()


def test_parts_never_replace_what_is_there(built, tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "mine").write_text("mine")
    refused(built.run("export", "one", tmp_path / "parts", "--split", "1M"), 2, "not an empty directory")
    assert (tmp_path / "parts" / "mine").read_text() == "mine"


def test_no_space_is_found_before_a_byte_is_written(built, tmp_path, monkeypatch):
    def full(directory: Path, needed: int, *, purpose: str, mend: str) -> None:
        assert "another disk" in mend
        assert needed > 1 << 20
        raise DuopackError(f"{purpose} needs more", where=str(directory), mend="free some")

    monkeypatch.setattr(export_stage, "require_space", full)
    for arguments in ([tmp_path / "x.tar"], [tmp_path / "parts", "--split", "1M"], [tmp_path / "layout"]):
        refused(built.run("export", "one", *arguments), 1, "the export needs more")
    assert {path.name for path in tmp_path.iterdir()} & {
        "x.tar",
        "parts",
        "layout",
        ".parts.partial",
    } == set()


@pytest.mark.parametrize("form", ["x.tar", "parts"])
def test_a_killed_export_leaves_nothing_that_looks_whole_and_the_next_one_sweeps(built, tmp_path, form):
    arguments = ["--split", "1M"] if form == "parts" else []
    slow = "import os, time; w = os.write\nos.write = lambda h, d: (time.sleep(0.05), w(h, d))[1]\n"
    code = f"{slow}import sys; from pipeline.cli import main; sys.exit(main(sys.argv[1:]))"
    places = ["--catalog", str(built.directory / "models.yaml"), "--work", str(built.work)]
    command = [duopack()[0], "-c", code, "export", "both", str(tmp_path / form), *arguments, *places]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        end = time.monotonic() + 30
        while not list(tmp_path.glob(f".{form}.partial*")) and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / form).exists()
    assert list(tmp_path.glob(f".{form}.partial*"))
    export(built, "both", tmp_path / form, *arguments)
    assert (tmp_path / form).exists()
    assert not list(tmp_path.glob(f".{form}.partial*"))


def loader(
    parts: Path, *arguments: str, shell: str = "sh", **environ: str
) -> subprocess.CompletedProcess[str]:
    words = shell.split()
    return subprocess.run(
        [*words, str(parts / "load.sh"), *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, **environ},
    )  # fmt: skip


SHELLS = [shell for shell in ("dash", "bash --posix", "busybox sh") if shutil.which(shell.split()[0])]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_checks_joins_and_loads_with_any_shell(built, tmp_path, shell):
    parts = tmp_path / "a place with 'quotes'"
    export(built, "one", parts, "--split", "1M")
    export(built, "one", tmp_path / "x.tar")
    engine = tmp_path / "engine"
    engine.write_text('#!/bin/sh\n[ "$1" = load ] && cat >"$LOADED"\n')
    engine.chmod(0o755)
    loaded = loader(parts, shell=shell, ENGINE=str(engine), LOADED=str(tmp_path / "loaded"))
    assert loaded.returncode == 0, loaded.stderr
    assert (tmp_path / "loaded").read_bytes() == (tmp_path / "x.tar").read_bytes()
    assert "tiny-one:stand-in-n1" in loaded.stdout
    assert loader(parts, "--join", str(tmp_path / "joined"), shell=shell).returncode == 0
    assert (tmp_path / "joined").read_bytes() == (tmp_path / "x.tar").read_bytes()
    assert loader(parts, "--check", shell=shell).returncode == 0
    assert "ENGINE=podman" in loader(parts, shell=shell, ENGINE="no-such-engine").stderr
    assert loader(parts, "--wrong", shell=shell).returncode == 1
    assert "--join FILE" in loader(parts, "--help", shell=shell).stdout
    with (parts / "images.tar.001").open("r+b") as file:
        file.seek(2000)
        file.write(b"X")
    damaged = loader(parts, shell=shell, ENGINE=str(engine), LOADED=str(tmp_path / "not"))
    assert damaged.returncode == 1
    assert "damaged or missing" in damaged.stderr
    assert not (tmp_path / "not").exists()


def test_the_script_says_which_image_must_be_there_before(built, tmp_path):
    export(built, "both", tmp_path / "parts", "--split", "1M", "--since", "one")
    engine = tmp_path / "engine"
    engine.write_text('#!/bin/sh\ncase $1 in image) grep -q "$3" "$HAVE" ;; load) cat >/dev/null ;; esac\n')
    engine.chmod(0o755)
    (tmp_path / "have").write_text("")
    without = loader(tmp_path / "parts", ENGINE=str(engine), HAVE=str(tmp_path / "have"))
    assert without.returncode == 1
    assert "does not have tiny-one:stand-in-n1, whose layers were left out" in without.stderr
    (tmp_path / "have").write_text((tmp_path / "parts" / "NEEDS").read_text().split()[0])
    assert loader(tmp_path / "parts", ENGINE=str(engine), HAVE=str(tmp_path / "have")).returncode == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [("4G", 4 << 30), ("4095m", 4095 << 20), ("700MiB", 700 << 20), ("1kB", 1024), ("123", 123)],
)
def test_sizes_are_binary(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "4.5G", "G", "4 G", "1e9", "9" * 40])
def test_other_sizes_are_refused(text):
    with pytest.raises(UsageError):
        parse_size(text)


@pytest.mark.parametrize(
    "pieces", [[b"abcdefghij"], [bytes([c]) for c in b"abcdefghij"], [b"abc", b"", memoryview(b"defghij")]]
)
def test_parts_are_cut_at_the_size_whatever_the_pieces(tmp_path, pieces):
    writer = PartWriter(tmp_path, "f", 4)
    for piece in pieces:
        writer.write(piece)
    records = writer.finish()
    assert [(one.path, one.size) for one in records] == [("f.001", 4), ("f.002", 4), ("f.003", 2)]
    assert [one.sha256 for one in records] == [
        hashlib.sha256(x).hexdigest() for x in (b"abcd", b"efgh", b"ij")
    ]
    parts = Parts(tuple(tmp_path / one.path for one in records))
    assert (parts.size, b"".join(parts.read(3))) == (10, b"defghij")
    assert parts.read_range(3, 6) == b"defghi"
    with pytest.raises(DuopackError, match="ends at byte 10"):
        parts.read_range(8, 3)


def bundle_of(tmp_path: Path, **files: bytes) -> BundleSource:
    path = tmp_path / "b.tar"
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name.replace("_", "/"))
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return BundleSource(Parts((path,)))


@pytest.mark.parametrize(
    "index",
    [b"", b"[]", b'{"manifests": 3}', b'{"manifests": [{"digest": 1}]}', b"[" * 100_000, b"\xff"],
)
def test_a_hostile_index_is_one_sentence(tmp_path, index):
    with pytest.raises(DuopackError):
        bundle_of(tmp_path, **{"index.json": index}).entries()


def test_a_blob_that_lies_about_itself_is_refused(tmp_path):
    digest = Digest.of(b"true")
    source = bundle_of(tmp_path, **{f"blobs_sha256_{digest.hex}": b"lies"})
    with pytest.raises(DuopackError, match="other bytes"):
        source.manifest(str(digest))
    with pytest.raises(DuopackError, match="not a file of 9 bytes"):
        source.blob(Descriptor(OCI_LAYER_TAR, digest, 9))
    with pytest.raises(DuopackError, match="other bytes"):
        b"".join(source.blob(Descriptor(OCI_LAYER_TAR, digest, 4)).read())
