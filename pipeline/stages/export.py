"""Images for a host without a network: one archive, the same in parts with a script, or an OCI layout.

An archive is written in one pass in constant memory, and is visible whole or not at all. Its bytes follow from the
images, their names and what is left out.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pipeline.errors import DuopackError, UsageError
from pipeline.files import FileRecord, disk_errors, require_space, sync_directory, write_atomically
from pipeline.oci.bundle import Bundle, Chosen, needless, unique_tags
from pipeline.oci.digest import Digest
from pipeline.oci.hashing import Piece, SideHash
from pipeline.oci.layout import LayoutSink
from pipeline.oci.model import Descriptor, OnBytes
from pipeline.oci.partial import PartialFile, make_directory, sweep
from pipeline.oci.split import MAX_PARTS, PartWriter
from pipeline.oci.transfer import copy_image
from pipeline.reports.progress import Progress
from pipeline.stages.sending import Sending

STEM = "images.tar"
SMALLEST_PART = 1 << 20
_ANOTHER_DISK = "free that much, or write to another disk"
FAT32_LIMIT = (4 << 30) - 1
"""The largest file that a FAT32 disk holds, in bytes."""


@dataclass(frozen=True)
class ExportedImage:
    """An image of an export: the name that it has on the other side, its digest, and how many layers it brings."""

    name: str
    digest: str
    layers: int
    left_out: int


@dataclass(frozen=True)
class Exported:
    """What was written; sizes in bytes. `sha256` is a single archive's; `parts` are the files of a split one."""

    destination: str
    form: str
    images: tuple[ExportedImage, ...]
    size: int
    left_out: int
    sha256: str | None
    parts: tuple[FileRecord, ...]
    seconds: float


def export_archive(
    images: Sequence[Chosen],
    since: Sequence[Chosen],
    destination: Path,
    progress: Progress,
    *,
    part_size: int | None = None,
) -> Exported:
    """Writes one archive for `docker load`, or with `part_size` (bytes) a directory with its parts.

    Layers are left out that an engine with the images of `since` does not open. Raises UsageError for a destination
    that cannot be, DuopackError when a disk is full or a source fails.
    """
    started = time.monotonic()
    bundle = Bundle(tuple(images), needless(images, since))
    sha256 = _write_file(bundle, destination, progress) if part_size is None else None
    parts = _write_parts(bundle, since, destination, part_size, progress) if part_size else ()
    return Exported(
        destination=str(destination),
        form="archive" if part_size is None else "parts",
        images=_told(images, bundle.omitted),
        size=bundle.size,
        left_out=_size_of(images, bundle.omitted),
        sha256=sha256,
        parts=parts,
        seconds=round(time.monotonic() - started, 3),
    )


def export_layout(
    images: Sequence[Chosen], since: Sequence[Chosen], destination: Path, parallel: int, progress: Progress
) -> Exported:
    """Copies images into an OCI layout, each under a tag of its own; blobs that several have are there once.

    Layers that an image of `since` has are left out, wherever they lie in it. What an earlier run wrote is kept.
    """
    started = time.monotonic()
    Bundle(tuple(images))  # refuses two images of one name
    omitted = frozenset(layer.digest for image in since for layer in image.layers)
    wanted = {
        layer.digest: layer for image in images for layer in image.layers if layer.digest not in omitted
    }
    there = LayoutSink(destination)
    missing = [layer for layer in wanted.values() if not there.has(layer.digest, layer.size)]
    require_space(destination, sum(layer.size for layer in missing), purpose="the export", mend=_ANOTHER_DISK)
    for image, tag in zip(images, unique_tags([image.name for image in images]), strict=True):
        full = f"{image.name.registry}/{image.name.repository}:{image.name.tag}"
        sink = LayoutSink(destination, tag, full, elsewhere=omitted)
        sending = Sending(progress, sink)
        digest = str(image.digest)
        copy_image(image.source, digest, None, sink, parallel=parallel, on_layer=sending)
    return Exported(
        destination=str(destination),
        form="layout",
        images=_told(images, omitted),
        size=sum(layer.size for layer in wanted.values()),
        left_out=_size_of(images, omitted),
        sha256=None,
        parts=(),
        seconds=round(time.monotonic() - started, 3),
    )


