"""A base image that really runs: busybox, bash, a chip that is an empty file, and a stand-in for vLLM."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.oci.digest import Digest
from pipeline.oci.image import Image, Layer
from pipeline.oci.layout import LayoutSink
from pipeline.oci.model import OCI_LAYER_GZIP
from pipeline.oci.transfer import write_image

PLATFORM = "linux/" + {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
APPLETS = ("sh", "cat", "find", "grep", "head", "nc", "sha256sum", "sleep", "sort", "touch", "xargs")
ENTRY = '#!/bin/sh\nexec "$@"\n'
VLLM = """#!/bin/bash
# vllm serve MODEL --served-model-name NAME … --port PORT …
if [[ -n ${VLLM_CRASHES:-} ]]; then
  echo 'loading weights'
  echo 'RuntimeError: NPU out of memory' >&2
  exit 3
fi
export ROOT=$2
while (($#)); do
  case $1 in
    --served-model-name) export NAME=$2 ;;
    --port) port=$2 ;;
  esac
  shift
done
exec nc -ll -p "$port" -e /bin/answer
"""
ANSWER = r"""#!/bin/bash
read -r method path _
length=0
while read -r line && line=${line%$'\r'} && [[ -n $line ]]; do
  if [[ ${line,,} == content-length:* ]]; then length=${line#*: }; fi
done
body=$(head -c "$length")
status='200 OK' out=
case "$method $path" in
  'GET /v1/models') out='{"data": [{"id": "'$NAME'", "root": "'$ROOT'", "max_model_len": 4096}]}' ;;
  'POST /v1/chat/completions')
    out='{"choices": [{"message": {"content": "我是一个测试用的模型。"}}]}'
    if [[ $body == *no-such-model* ]]; then status='404 Not Found'; fi
    ;;
esac
LC_ALL=C
printf 'HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s' "$status" "${#out}" "$out"
"""


def make_runnable_base(directory: Path, tag: str, **environ: str) -> None:
    """Writes it into an OCI layout, with one compressed layer as a registry has it."""
    tar = _root()
    blob = _Blob(gzip.compress(tar, 1, mtime=0))
    config = {
        "Entrypoint": ["/entry.sh"],
        "Env": [
            "PATH=/bin",
            "DUOPACK_DEVICE_DIR=/fake-dev",
            *(f"{name}={value}" for name, value in environ.items()),
        ],
    }
    image = Image.scratch(PLATFORM)
    image = replace(image, config={**image.config, "config": config}).with_layers(
        [Layer(blob, Digest.of(tar))]
    )
    write_image(image, LayoutSink(directory, tag))


def _root() -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        busybox = shutil.which("busybox")
        assert busybox
        _add(tar, "bin/busybox", Path(busybox).read_bytes())
        for name in APPLETS:
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
        _add(tar, "bin/bash", Path("/bin/bash").read_bytes())
        listed = subprocess.run(["ldd", "/bin/bash"], capture_output=True, text=True, check=True).stdout
        for path in re.findall(r"(/\S+)", listed):
            _add(tar, path.lstrip("/"), Path(path).read_bytes())
        for name, text in {"entry.sh": ENTRY, "bin/vllm": VLLM, "bin/answer": ANSWER}.items():
            _add(tar, name, text.encode())
        _add(tar, "fake-dev/davinci0", b"")
        tmp = tarfile.TarInfo("tmp")
        tmp.type, tmp.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(tmp)
    return data.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o755
    tar.addfile(member, io.BytesIO(data))


@dataclass(frozen=True)
class _Blob:
    data: bytes
    media_type: str = OCI_LAYER_GZIP

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def digest(self) -> Digest:
        return Digest.of(self.data)

    def read(self, offset: int = 0):
        yield self.data[offset:]


def write_weights(directory: Path, files: int, size: int) -> None:
    """Weights in `files` safetensors files of about `size` bytes each, with their index, in place of those there."""
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    names = [f"model-{number:05}-of-{files:05}.safetensors" for number in range(1, files + 1)]
    for number, name in enumerate(names):
        header = {f"part{number}.weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
        text = json.dumps(header).encode()
        (directory / name).write_bytes(len(text).to_bytes(8, "little") + text + os.urandom(size))
    weight_map = {f"part{number}.weight": name for number, name in enumerate(names)}
    index = {"metadata": {"total_size": files * size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
