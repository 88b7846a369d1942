"""What an engine is asked before an image is sent: which layers it has. Loading is tried in tests/e2e."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.oci.daemon import DaemonSink
from pipeline.oci.digest import Digest

A, B, C, D = (Digest("sha256:" + letter * 64) for letter in "abcd")


class Engine:
    """The three questions of `plan`, answered for the given chains of layers."""

    def __init__(self, *chains: Sequence[str], driver_type: str = "") -> None:
        self._chains = chains
        self._driver_type = driver_type

    def info(self) -> dict[str, Any]:
        status = [["Backing Filesystem", "extfs"]]
        return {
            "DriverStatus": [*status, ["driver-type", self._driver_type]] if self._driver_type else status
        }

    def images(self) -> list[dict[str, Any]]:
        return [{"Id": number} for number in range(len(self._chains))]

    def inspect_image(self, number: int) -> dict[str, Any]:
        layers = list(self._chains[number])
        return {"RootFS": {"Type": "layers", "Layers": layers} if layers else None}


def present(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, *layers: tuple[Digest | None, Digest | None]
) -> set[Digest]:
    sink = DaemonSink("x:y")
    monkeypatch.setattr(sink, "_engine", engine)
    sink.plan(layers)
    return {one for one, _ in layers if one and sink.has(one, 1)}


def test_the_longest_common_chain_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine([], [A], [A, B, D], [B, C])
    assert present(monkeypatch, engine, (A, A), (B, B), (C, C)) == {A, B}


def test_layers_are_known_by_diff_id_and_not_by_blob(monkeypatch: pytest.MonkeyPatch) -> None:
    assert present(monkeypatch, Engine([A, B]), (C, A), (A, D)) == {C}


def test_a_chain_ends_at_a_layer_that_is_not_known_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert present(monkeypatch, Engine([A, B, C]), (A, A), (None, None), (C, C)) == {A}


def test_a_layer_that_comes_again_higher_up_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert present(monkeypatch, Engine([A, B]), (A, A), (B, B), (C, C), (A, A)) == {B}


def test_containerds_store_is_sent_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine([A, B], driver_type="io.containerd.snapshotter.v1")
    assert present(monkeypatch, engine, (A, A), (B, B)) == set()