def _write_file(bundle: Bundle, destination: Path, progress: Progress) -> str:
    if destination.is_dir():
        raise UsageError(
            "this is a directory", where=str(destination), mend="name a file, or give --split for parts"
        )
    prefix = f".{destination.name}.partial-"
    make_directory(destination.parent)
    sweep(destination.parent, prefix)
    require_space(destination.parent, bundle.size, purpose="the export", mend=_ANOTHER_DISK)
    with PartialFile(destination.parent, prefix) as partial, SideHash() as hasher:

        def write(piece: Piece) -> None:
            hasher.update(piece)
            partial.write(piece)

        _write(bundle, write, progress)
        sha256 = hasher.hexdigest()
        partial.commit(destination)
    return sha256


def _write_parts(
    bundle: Bundle, since: Sequence[Chosen], destination: Path, part_size: int, progress: Progress
) -> tuple[FileRecord, ...]:
    _check_parts(destination, bundle.size, part_size)
    make_directory(destination.parent)
    require_space(destination.parent, bundle.size, purpose="the export", mend=_ANOTHER_DISK)
    with _new_directory(destination) as partial:
        writer = PartWriter(partial, STEM, part_size)
        try:
            _write(bundle, writer.write, progress)
            parts = writer.finish()
        finally:
            writer.close()
        others = {
            "load.sh": files("pipeline").joinpath("templates", "load.sh").read_bytes(),
            "IMAGES": _lines(bundle.images),
        }
        if bundle.omitted:
            others["NEEDS"] = _lines(since)
        for name, data in others.items():
            write_atomically(partial / name, data, mode=0o755 if name == "load.sh" else 0o644)
        sums = {one.path: one.sha256 for one in parts}
        sums |= {name: Digest.of(data).hex for name, data in others.items()}
        text = "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(sums.items()))
        write_atomically(partial / "SHA256SUMS", text.encode())
    return parts


def _check_parts(destination: Path, size: int, part_size: int) -> None:
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UsageError(
            "it is there already, and not an empty directory",
            where=str(destination),
            mend="name a new directory for the parts, or remove this one",
        )
    if part_size < SMALLEST_PART or size > part_size * MAX_PARTS:
        raise UsageError(
            f"parts of {part_size} bytes are too small for {size} bytes: at most {MAX_PARTS} parts of 1 MiB and more",
            where="--split",
            mend="give a larger size, as 4000M",
        )


@contextmanager
def _new_directory(destination: Path) -> Iterator[Path]:
    """A directory that gets its name when the block has ended well; what a killed run left is removed."""
    partial = destination.with_name(f".{destination.name}.partial")
    with ExitStack() as stack, disk_errors(partial):
        partial.mkdir(exist_ok=True)
        handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, handle)
        try:
            # The lock goes with the process, however it ends: an unlocked one is nobody's.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DuopackError(
                "another duopack is exporting to it",
                where=str(destination),
                mend="wait for it, or name another",
            ) from None
        for leftover in partial.iterdir():
            leftover.unlink()
        try:
            yield partial
            sync_directory(partial)
            partial.rename(destination)
            sync_directory(destination.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _write(bundle: Bundle, write: Callable[[Piece], object], progress: Progress) -> None:
    with progress.bar("export", bundle.size) as bar:

        def start(layer: Descriptor) -> OnBytes:  # noqa: ARG001
            return bar.advance

        bundle.write(write, start)


def _lines(images: Sequence[Chosen]) -> bytes:
    """Config digest (the id in a classic engine), manifest digest and name: one line for each image."""
    return "".join(
        f"{Digest.of(image.config)} {image.digest} {image.name.name_tag}\n" for image in images
    ).encode()


def _told(images: Sequence[Chosen], omitted: frozenset[Digest]) -> tuple[ExportedImage, ...]:
    return tuple(
        ExportedImage(
            image.name.name_tag,
            image.digest,
            len(image.layers),
            sum(layer.digest in omitted for layer in image.layers),
        )
        for image in images
    )


def _size_of(images: Sequence[Chosen], digests: frozenset[Digest]) -> int:
    """Bytes of the layers with these digests, each once."""
    sizes = {
        layer.digest: layer.size for image in images for layer in image.layers if layer.digest in digests
    }
    return sum(sizes.values())
