"""What needs the base image, in a real dockerd: what the container gets, what it leaves, and what of it is believed.

The image is busybox with stand-ins for msmodelslim and upstream's script: both copy files that were made before.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from support.engine import running_engine

from pipeline.demo.model import make_qwen3
from pipeline.errors import DuopackError
from pipeline.reports.progress import open_progress
from pipeline.stages.quantize import w8a8sc
from pipeline.stages.quantize.container import Base, ChipRunner
from pipeline.stages.quantize.contract import Engine
from pipeline.stages.quantize.msmodelslim import MsmodelslimEngine
from pipeline.stages.quantize.stage import Quantized, quantize
from pipeline.stages.quantize.w8a8sc import SCRIPT, W8a8scEngine
from pipeline.weights.safetensors_writer import Declared, SafetensorsWriter, lay_out

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("dockerd"), reason="needs root and dockerd"),
]

PROGRESS = open_progress(quiet=True)
IMAGE = "quantizers:test"
APPLETS = ("sh", "cat", "cp", "echo", "env", "mkdir", "rm", "touch", "true")
PYTHON = f"""#!/bin/sh
case "$*" in
  *'import msmodelslim'*) exit 0 ;;
  *{SCRIPT}*) take=/ready/ranks; option=--output ;;
  *) take=/ready/dynamic; option=--save_path ;;
esac
env > seen; echo "$@" >> seen
while [ $# -gt 0 ]; do
  if [ "$1" = $option ]; then out=$2; fi
  if [ "$1" = --model_path ]; then model=$2; fi
  shift
done
if [ -n "$model" ]; then
  cat "$model/config.json" > /dev/null
  for file in "$model"/*.safetensors; do
    cat "$file" > /dev/null
    if (: >> "$file") 2> /dev/null; then
      echo 'RuntimeError: the source can be written to'
      exit 1
    fi
  done
fi
mkdir "$out"
cp "$take"/* "$out"
echo 'Run processor AscendV1Saver for "model.layers.0"'
if [ -f "$out/lost" ]; then
  rm "$out/lost" "$out/model-rank-1-part-0.safetensors"
  echo 'Error processing Rank file: killed'
fi
"""
LINEARS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
LAYERS, RANKS = 4, 2


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make_qwen3(tmp_path_factory.mktemp("model") / "source", seed=1)
    return next(tmp_path_factory.getbasetemp().glob("model*/source"))


@pytest.fixture(scope="module")
def dynamic(source: Path) -> Path:
    return quantize(source, source.with_name("dynamic"), PROGRESS, recipe="w8a8-dynamic").directory


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, dynamic: Path) -> Iterator[str]:
    place = tmp_path_factory.mktemp("image")
    ranks = _ranks(place / "ranks")
    with running_engine(tmp_path_factory.mktemp("engine")) as address:
        client = docker.DockerClient(base_url=address)
        for name, extra in ((IMAGE, {}), ("quantizers:lossy", {"ready/ranks/lost": b""})):
            archive = place / f"{name.partition(':')[2]}.tar"
            _image(archive, dynamic, ranks, extra)
            repository, _, tag = name.partition(":")
            client.api.import_image_from_file(str(archive), repository=repository, tag=tag)
        client.close()
        yield address


