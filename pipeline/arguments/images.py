"""What makes an image, moves it, or looks into it."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.arguments.common import PLATFORMS, Add


def add_commands(add: Add) -> None:
    build = add("build", "build images: download, check, layer, and send in one pass")
    build.add_argument(
        "keys", nargs="*", metavar="KEY", help="a model, a profile (nn27) or a set of the catalog"
    )
    build.add_argument("--all", action="store_true", help="every model of the catalog in one image")
    build.add_argument(
        "--profile",
        metavar="NAME",
        help="the start script that is the image's command (default: the first; a set lists its models)",
    )
    build.add_argument(
        "--to",
        metavar="DEST",
        help="where the image goes (default: the catalog's registry, or oci:build/KEY)",
    )
    build.add_argument(
        "--source",
        metavar="SRC",
        help="take the weights from here instead: modelscope:ID, huggingface:ID, dir:PATH",
    )
    build.add_argument(
        "--base", metavar="REF", help="a base of the catalog by name, or any image: docker://…, oci:DIR"
    )
    build.add_argument(
        "--platform",
        metavar="OS/ARCH[,…]",
        help="linux/arm64, linux/amd64, both with a comma, or all (default: the catalog's)",
    )
    build.add_argument(
        "--builder",
        choices=("duopack", "docker", "docker-classic"),
        default="duopack",
        help="docker: 'docker build' in the local engine, by BuildKit (or the classic builder)",
    )
    build.add_argument(
        "--locked", action="store_true", help="refuse what models.lock does not hold already (for CI)"
    )
    build.add_argument("--dry-run", action="store_true", help="show what would be in the image, and stop")

    publish = add("publish", "copy a built image to a registry, byte for byte")
    publish.add_argument("image", metavar="KEY|IMAGE", help="a key (its image in oci:build/KEY), or an image")
    publish.add_argument("--to", metavar="DEST", help="default: where the catalog or DUOPACK_REGISTRY says")
    publish.add_argument(
        "--from-registry", metavar="HOST/NAMESPACE", help="take the key's image from here, not from build/"
    )
    publish.add_argument("--base", metavar="NAME", help="the base that the image was built on")
    publish.add_argument("--platform", metavar="OS/ARCH", choices=PLATFORMS, help="its platform")

    verify = add("verify", "judge an image where it lies: what it is, and whether it will serve")
    verify.add_argument(
        "image", metavar="KEY|IMAGE", help="an image, or a key (where its image is published)"
    )
    _add_looking(verify)
    verify.add_argument(
        "--locked", action="store_true", help="every difference from models.lock is an error (for CI)"
    )

    inspect = add("inspect", "show what is in an image and what it weighs; with two, what differs")
    inspect.add_argument(
        "image", metavar="KEY|IMAGE", help="an image, or a key (where its image is published)"
    )
    inspect.add_argument(
        "other", nargs="?", metavar="IMAGE2", help="compare with this one, as an update to it"
    )
    _add_looking(inspect)

    export = add("export", "write images into one archive, parts or a layout, to be carried elsewhere")
    export.add_argument(
        "images",
        nargs="+",
        metavar="KEY|IMAGE",
        help="keys (their images where 'build' puts them), or images",
    )
    export.add_argument(
        "to", metavar="FILE.tar|DIR", help="an archive for 'docker load', or a directory: an OCI layout"
    )
    export.add_argument(
        "--split",
        metavar="SIZE",
        help="DIR gets the archive in parts of this size (4095M), with checksums and a script that loads them",
    )
    export.add_argument(
        "--since",
        action="append",
        default=[],
        metavar="IMAGE",
        help="leave out layers of this image, which the other side has",
    )
    export.add_argument("--as", dest="name", metavar="NAME:TAG", help="the image's name on the other side")
    export.add_argument("--platform", metavar="OS/ARCH", choices=PLATFORMS, help="which image of several")

    bring = add(
        "import", "bring what 'duopack export' made into a registry or an engine", module="import_images"
    )
    bring.add_argument("path", type=Path, metavar="FILE|DIR")
    bring.add_argument("--to", metavar="DEST", help="where one image goes (default: the engine, by its name)")
    bring.add_argument(
        "--under",
        metavar="HOST/NAMESPACE",
        help="the registry for all of them (default: DUOPACK_REGISTRY)",
    )
    bring.add_argument(
        "--image", action="append", default=[], metavar="NAME", help="only this one (can be given again)"
    )
    bring.add_argument(
        "--have",
        action="append",
        default=[],
        metavar="IMAGE",
        help="an image in the same registry whose layers may be taken (can be given again)",
    )
    bring.add_argument("--platform", metavar="OS/ARCH", choices=PLATFORMS, help="which image of several")


def _add_looking(command: argparse.ArgumentParser) -> None:
    """What the commands that look into an image have in common."""
    command.add_argument("--deep", action="store_true", help="read, hash and check every byte")
    command.add_argument(
        "--platform", metavar="OS/ARCH", help="one image of several platforms (default: each of them)"
    )
    command.add_argument("--base", metavar="IMAGE", help="the base image, to tell its layers from the others")
    command.add_argument(
        "--limit", metavar="NAME=N", action="append", help="raise a bound on time or memory: seconds=3600"
    )
