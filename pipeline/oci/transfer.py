"""Moving an image to where it shall be: what is there is skipped, the rest is sent, the manifest last."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Protocol, runtime_checkable

from pipeline.errors import DuopackError
from pipeline.oci.digest import Digest
from pipeline.oci.documents import parse_object, resolve
from pipeline.oci.hashing import pour
from pipeline.oci.image import Image, Layer
from pipeline.oci.model import MAX_CONFIG, Blob, Descriptor, OnBytes, Sink, Source
from pipeline.oci.tar import TarLayer

# A worker that does not notice the end of the work within this time is cut off through the sink.
_PATIENCE_SECONDS = 2.0
_NOWHERE = Digest.of(b"no blob has this content: asked for to see whether a destination answers")


class LayerProgress(Protocol):
    """Where a transfer tells how far it is. Called from several threads."""

    def start(self, title: str, size: int) -> OnBytes:
        """A layer of `size` bytes begins to move; the result is told of every piece."""
        ...

    def skipped(self, title: str, size: int) -> None:
        """A layer need not move."""
        ...


class Silent:
    """Progress that nobody looks at."""

    def start(self, title: str, size: int) -> OnBytes:  # noqa: ARG002
        return lambda _: None

    def skipped(self, title: str, size: int) -> None:
        pass


@runtime_checkable
class PlanningSink(Protocol):
    """A sink that wants to know the order of all layers before it is asked for any."""

    def plan(self, layers: Sequence[tuple[Digest | None, Digest | None]]) -> None:
        """The (digest, diff id) of each layer, bottom first, as far as they are known."""
        ...


def write_image(
    image: Image,
    sink: Sink,
    *,
    parallel: int = 4,
    known: Mapping[str, Digest] | None = None,
    on_layer: LayerProgress | None = None,
    remember: Callable[[str, Digest], None] = lambda _key, _digest: None,
) -> Descriptor:
    """Writes an image to a sink and returns the manifest's descriptor.

    `known` maps a `TarLayer.key` to the digest that such a layer once had: those are asked for and not read
    when they are there. `remember` is told, from any thread, the digests of layers that were read. At most
    `parallel` layers move at once; with one, in their order. Each layer's bytes are read once.

    Before the manifest every layer is asked for once more, since a registry's garbage collection may have
    taken it, and sent again if it is gone. The first failure, or Ctrl-C, stops the rest, gives the
    sink up and is raised when every thread has ended.
    """
    known = known or {}
    parcels = [_Parcel.of(layer, known) for layer in image.layers]

    def finish(digests: list[Digest]) -> tuple[bytes, bytes, tuple[Descriptor, ...]]:
        finished = image.finish(digests)
        return finished.manifest, finished.config, finished.layers

    return _Transfer(sink, parallel, on_layer or Silent(), remember).run(parcels, finish)


def missing_layers(
    image: Image, asked: Sequence[Layer], sink: Sink, known: Mapping[str, Digest]
) -> tuple[Layer, ...]:
    """Those of `asked`, layers of the image, that `write_image` would have to send, as far as is known now.

    Asks the sink at least once, so that a destination that is down or wants a login is found before any work.
    Raises DuopackError as the sink does.
    """
    if isinstance(sink, PlanningSink):
        parcels = [_Parcel.of(layer, known) for layer in image.layers]
        sink.plan([(parcel.blob.digest, parcel.diff_id) for parcel in parcels])
    blobs = [(layer, _Parcel.of(layer, known).blob) for layer in asked]
    return tuple(
        layer for layer, blob in blobs if not sink.has(blob.digest or _NOWHERE, blob.size) or not blob.digest
    )


def copy_image(
    source: Source,
    reference: str,
    platform: str | None,
    sink: Sink,
    *,
    parallel: int = 4,
    on_layer: LayerProgress | None = None,
) -> Descriptor:
    """Copies an image byte for byte, its manifest unchanged, and returns the manifest's descriptor.

    An index is resolved for `platform` and only that image is copied; without a platform it must hold one.
    """
    resolved = resolve(source, reference, platform)
    raw = bytearray()
    pour(source.blob(resolved.manifest.config), raw.extend, lambda _: None)
    config = bytes(raw)
    descriptors = resolved.manifest.layers
    diff_ids = _diff_ids(config, len(descriptors))
    parcels = [
        _Parcel(source.blob(one), f"layer {one.digest.hex[:12]}", diff_id)
        for one, diff_id in zip(descriptors, diff_ids, strict=True)
    ]
    transfer = _Transfer(sink, parallel, on_layer or Silent(), lambda _key, _digest: None)
    return transfer.run(parcels, lambda _: (resolved.data, config, descriptors))


@dataclass(frozen=True)
class _Parcel:
    """A blob on its way. `key` is set when its digest is worth remembering."""

    blob: Blob
    title: str
    diff_id: Digest | None
    key: str | None = None

    @classmethod
    def of(cls, layer: Layer, known: Mapping[str, Digest]) -> _Parcel:
        blob = layer.blob
        if not isinstance(blob, TarLayer):
            return cls(blob, layer.title, layer.diff_id or blob.digest)
        digest = blob.digest or known.get(blob.key)
        return cls(replace(blob, digest=digest), layer.title or blob.title, digest, blob.key)

    @property
    def identity(self) -> object:
        """Equal for parcels with the same bytes: those move once."""
        return self.blob.digest or self.key or id(self.blob)


_Outcome = tuple[_Parcel, Digest | BaseException]


class _Stopped(BaseException):
    """Ends a worker whose work is of no use any more; no retry may take it for a failure of the network."""


class _Transfer:
    """One image on its way.

    Threads of its own, and C queues: Ctrl-C in the middle of the Python locks of concurrent.futures can leave
    them held for ever.
    """

    def __init__(
        self, sink: Sink, parallel: int, progress: LayerProgress, remember: Callable[[str, Digest], None]
    ) -> None:
        self._sink = sink
        self._width = max(1, min(parallel, sink.parallel))
        self._progress = progress
        self._remember = remember
        self._threads: list[threading.Thread] = []
        self._stopped = False

    def run(
        self,
        parcels: list[_Parcel],
        finish: Callable[[list[Digest]], tuple[bytes, bytes, tuple[Descriptor, ...]]],
    ) -> Descriptor:
        try:
            if isinstance(self._sink, PlanningSink):
                self._sink.plan([(parcel.blob.digest, parcel.diff_id) for parcel in parcels])
            unique = list({parcel.identity: parcel for parcel in parcels}.values())
            sent = self._all(unique, self._send)
            self._all(unique, lambda parcel: self._send_again(parcel, sent[parcel.identity]))
            manifest, config, layers = finish([sent[parcel.identity] for parcel in parcels])
            descriptor = self._sink.put_manifest(manifest, config, layers)
        except BaseException as error:
            self._give_up(error)
            raise
        if descriptor.digest != Digest.of(manifest):
            raise DuopackError(f"the image was written as {descriptor.digest}, not as {Digest.of(manifest)}")
        return descriptor

    def _all(self, parcels: list[_Parcel], work: Callable[[_Parcel], Digest]) -> dict[object, Digest]:
        """The work on each parcel, in order when there is one worker; the first failure is raised at once."""
        waiting: SimpleQueue[_Parcel] = SimpleQueue()
        done: SimpleQueue[_Outcome] = SimpleQueue()
        for parcel in parcels:
            waiting.put(parcel)
        for _ in range(min(self._width, len(parcels))):
            thread = threading.Thread(
                target=self._labour, args=(waiting, done, work), name="duopack-layer", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        found: dict[object, Digest] = {}
        for _ in parcels:
            parcel, outcome = _next(done)
            if isinstance(outcome, BaseException):
                raise outcome
            found[parcel.identity] = outcome
        return found

    def _labour(
        self,
        waiting: SimpleQueue[_Parcel],
        done: SimpleQueue[_Outcome],
        work: Callable[[_Parcel], Digest],
    ) -> None:
        with suppress(Empty):
            while not self._stopped:
                parcel = waiting.get_nowait()
                try:
                    done.put((parcel, work(parcel)))
                except BaseException as error:
                    # In this order: the cause is told before what it stops.
                    done.put((parcel, error))
                    self._stopped = True

    def _send(self, parcel: _Parcel) -> Digest:
        digest = parcel.blob.digest
        if digest and self._sink.has(digest, parcel.blob.size):
            self._progress.skipped(parcel.title, parcel.blob.size)
            return digest
        sent = self._put(parcel)
        if parcel.key:
            self._remember(parcel.key, sent)
        return sent

    def _send_again(self, parcel: _Parcel, digest: Digest) -> Digest:
        if self._sink.has(digest, parcel.blob.size):
            return digest
        again = self._put(parcel)
        if again != digest:
            raise DuopackError(f"the layer '{parcel.title}' has other bytes than a moment ago")
        return again

    def _put(self, parcel: _Parcel) -> Digest:
        on_bytes = self._progress.start(parcel.title, parcel.blob.size)

        def counted(count: int) -> None:
            if self._stopped:
                raise _Stopped
            on_bytes(count)

        return self._sink.put_blob(parcel.blob, counted)

    def _give_up(self, error: BaseException) -> None:
        self._stopped = True
        end = time.monotonic() + _PATIENCE_SECONDS
        started = [thread for thread in self._threads if thread.ident]
        for thread in started:
            thread.join(max(0.0, end - time.monotonic()))
        try:
            self._sink.abort()
        except Exception as failure:
            error.add_note(f"giving the destination up failed too: {failure}")
        for thread in started:
            thread.join()


def _next(done: SimpleQueue[_Outcome]) -> _Outcome:
    # A signal just before the wait begins does not end it: so waits are short.
    while True:
        with suppress(Empty):
            return done.get(timeout=0.2)


def _diff_ids(config: bytes, count: int) -> list[Digest | None]:
    """The config's diff ids when they are what they should be; a copy only needs them to skip layers."""
    rootfs = parse_object(config, where="config", limit=MAX_CONFIG).get("rootfs")
    found = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(found, list) or len(found) != count:
        return [None] * count
    return [Digest(str(text)) for text in found]