@pytest.fixture(autouse=True)
def _engine(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", address)
    monkeypatch.setattr(w8a8sc, "MODELS", {(128, LAYERS): "Qwen3-8B"})


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """As many chips as there are ranks; the engine's runtime `ascend` maps none of them."""
    (tmp_path / "dev").mkdir()
    for number in range(RANKS):
        (tmp_path / f"dev/davinci{number}").touch()
    return tmp_path / "dev"


def _ranks(directory: Path) -> Path:
    directory.mkdir()
    sizes = {"weight": ("I8", (96,)), "index": ("I8", (8,)), "info": ("I64", (5,))}
    sizes |= {"quant_bias": ("I32", (4,)), "deq_scale": ("I64", (4,)), "input_scale": ("F16", (1,))}
    declared = [
        Declared(f"model.layers.{layer}.{linear}.{suffix}", dtype, shape)
        for layer in range(LAYERS)
        for linear in LINEARS
        for suffix, (dtype, shape) in sizes.items()
    ]
    for rank in range(RANKS):
        layout = lay_out(declared)
        with SafetensorsWriter(directory / f"model-rank-{rank}-part-0.safetensors", layout) as writer:
            for one in layout.tensors:
                writer.write(b"\1" * one.size)
    types = {f"model.layers.{n}.self_attn.q_proj.weight": "W8A8SC" for n in range(LAYERS)}
    types |= {f"model.layers.{n}.self_attn.{m}_proj.weight": "W8A8SC" for n in range(LAYERS) for m in "kv"}
    (directory / "quant_model_description.json").write_text(
        json.dumps(types | {"model_quant_type": "W8A8SC"})
    )
    (directory / "ori_quant_model_description.json").write_text("{}")
    return directory


def _image(path: Path, dynamic: Path, ranks: Path, extra: dict[str, bytes]) -> None:
    busybox = shutil.which("busybox")
    if not busybox:
        pytest.skip("busybox-static is not installed")
    files = {"bin/busybox": Path(busybox).read_bytes(), "usr/bin/python3": PYTHON.encode()}
    # Takes the place of the program that pip would install.
    files["usr/bin/msmodelslim"] = b'#!/bin/sh\nexec python3 "$@"\n'
    files |= {f"ready/dynamic/{one.name}": one.read_bytes() for one in dynamic.glob("quant_model_*")}
    files |= {f"ready/ranks/{one.name}": one.read_bytes() for one in ranks.iterdir()} | extra
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755
            archive.addfile(info, io.BytesIO(data))
        for applet in APPLETS:
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)


def run(engine: Engine, source: Path, target: Path, recipe: str) -> Quantized:
    return quantize(
        source, target, PROGRESS, recipe=recipe, engine=engine.name, engines={engine.name: engine}
    )


def leftovers() -> list[str]:
    client = docker.from_env()
    try:
        return [str(container.name) for container in client.containers.list(all=True)]
    finally:
        client.close()


def test_msmodelslim_in_the_base_image(source: Path, dynamic: Path, devices: Path, tmp_path: Path) -> None:
    made = run(MsmodelslimEngine(ChipRunner(Base(IMAGE, devices))), source, tmp_path / "made", "w8a8-dynamic")
    for path in dynamic.glob("quant_model_*"):
        assert (made.directory / path.name).read_bytes() == path.read_bytes()
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in made.directory.iterdir())
    assert {path.name for path in made.directory.iterdir()} == {path.name for path in dynamic.iterdir()}
    assert leftovers() == []


def test_no_chip_is_said_at_once(source: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(DuopackError, match="no chip"):
        run(
            MsmodelslimEngine(ChipRunner(Base(IMAGE, tmp_path / "none"))),
            source,
            tmp_path / "made",
            "w8a8-dynamic",
        )
    with pytest.raises(DuopackError, match="shows none") as caught:
        run(W8a8scEngine(Base(IMAGE, tmp_path / "none"), RANKS), source, tmp_path / "made", "w8a8sc")
    assert "Eco-Tech/Qwen3-8B-w8a8sc-310-vllm" in caught.value.mend


def test_w8a8sc_for_two_ranks(source: Path, devices: Path, tmp_path: Path) -> None:
    made = run(W8a8scEngine(Base(IMAGE, devices), RANKS), source, tmp_path / "made", "w8a8sc")
    names = {path.name for path in made.directory.iterdir()}
    assert {"model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors", "config.json"} < names
    assert "ori_quant_model_description.json" not in names
    assert made.record.engine == "w8a8sc"
    assert leftovers() == []


def test_a_lost_rank_is_found_though_the_script_succeeds(source: Path, devices: Path, tmp_path: Path) -> None:
    with pytest.raises(DuopackError, match="rank 1 has 0 files"):
        run(W8a8scEngine(Base("quantizers:lossy", devices), RANKS), source, tmp_path / "made", "w8a8sc")
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / ".made.partial").exists()
    assert leftovers() == []
