"""Images into a Docker engine: the `docker load` archive, streamed while it is made.

Layers that the engine already has in the same chain are left out: moby's load looks a chain id up before it
opens the layer's file (moby, image/tarexport/load.go). It holds for the classic stores, not containerd's.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.errors import DuopackError, quoted
from pipeline.oci.archive import ArchiveWriter, manifest_descriptor
from pipeline.oci.digest import Digest
from pipeline.oci.documents import parse_object
from pipeline.oci.hashing import Piece
from pipeline.oci.model import MAX_CONFIG, Blob, Descriptor, OnBytes

if TYPE_CHECKING:
    from docker import APIClient

# The engine says nothing while it unpacks a layer: tens of GB on a slow disk take long.
_ENGINE_SECONDS = 6 * 3600
_CONNECT_MEND = (
    "start it, check DOCKER_HOST and your permission to use it, or write a docker-archive: instead"
)
# Pieces on their way to the engine: bounds the memory to a few MiB.
_AHEAD = 4
_PATIENCE_SECONDS = 5.0
_PRESENT = "layers/present-in-the-engine"


class _GivenUpError(Exception):
    """Ends the stream to the engine before its end, which makes the engine drop it."""


class DaemonSink:
    """Loads one image into the engine of DOCKER_HOST under `name_tag` (`name:tag`)."""

    def __init__(self, name_tag: str) -> None:
        self.parallel = 1
        self._name_tag = name_tag
        self._pieces: queue.Queue[Piece | None] = queue.Queue(_AHEAD)
        self._writer = ArchiveWriter(self._send)
        self._loader: threading.Thread | None = None
        self._failure: Exception | None = None
        self._given_up = threading.Event()
        self._present: frozenset[Digest] = frozenset()
        self._engine: APIClient | None = None

    def plan(self, layers: Sequence[tuple[Digest | None, Digest | None]]) -> None:
        """Told the (digest, diff id) of each layer before any is sent: finds those the engine has."""
        engine = self._connect()
        if not _is_classic(self._ask(engine.info)):
            return
        chains = [
            tuple(_layers_of(self._ask(engine.inspect_image, one["Id"]))) for one in self._ask(engine.images)
        ]
        count = _common_prefix([diff_id for _, diff_id in layers], chains)
        # A blob that comes again above the common chain has to be sent after all.
        self._present = frozenset(one for one, _ in layers[:count] if one) - {
            one for one, _ in layers[count:]
        }

    def has(self, digest: Digest, size: int) -> bool:  # noqa: ARG002
        """Whether the engine has the layer where this image needs it, or was sent it."""
        return digest in self._present or self._writer.has(digest)

    def put_blob(self, blob: Blob, on_bytes: OnBytes) -> Digest:
        return self._writer.add_layer(blob, on_bytes)

    def put_manifest(self, manifest: bytes, config: bytes, layers: tuple[Descriptor, ...]) -> Descriptor:
        """Ends the archive, waits until the engine has unpacked it, and asks the engine what it has now."""
        self._writer.add_image(self._name_tag, config, layers, dict.fromkeys(self._present, _PRESENT))
        self._writer.finish()
        self._put(None)
        self._join()
        self._read_back(config)
        return manifest_descriptor(manifest)

    def abort(self) -> None:
        """Cuts the stream: the engine drops what it was sent. Once it has all, it cannot be stopped."""
        self._given_up.set()
        if self._loader:
            self._loader.join(_PATIENCE_SECONDS)

    def _read_back(self, config: bytes) -> None:
        found = self._ask(self._connect().inspect_image, self._name_tag)
        wanted = parse_object(config, where="config", limit=MAX_CONFIG)["rootfs"]["diff_ids"]
        # containerd's store names an image by its manifest: there the layers tell.
        if found.get("Id") != Digest.of(config) and _layers_of(found) != wanted:
            raise DuopackError(
                f"the engine has another image than it was sent: {quoted(str(found.get('Id')), 80)}",
                where=f"docker-daemon:{self._name_tag}",
                mend="something else uses the same name: run the same command again",
            )

    def _send(self, piece: Piece) -> None:
        if self._loader is None:
            self._connect()
            self._loader = threading.Thread(target=self._load, name="duopack-docker-load", daemon=True)
            self._loader.start()
        if piece:
            self._put(piece)

    def _put(self, piece: Piece | None) -> None:
        """Hands a piece to the loader; a loader that has failed, or is to give up, takes none."""
        while True:
            if self._failure:
                raise self._engine_error(self._failure) from self._failure
            if self._given_up.is_set() or not (self._loader and self._loader.is_alive()):
                raise self._engine_error(_GivenUpError("it was cut off"))
            try:
                self._pieces.put(piece, timeout=0.2)
                return
            except queue.Full:
                continue

    def _load(self) -> None:
        try:
            for line in self._connect().load_image(self._stream(), quiet=False):  # type: ignore[no-untyped-call]
                if isinstance(line, dict) and (line.get("error") or line.get("errorDetail")):
                    raise DuopackError(quoted(str(line.get("error") or line["errorDetail"])))
        except Exception as error:
            self._failure = error

    def _stream(self) -> Iterator[Piece]:
        while True:
            if self._given_up.is_set():
                raise _GivenUpError("it was cut off")
            try:
                piece = self._pieces.get(timeout=0.2)
            except queue.Empty:
                continue
            if piece is None:
                return
            yield piece

    def _join(self) -> None:
        # In short waits, so that Ctrl-C is heard.
        while self._loader and self._loader.is_alive():
            self._loader.join(timeout=0.2)
        if self._failure:
            raise self._engine_error(self._failure) from self._failure

    def _connect(self) -> APIClient:
        if self._engine is None:
            import docker

            try:
                self._engine = docker.from_env(timeout=_ENGINE_SECONDS).api
                self._engine.ping()
            except Exception as error:
                raise self._engine_error(error, "the engine does not answer", _CONNECT_MEND) from error
        return self._engine

    def _ask(self, question: Any, *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except Exception as error:
            raise self._engine_error(error, "the engine does not answer a question") from error

    def _engine_error(
        self,
        error: Exception,
        what: str = "the engine did not load the image",
        mend: str = "look at the engine's log and its disk space, then run the same command again",
    ) -> DuopackError:
        reason = quoted(
            getattr(error, "explanation", None) or getattr(error, "what", None) or str(error), 300
        )
        return DuopackError(f"{what}: {reason}", where=f"docker-daemon:{self._name_tag}", mend=mend)


def _is_classic(info: dict[str, Any]) -> bool:
    """Whether the engine keeps images in moby's own store."""
    status = info.get("DriverStatus") or []
    return not any("io.containerd.snapshotter" in str(part) for line in status for part in line)


def _layers_of(image: dict[str, Any]) -> list[str]:
    layers = (image.get("RootFS") or {}).get("Layers") or []
    return [str(layer) for layer in layers]


def _common_prefix(wanted: Sequence[str | None], chains: Sequence[Sequence[str]]) -> int:
    """How many of the layers, from the bottom, some image of the engine has in the same order."""

    def shared(chain: Sequence[str]) -> int:
        pairs = zip(wanted, chain, strict=False)
        return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(chain)))

    return max(map(shared, chains), default=0)
