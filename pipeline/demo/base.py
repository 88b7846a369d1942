"""A tiny base image with the shape of the real one: its entrypoint and variables, no operating system."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.oci.image import Image, Layer
from pipeline.oci.layout import LayoutSink
from pipeline.oci.tar import TarEntry, TarLayer
from pipeline.oci.transfer import write_image

ENTRYPOINT = (
    "/bin/bash",
    "-c",
    'source /usr/local/Ascend/ascend-toolkit/set_env.sh && exec "$@"',
    "--",
)
NOTE = b"This stands in for vllm-ascend in the demo. It has no operating system and starts nothing.\n"


def make_base(directory: Path, tag: str, platform: str) -> None:
    """Writes the base for a platform into an OCI layout."""
    image = Image.scratch(platform)
    settings = {"Entrypoint": list(ENTRYPOINT), "Cmd": ["/bin/bash"], "Env": ["SOC_VERSION=ascend310p1"]}
    layer = TarLayer([TarEntry("etc/duopack-demo-base", 0o644, NOTE)])
    write_image(
        replace(image, config={**image.config, "config": settings}).with_layers([Layer(layer)]),
        LayoutSink(directory, tag),
    )
