"""Images of ours in a real Docker engine: loaded, run, and every byte compared inside the container."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine import running_engine
from support.oci_memory import MemorySource

from pipeline.errors import DuopackError
from pipeline.oci.archive import ArchiveSink
from pipeline.oci.daemon import DaemonSink
from pipeline.oci.digest import Digest
from pipeline.oci.image import Healthcheck, Image, Layer, load_base
from pipeline.oci.model import OCI_CONFIG, OCI_LAYER_GZIP, OCI_MANIFEST, Blob, OnBytes
from pipeline.oci.tar import FileContent, TarEntry, TarLayer, pack
from pipeline.oci.transfer import write_image

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("dockerd"), reason="needs root and dockerd"),
]

ARCH = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_engine(tmp_path_factory.mktemp("engine")) as address:
        yield address


@pytest.fixture
def engine(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", address)


def docker(*arguments: str) -> str:
    result = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def base() -> Image:
    """A base with a gzip layer and an entrypoint, as a registry gives it: static busybox."""
    busybox = shutil.which("busybox")
    if not busybox:
        pytest.skip("busybox-static is not installed")
    source = MemorySource()
    data = Path(busybox).read_bytes()
    entry = b'#!/bin/sh\nexec "$@"\n'
    tar = b"".join(TarLayer([TarEntry("bin/sh", 0o755, data), TarEntry("entry.sh", 0o755, entry)]).read())
    config = {
        "os": "linux",
        "architecture": ARCH,
        "config": {"Entrypoint": ["/entry.sh"], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [str(Digest.of(tar))]},
    }
    source.add_manifest(
        {
            "schemaVersion": 2,
            "config": source.add_blob(json.dumps(config).encode(), OCI_CONFIG),
            "layers": [source.add_blob(gzip.compress(tar, 1), OCI_LAYER_GZIP)],
        },
        "t",
        media_type=OCI_MANIFEST,
    )
    return load_base(source, "t", f"linux/{ARCH}")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("weights")
    made = {}
    for name, size in {
        "config.json": 500,
        "a-00001.safetensors": 70 << 20,
        "名/tokenizer.json": 4097,
    }.items():
        path = made[f"models/Tiny/{name}"] = folder / name.replace("/", "-")
        path.write_bytes(os.urandom(size))
    return made


def with_model(base: Image, files: dict[str, Path], script: str = "echo served") -> Image:
    entries = [
        TarEntry(
            name, 0o644, FileContent(path, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        )
        for name, path in files.items()
    ]
    start = TarLayer([TarEntry("models/n.sh", 0o755, f"#!/bin/sh\n{script}\n".encode())])
    return (
        base.with_layers(Layer.of(layer) for layer in pack(entries))
        .with_layers([Layer.of(start, created_by="duopack: start script")])
        .with_config(
            cmd=["/models/n.sh"],
            env={"PORT": "12320"},
            labels={"org.example": "1"},
            exposed_ports=[12320],
            healthcheck=Healthcheck(("CMD", "/bin/sh", "-c", "true"), start_period=600),
        )
    )


class Counting:
    """Another sink, and the sizes of the blobs that it was sent."""

    def __init__(self, sink: DaemonSink) -> None:
        self.parallel = sink.parallel
        self.plan, self.has = sink.plan, sink.has
        self.put_manifest, self.abort = sink.put_manifest, sink.abort
        self._sink = sink
        self.sizes: list[int] = []

    def put_blob(self, blob: Blob, on_bytes: OnBytes) -> Digest:
        self.sizes.append(blob.size)
        return self._sink.put_blob(blob, on_bytes)


def check_inside(name: str, files: dict[str, Path]) -> None:
    run = ("run", "--rm", "--network", "none", "--entrypoint", "/bin/sh", name)
    shown = docker(*run, "-c", "sha256sum $(find /models -type f)")
    found = {line.split()[1].lstrip("/"): line.split()[0] for line in shown.splitlines()}
    wanted = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    assert {path: digest for path, digest in found.items() if path != "models/n.sh"} == wanted


@pytest.mark.usefixtures("engine")
def test_docker_load_takes_the_archive(base: Image, files: dict[str, Path], tmp_path: Path) -> None:
    write_image(with_model(base, files), ArchiveSink(tmp_path / "a.tar", "local/archive:1"))
    assert "local/archive:1" in docker("load", "-i", str(tmp_path / "a.tar"))
    check_inside("local/archive:1", files)
    docker("rmi", "local/archive:1")


@pytest.mark.usefixtures("engine")
def test_the_engine_has_the_image_under_its_config_digest_and_runs_its_command(
    base: Image, files: dict[str, Path]
) -> None:
    image = with_model(base, files)
    memo: dict[str, Digest] = {}
    write_image(image, DaemonSink("local/direct:1"), remember=memo.__setitem__)
    digests = [layer.blob.digest or memo[layer.blob.key] for layer in image.layers]  # type: ignore[attr-defined]
    [shown] = json.loads(docker("inspect", "local/direct:1"))
    assert shown["Id"] == Digest.of(image.finish(digests).config)
    assert shown["Config"]["Healthcheck"]["StartPeriod"] == 600_000_000_000
    assert shown["Config"]["Entrypoint"] == ["/entry.sh"]
    check_inside("local/direct:1", files)
    assert docker("run", "--rm", "--network", "none", "local/direct:1") == "served\n"


@pytest.mark.usefixtures("engine")
def test_layers_that_the_engine_has_are_not_sent_again(base: Image, files: dict[str, Path]) -> None:
    memo: dict[str, Digest] = {}
    write_image(with_model(base, files), DaemonSink("local/chain:1"), remember=memo.__setitem__)
    sink = Counting(DaemonSink("local/chain:2"))
    write_image(with_model(base, files, "echo changed"), sink, known=memo, remember=memo.__setitem__)
    assert len(sink.sizes) == 1
    assert sink.sizes[0] < 10_000
    check_inside("local/chain:2", files)
    assert docker("run", "--rm", "--network", "none", "local/chain:2") == "changed\n"
    nothing = Counting(DaemonSink("local/chain:3"))
    write_image(with_model(base, files, "echo changed"), nothing, known=memo)
    assert nothing.sizes == []
    assert json.loads(docker("inspect", "local/chain:3"))[0]["RepoTags"] == ["local/chain:2", "local/chain:3"]


@pytest.mark.usefixtures("engine")
def test_layers_in_another_order_are_sent(base: Image) -> None:
    layers = [Layer.of(TarLayer([TarEntry(f"models/{n}", 0o644, bytes([n]))])) for n in range(2)]
    memo: dict[str, Digest] = {}
    write_image(base.with_layers(layers), DaemonSink("local/order:1"), remember=memo.__setitem__)
    sink = Counting(DaemonSink("local/order:2"))
    write_image(base.with_layers(reversed(layers)), sink, known=memo)
    assert len(sink.sizes) == 2


@pytest.mark.usefixtures("engine")
def test_a_failure_in_the_middle_leaves_no_image(base: Image, files: dict[str, Path]) -> None:
    image = with_model(base, files)
    wrong = TarLayer([TarEntry("x", 0o644, FileContent(next(iter(files.values())), 500, "0" * 64))])
    with pytest.raises(DuopackError, match="sha256"):
        write_image(image.with_layers([Layer.of(wrong)]), DaemonSink("local/failed:1"))
    assert docker("images", "-q", "local/failed") == ""
    write_image(image, DaemonSink("local/failed:1"))


@pytest.mark.usefixtures("engine")
def test_what_the_engine_refuses_is_told(base: Image) -> None:
    lying = Layer(TarLayer([TarEntry("x", 0o644, b"")]), diff_id=Digest("sha256:" + "0" * 64))
    with pytest.raises(DuopackError, match=r"did not load the image: .*invalid diffID"):
        write_image(base.with_layers([lying]), DaemonSink("local/refused:1"))


def test_an_engine_that_is_not_there_is_told(
    base: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    with pytest.raises(DuopackError, match="the engine does not answer") as caught:
        write_image(base, DaemonSink("local/x:1"))
    assert "DOCKER_HOST" in caught.value.mend
