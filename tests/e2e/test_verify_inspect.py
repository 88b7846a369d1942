"""Images seen from inside where they really lie: a registry, an engine, archives and layouts of other tools."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine import running_engine
from support.images import TAG, model_files, our_image
from support.memory import PEAK
from support.registry import RegistryServer

from pipeline.cli import main
from pipeline.oci.archive import ArchiveSink
from pipeline.oci.documents import parse_document, resolve
from pipeline.oci.hashing import FileContent
from pipeline.oci.image import Layer, load_base
from pipeline.oci.layout import LayoutSink, LayoutSource
from pipeline.oci.places import open_sink, open_source
from pipeline.oci.reference import parse_reference
from pipeline.oci.tar import TarEntry, TarLayer
from pipeline.oci.transfer import copy_image, write_image

pytestmark = pytest.mark.e2e

needs_engine = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("dockerd"), reason="needs root and dockerd"
)
ARCH = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    with RegistryServer(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "Tiny"
    model_files(directory)
    return directory


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_engine(tmp_path_factory.mktemp("engine")) as address:
        yield address


@pytest.fixture
def engine(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", address)


@pytest.fixture
def copied(engine: None, model: Path, tmp_path: Path) -> Iterator[str]:
    """An image made by `docker build` from a plain COPY, with a chmod of the weights after it, as people do it."""
    context = tmp_path / "context"
    shutil.copytree(model, context / "weights")
    (context / "start.sh").write_text("#!/bin/sh\nexec vllm serve /models/tiny --port 12320 --no-such-flag\n")
    shutil.copy2(shutil.which("busybox") or pytest.skip("busybox-static is not installed"), context / "sh")
    (context / "Dockerfile").write_text(
        "FROM scratch\nCOPY sh /bin/sh\nCOPY weights /models/tiny\nCOPY weights /models/again\n"
        'COPY start.sh /start.sh\nCMD ["/start.sh"]\n'
    )
    docker("build", "-q", "-t", "tiny:copied", str(context))
    yield "tiny:copied"
    docker("rmi", "-f", "tiny:copied")


def docker(*words: str) -> str:
    done = subprocess.run(
        ["docker", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "DOCKER_BUILDKIT": "0"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str):
    capsys.readouterr()
    code = main(
        [
            words[0],
            "--catalog",
            str(tmp_path / "no.yaml"),
            "--work",
            str(tmp_path / "w"),
            "--json",
            *words[1:],
        ]
    )
    return code, json.loads(capsys.readouterr().out)


def ids(value) -> set[str]:
    return {one["id"] for one in value["images"][0]["findings"] if one["severity"] in {"error", "warning"}}


def push(source, reference: str, name: str) -> None:
    copy_image(source, reference, None, open_sink(parse_reference(name)))


# --- A registry ---------------------------------------------------------------------------------------------------


def test_an_image_of_ours_in_a_registry_is_judged_by_parts_of_it(registry, model, tmp_path, capsys):
    big = {**model_files(model), "extra.bin": b"\7" * (120 << 20)}
    name = f"docker://{registry.host}/tiny:1"
    push(our_image(big), TAG, name)
    code, value = run(capsys, tmp_path, "verify", name)
    [image] = value["images"]
    assert code == 0, image["findings"]
    assert image["read"] < 2 << 20
    assert image["models"][0]["tensors"] == 104
    code, value = run(capsys, tmp_path, "verify", name, "--deep")
    assert code == 0, value
    assert ids(value) == set()


def test_ranges_give_what_reading_from_the_start_gives(registry, model):
    name = f"docker://{registry.host}/tiny:ranges"
    push(our_image(model_files(model)), TAG, name)
    source = open_source(parse_reference(name))
    for layer in resolve(source, "ranges", None).manifest.layers:
        blob = source.blob(layer)
        whole = b"".join(blob.read())
        for offset, size in ((0, 1), (layer.size - 1, 1), (layer.size // 2, 100), (0, layer.size)):
            size = min(size, layer.size - offset)
            assert blob.read_range(offset, size) == whole[offset : offset + size]


def test_a_blob_that_the_registry_lost_or_damaged_is_found(registry, model, tmp_path, capsys):
    name = f"docker://{registry.host}/tiny:lost"
    push(our_image(model_files(model), max_model_len=4096), TAG, name)
    source = open_source(parse_reference(name))
    layers = resolve(source, "lost", None).manifest.layers
    last = (
        registry.root
        / "data/docker/registry/v2/blobs/sha256"
        / layers[2].digest.hex[:2]
        / layers[2].digest.hex
        / "data"
    )
    data = last.read_bytes()
    last.write_bytes(data[:-600] + b"x" + data[-599:])
    code, value = run(capsys, tmp_path, "verify", name, "--deep")
    assert code == 1
    assert ids(value) & {"layer-unreadable", "layer-digest", "layer-broken"}
    last.write_bytes(data[: len(data) // 2])
    code, value = run(capsys, tmp_path, "verify", name)
    assert code == 1
    last.unlink()
    code, value = run(capsys, tmp_path, "verify", name)
    assert code == 1
    assert "layer-unreadable" in ids(value)
    last.write_bytes(data)


MEASURED = f"""
{PEAK}
import sys
from pipeline.cli import main
code = main(sys.argv[1:])
print(peak(), file=sys.stderr)
raise SystemExit(code)
"""


def measured(*words: str) -> tuple[dict, float, int]:
    """What a command gives in a process of its own, its seconds, and its peak memory in bytes."""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *words], capture_output=True, text=True, check=False, timeout=160
    )
    return json.loads(done.stdout), time.monotonic() - begun, int(done.stderr.split()[-1]) << 10


def sparse_image(directory: Path, count: int, size: int) -> str:
    """An image in a layout with `count` weight files of `size` bytes, which take no room on the disk."""
    source = our_image(model_files(directory / "Tiny"))
    base = load_base(source, TAG, "linux/arm64")
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    layers, index = [], {"metadata": {}, "weight_map": {}}
    for number, name in enumerate(names):
        header = {f"t{number}": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
        text = json.dumps(header).encode()
        with (directory / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + size)
        index["weight_map"][f"t{number}"] = name
        layers.append((directory / name, f"models/Large/{name}"))
    small = TarLayer(
        [
            TarEntry("models/Large/config.json", 0o644, b"{}"),
            TarEntry("models/Large/model.safetensors.index.json", 0o644, json.dumps(index).encode()),
        ]
    )
    write_image(base.with_layers([Layer(small)]), LayoutSink(directory / "layout", "1"))
    _add_sparse_layers(directory / "layout", layers)
    return f"oci:{directory / 'layout'}:1"


def test_a_20_gb_image_is_judged_and_inspected_in_seconds_and_little_memory(tmp_path):
    image = sparse_image(tmp_path, 5, 4 << 30)
    value, seconds, memory = measured("verify", "--json", image)
    assert value["images"][0]["sound"], value
    [large] = [one for one in value["images"][0]["models"] if one["directory"] == "/models/Large"]
    assert large["size"] == 20 << 30
    assert value["images"][0]["read"] < 4 << 20
    assert seconds < 10
    assert memory < 200 << 20
    value, seconds, memory = measured("inspect", "--json", image)
    assert value["images"][0]["stored"] > 20 << 30
    assert seconds < 10
    assert memory < 200 << 20


def test_every_byte_is_read_in_little_memory(tmp_path):
    value, _, memory = measured("verify", "--json", "--quiet", "--deep", sparse_image(tmp_path, 2, 500 << 20))
    # The layers have made-up digests, which shallow looks cannot know.
    assert {one["where"] for one in value["images"][0]["findings"] if one["severity"] == "error"} >= {
        "layer 4",
        "layer 5",
    }
    assert memory < 200 << 20


def _add_sparse_layers(directory: Path, files: list[tuple[Path, str]]) -> None:
    """Adds layers of one sparse file each under made-up digests: what only reading every byte could find out."""
    source = LayoutSource(directory)
    resolved = resolve(source, "1", None)
    manifest = json.loads(resolved.data)
    config = json.loads(b"".join(source.blob(resolved.manifest.config).read()))
    blobs = directory / "blobs/sha256"
    for number, (path, name) in enumerate(files):
        entry = TarEntry(name, 0o644, FileContent(path, path.stat().st_size, "0" * 64))
        layer = TarLayer([entry])
        head, _, tail = layer._parts
        digest = f"{number + 1:064x}"
        with (blobs / digest).open("wb") as blob:
            blob.write(head)
            with path.open("rb") as weights:
                blob.write(weights.read(4096))
            blob.truncate(len(head) + path.stat().st_size)
            blob.seek(0, 2)
            blob.write(tail)
        path.unlink()
        manifest["layers"].append(
            {"mediaType": layer.media_type, "digest": f"sha256:{digest}", "size": layer.size}
        )
        config["rootfs"]["diff_ids"].append(f"sha256:{digest}")
        config["history"].append({"created_by": f"duopack: {name}"})
    sink = LayoutSink(directory, "1")
    text = json.dumps(config).encode()
    (blobs / "probe").write_bytes(text)
    manifest["config"] |= {"digest": f"sha256:{hashlib.sha256(text).hexdigest()}", "size": len(text)}
    (blobs / "probe").rename(blobs / hashlib.sha256(text).hexdigest())
    data = json.dumps(manifest).encode()
    sink.put_manifest(data, text, parse_document(data, manifest["mediaType"], where="").layers)


# --- An engine, and what it makes ---------------------------------------------------------------------------------


@needs_engine
def test_an_image_of_docker_build_is_understood_in_the_engine(copied, tmp_path, capsys):
    code, value = run(capsys, tmp_path, "verify", f"docker-daemon:{copied}")
    [image] = value["images"]
    assert {one["directory"]: one.get("tensors") for one in image["models"]} == {
        "/models/tiny": 104,
        "/models/again": 104,
    }
    assert code == 1
    assert ids(value) == {"option"}
    code, value = run(capsys, tmp_path, "inspect", f"docker-daemon:{copied}", "--deep")
    [image] = value["images"]
    assert sum(part["stored"] for part in image["parts"]) == image["stored"]
    assert {path for one in image["duplicates"] for path in one["paths"]} >= {
        "models/tiny/model.safetensors-00001-of-00002.safetensors",
        "models/again/model.safetensors-00001-of-00002.safetensors",
    }
    assert list((tmp_path / "w").rglob("duopack-*")) == []


@needs_engine
def test_an_image_that_docker_pushed_compressed_is_understood(copied, registry, tmp_path, capsys):
    name = f"{registry.host}/tiny:pushed"
    docker("tag", copied, name)
    docker("push", "-q", name)
    docker("rmi", name)
    code, value = run(capsys, tmp_path, "verify", f"docker://{name}")
    assert code == 1
    assert ids(value) == {"option"}
    assert all(one["whole"] for one in value["images"][0]["models"])
    _, deep = run(capsys, tmp_path, "verify", f"docker://{name}", "--deep")
    assert ids(deep) == {"option"}
    _, both = run(capsys, tmp_path, "inspect", f"docker://{name}", f"docker-daemon:{copied}", "--deep")
    assert both["comparison"]["files"] == []


@needs_engine
def test_what_docker_saves_is_understood(copied, tmp_path, capsys):
    docker("save", "-o", str(tmp_path / "a.tar"), copied)
    code, value = run(capsys, tmp_path, "verify", f"docker-archive:{tmp_path / 'a.tar'}", "--deep")
    assert code == 1
    assert ids(value) == {"option"}
    data = bytearray((tmp_path / "a.tar").read_bytes())
    place = data.index(b"tokenizer_config.json") + 600
    data[place] ^= 1
    (tmp_path / "b.tar").write_bytes(bytes(data))
    code, value = run(capsys, tmp_path, "verify", f"docker-archive:{tmp_path / 'b.tar'}:{copied}", "--deep")
    assert {"layer-unreadable", "layer-digest"} & ids(value)


@needs_engine
def test_an_image_of_ours_stays_what_it_is_through_an_engine(engine, model, tmp_path, capsys, registry):
    source = our_image(
        model_files(model),
        change_config=lambda c: c.update(architecture=ARCH, variant=None) or c.pop("variant"),
    )
    write = ArchiveSink(tmp_path / "a.tar", "tiny:ours")
    copy_image(source, TAG, None, write)
    docker("load", "-i", str(tmp_path / "a.tar"))
    code, value = run(capsys, tmp_path, "verify", "docker-daemon:tiny:ours", "--deep")
    assert code == 0, value
    assert value["images"][0]["base"] == {"layers": 1, "told_by": "history"}
    name = f"{registry.host}/tiny:through"
    docker("tag", "tiny:ours", name)
    docker("push", "-q", name)
    code, value = run(capsys, tmp_path, "verify", f"docker://{name}")
    assert code == 0, value
    docker("rmi", "-f", "tiny:ours", name)


@needs_engine
def test_an_image_that_the_engine_does_not_have_is_told_so(engine, tmp_path, capsys):
    code, value = run(capsys, tmp_path, "verify", "docker-daemon:no/such:1")
    assert code == 1
    assert "no such image" in value["error"]["what"].lower()


# --- Other tools' layouts and archives ----------------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("skopeo"), reason="skopeo is not installed")
@pytest.mark.parametrize("form", ["oci:{}:1", "docker-archive:{}:tiny:1"])
def test_what_skopeo_copies_is_understood(form, model, tmp_path, capsys):
    copy_image(our_image(model_files(model)), TAG, None, LayoutSink(tmp_path / "ours", "1"))
    there = form.format(tmp_path / "theirs")
    subprocess.run(
        ["skopeo", "--insecure-policy", "copy", "-q", f"oci:{tmp_path / 'ours'}:1", there], check=True
    )
    code, value = run(capsys, tmp_path, "verify", there, "--deep")
    assert code == 0, value
    _, both = run(capsys, tmp_path, "inspect", f"oci:{tmp_path / 'ours'}:1", there, "--deep")
    assert both["comparison"]["files"] == []


@pytest.mark.skipif(not shutil.which("umoci"), reason="umoci is not installed")
def test_a_layer_that_umoci_adds_is_understood(model, tmp_path, capsys):
    copy_image(our_image(model_files(model)), TAG, None, LayoutSink(tmp_path / "ours", "1"))
    script = tmp_path / "n9.sh"
    script.write_text("#!/bin/bash\nexec vllm serve /models/Tiny --port 1\n")
    subprocess.run(
        [
            "umoci",
            "insert",
            "--image",
            f"{tmp_path / 'ours'}:1",
            "--tag",
            "2",
            str(script),
            "/models/scripts/n9.sh",
        ],
        check=True,
        capture_output=True,
    )
    code, value = run(capsys, tmp_path, "verify", f"oci:{tmp_path / 'ours'}:2")
    assert "script-changed" in ids(value)
    _, both = run(capsys, tmp_path, "inspect", f"oci:{tmp_path / 'ours'}:1", f"oci:{tmp_path / 'ours'}:2")
    assert [one["path"] for one in both["comparison"]["files"]] == ["models/scripts/n9.sh"]
    assert both["comparison"]["transfer"]["layers"] == 1
    assert code in {0, 1}
