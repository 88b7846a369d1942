"""Exports in real hands: docker load, skopeo and umoci take them; a real registry and engine get them back."""

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
from typing import Any

import pytest
from support.engine import running_engine
from support.hub import FaultyHub
from support.project import Project, duopack, make_models, open_project, refused
from support.registry import RegistryServer

from pipeline.oci.documents import resolve
from pipeline.oci.layout import LayoutSource

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("dockerd"), reason="needs root and dockerd"),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_engine(tmp_path_factory.mktemp("engine")) as address:
        yield address


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    with RegistryServer(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture
def built(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """`one` and `both` in the work directory; docker commands go to the test's engine."""
    make_models(tmp_path / "hub")
    with FaultyHub(tmp_path / "hub") as hub:
        project = open_project(tmp_path, hub, monkeypatch)
        monkeypatch.setenv("DOCKER_HOST", engine)
        for key in ("one", "both"):
            project.built(key)
        yield project
    for image in docker("images", "-q").split():
        subprocess.run(["docker", "rmi", "-f", image], capture_output=True, check=False)


def call(*arguments: str | Path) -> str:
    result = subprocess.run([*map(str, arguments)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def docker(*arguments: str) -> str:
    return call("docker", *arguments)


def files_in_engine(name: str) -> dict[str, str]:
    """Path and sha256 of every file below /models, as the engine stores it; nothing is started."""
    container = docker("create", name, "x").split()[0]
    try:
        data = subprocess.run(["docker", "export", container], capture_output=True, check=True).stdout
    finally:
        docker("rm", container)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {
            one.name: hashlib.sha256(archive.extractfile(one).read()).hexdigest()  # type: ignore[union-attr]
            for one in archive
            if one.isfile() and one.name.startswith("models/")
        }


def files_of(layout: Path) -> dict[str, str]:
    """The same from the layout's plain layers."""
    source, found = LayoutSource(layout), {}
    for layer in resolve(source, "latest", None).manifest.layers:
        with tarfile.open(fileobj=io.BytesIO(b"".join(source.blob(layer).read()))) as archive:
            for one in archive:
                if one.isfile() and one.name.startswith("models/"):
                    found[one.name] = hashlib.sha256(archive.extractfile(one).read()).hexdigest()  # type: ignore[union-attr]
    return found


def config_of(layout: Path) -> str:
    return str(resolve(LayoutSource(layout), "latest", None).manifest.config.digest)


def export(project: Project, *arguments: str | Path) -> dict[str, Any]:
    ran = project.run("export", *arguments, "--json")
    assert ran.code == 0, ran.err
    value: dict[str, Any] = ran.json
    return value


def test_docker_load_takes_two_images_from_one_archive(built: Project, tmp_path: Path) -> None:
    export(built, "one", "both", tmp_path / "x.tar")
    said = docker("load", "-i", str(tmp_path / "x.tar"))
    assert "tiny-one:stand-in-n1" in said
    for key, name in (("one", "tiny-one:stand-in-n1"), ("both", "both:stand-in-both")):
        assert json.loads(docker("inspect", name))[0]["Id"] == config_of(built.work / key)
        assert files_in_engine(name) == files_of(built.work / key)


def test_the_script_loads_parts_and_then_an_update_of_a_few_kilobytes(built: Project, tmp_path: Path) -> None:
    export(built, "one", tmp_path / "parts", "--split", "1M")
    said = call("sh", tmp_path / "parts" / "load.sh")
    assert "images.tar.001: OK" in said
    assert files_in_engine("tiny-one:stand-in-n1") == files_of(built.work / "one")
    shutil.copytree(built.work / "one", tmp_path / "old")
    built.profile()["max_model_len"] = 2048
    built.write()
    built.built("one")
    since = ("--since", f"oci:{tmp_path}/old")
    made = export(built, "one", tmp_path / "update", "--split", "1M", *since)
    assert made["size"] < 100_000
    # NEEDS names the old image by its id, which the engine has under another name.
    call("sh", tmp_path / "update" / "load.sh")
    assert json.loads(docker("inspect", "tiny-one:stand-in-n1"))[0]["Id"] == config_of(built.work / "one")
    assert files_in_engine("tiny-one:stand-in-n1") == files_of(built.work / "one")


def test_an_engine_without_the_older_image_is_told_so(built: Project, tmp_path: Path) -> None:
    export(built, "both", tmp_path / "update", "--split", "1M", "--since", "one")
    result = subprocess.run(
        ["sh", tmp_path / "update" / "load.sh"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "does not have tiny-one:stand-in-n1" in result.stderr
    ran = built.run("import", tmp_path / "update")
    assert ran.code == 1
    assert "of both:stand-in-both, 2 of 4 layers" in ran.err
    export(built, "one", tmp_path / "first.tar")
    assert built.run("import", tmp_path / "first.tar").code == 0
    ran = built.run("import", tmp_path / "update", "--json")
    assert ran.code == 0, ran.err
    assert ran.json[0]["layers_sent"] == 2
    assert files_in_engine("both:stand-in-both") == files_of(built.work / "both")


@pytest.mark.parametrize("form", ["oci-archive", "docker-archive", "oci"])
def test_skopeo_takes_every_form(built: Project, tmp_path: Path, form: str) -> None:
    place = tmp_path / ("layout" if form == "oci" else "x.tar")
    export(built, "one", "both", place)
    name = {
        "oci-archive": ":stand-in-n1",
        "docker-archive": ":tiny-one:stand-in-n1",
        "oci": ":stand-in-n1",
    }[form]
    call("skopeo", "--insecure-policy", "copy", f"{form}:{place}{name}", f"oci:{tmp_path}/copy:latest")
    # From Docker's form skopeo makes a config of its own.
    assert form == "docker-archive" or config_of(tmp_path / "copy") == config_of(built.work / "one")
    assert files_of(tmp_path / "copy") == files_of(built.work / "one")


def test_umoci_unpacks_the_layout(built: Project, tmp_path: Path) -> None:
    export(built, "one", "both", tmp_path / "layout")
    call("umoci", "unpack", "--image", f"{tmp_path}/layout:stand-in-both", tmp_path / "bundle")
    root = tmp_path / "bundle" / "rootfs"
    found = {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (root / "models").rglob("*")
        if path.is_file()
    }
    assert found == files_of(built.work / "both")


def test_a_real_registry_gets_parts_and_an_image_back_from_it_is_the_same(
    built: Project, registry: RegistryServer, tmp_path: Path
) -> None:
    export(built, "one", "both", tmp_path / "parts", "--split", "1M")
    ran = built.run("import", tmp_path / "parts", "--under", f"{registry.host}/far", "--json")
    assert ran.code == 0, ran.err
    place = ran.json[1]["destination"]
    made = export(built, place, tmp_path / "back.tar")
    assert made["images"][0]["digest"] == ran.json[1]["digest"]
    assert made["images"][0]["name"] == f"{registry.host}/far/both:stand-in-both"
    call(
        "skopeo", "--insecure-policy", "copy", "--src-tls-verify=false", place, f"oci:{tmp_path}/copy:latest"
    )
    assert files_of(tmp_path / "copy") == files_of(built.work / "both")


def test_an_image_of_the_engine_can_be_exported(built: Project, tmp_path: Path) -> None:
    export(built, "one", tmp_path / "x.tar", "--as", "local/x:1")
    docker("load", "-i", str(tmp_path / "x.tar"))
    made = export(built, "docker-daemon:local/x:1", tmp_path / "back")
    assert made["images"][0]["name"] == "local/x:1"
    assert files_of_tag(tmp_path / "back", "1") == config_of(built.work / "one")


def files_of_tag(layout: Path, tag: str) -> str:
    return str(resolve(LayoutSource(layout), tag, None).manifest.config.digest)


def test_a_killed_import_goes_on_where_it_was(
    built: Project, registry: RegistryServer, tmp_path: Path
) -> None:
    export(built, "both", tmp_path / "x.tar")
    slow = (
        "import time\nfrom pipeline.oci.bundle_source import BundledBlob\nread = BundledBlob.read\n"
        "def slowly(self, offset=0):\n    for piece in read(self, offset):\n"
        "        time.sleep(0.4)\n        yield piece\n"
        "BundledBlob.read = slowly\nimport sys; from pipeline.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    under = ["--under", f"{registry.host}/killed", "--work", str(built.work)]
    command = [duopack()[0], "-c", slow, "import", str(tmp_path / "x.tar"), *under]
    blobs = registry.root / "data" / "docker" / "registry" / "v2" / "repositories" / "killed"
    with subprocess.Popen(
        command, stderr=subprocess.DEVNULL, env={**os.environ, "DUOPACK_PARALLEL": "1"}
    ) as process:
        end = time.monotonic() + 60
        while len(list(blobs.glob("both/_layers/sha256/*"))) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert not list(blobs.glob("both/_manifests/tags/*"))
    ran = built.run("import", tmp_path / "x.tar", *under[:2], "--json")
    assert ran.code == 0, ran.err
    assert ran.json[0]["layers_sent"] <= 2


@pytest.mark.parametrize("form", ["archive", "parts"])
def test_a_disk_that_fills_up_meanwhile_keeps_nothing_half_made(
    built: Project, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    call("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk)
    try:
        arguments = [disk / "x.tar"] if form == "archive" else [disk / "parts", "--split", "1M"]
        ran = built.run("export", "one", *arguments)
        refused(ran, 1, "the export needs", "are free", "another disk")
        # Free when it was looked at, and full before the end.
        monkeypatch.setattr("pipeline.stages.export.require_space", lambda *_, **__: None)
        refused(built.run("export", "one", *arguments), 1, "No space left on device")
        assert list(disk.iterdir()) == []
    finally:
        call("umount", disk)


def test_a_verified_set_lists_its_models(built: Project) -> None:
    ran = built.run("verify", f"oci:{built.work}/both", "--deep", "--json")
    [report] = ran.json["images"]
    assert report["sound"], report["findings"]
    assert report["command"][-1] == "/models/scripts/list.sh"
    unpacked = built.directory / "both"
    call("umoci", "unpack", "--image", f"{built.work}/both:latest", unpacked)
    said = call("bash", unpacked / "rootfs" / "models" / "scripts" / "list.sh")
    for word in ("IMAGE n1.sh", "Tiny One", "Tiny Two", "n2.sh", "nn1.sh", "2 chips", "port 12321"):
        assert word in said
