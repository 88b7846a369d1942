"""What the push benchmark counts, and what it makes of the counts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import peers  # noqa: E402
import push  # noqa: E402
from material import Material, make_weights  # noqa: E402
from measure import BenchError, CountingProxy, Sample, disk_usage, run  # noqa: E402

from pipeline.weights.check import check_weights  # noqa: E402

MIB = 1 << 20


def round_of(ours: float, raw: float, docker: float, memory: int = 100 * 10**6) -> dict[str, Sample]:
    return {
        push.OURS: Sample(ours, memory=memory),
        push.AGAIN: Sample(0.5, memory=50 * 10**6, sent=30_000),
        push.RAW: Sample(raw),
        "docker": Sample(docker * 2),
        "docker (BuildKit)": Sample(docker),
    }


def test_ratios_are_of_one_round_and_the_median_counts() -> None:
    rounds = [round_of(5, 4, 40), round_of(50, 40, 400), round_of(9, 4, 40)]
    assert push.ratio(rounds, push.OURS, push.RAW) == 1.25
    assert push.ratio(rounds, "buildah", push.RAW) is None


@pytest.mark.parametrize(
    ("rounds", "missed"),
    [
        ([round_of(5, 4, 40)], []),
        ([round_of(5.1, 4, 40)], ["duopack / raw limit"]),
        ([round_of(4, 4, 20)], ["docker, the faster builder / duopack"]),
        ([round_of(4, 4, 40, memory=301 * 10**6)], ["duopack's memory, MB"]),
        ([{push.AGAIN: Sample(2.5, sent=2 * MIB)}], ["seconds for", "bytes sent for"]),
    ],
)
def test_a_missed_target_is_found_and_the_faster_docker_counts(
    rounds: list[dict[str, Sample]], missed: list[str]
) -> None:
    found = [target.text for target in push.judge(rounds) if target.met is False]
    assert len(found) == len(missed)
    assert all(text.startswith(part) for text, part in zip(found, missed, strict=True))


def test_what_was_not_measured_is_neither_reached_nor_missed() -> None:
    rounds = [{push.OURS: Sample(1.0, memory=MIB)}]
    assert {target.met for target in push.judge(rounds)} == {None, True}
    text = push.as_text(MIB, rounds, push.judge(rounds), {"docker": "dockerd is not installed"})
    assert "not measured: docker: dockerd is not installed" in text
    assert "MISSED" not in text


def test_the_proxy_counts_what_goes_to_the_server_only() -> None:
    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            while connection.recv(4096):
                connection.sendall(b"x" * 10_000)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        with CountingProxy(f"127.0.0.1:{server.getsockname()[1]}") as proxy:
            host, _, port = proxy.host.partition(":")
            with socket.create_connection((host, int(port)), timeout=10) as client:
                for _ in range(3):
                    client.sendall(b"a" * 1000)
                    received = 0
                    while received < 10_000:
                        received += len(client.recv(20_000))
            assert proxy.sent == 3000


def test_a_file_with_two_names_takes_its_place_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(MIB))
    before = disk_usage(tmp_path)
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    (tmp_path / "dangling").symlink_to("nowhere")
    assert before >= MIB
    assert disk_usage(tmp_path) == before


def test_a_command_gives_seconds_and_memory_and_a_failing_one_its_output() -> None:
    large = run([sys.executable, "-c", f"b = bytes({200 * MIB}); b = bytearray(b)"], env=dict(os.environ))
    assert large.seconds > 0
    assert large.memory is not None
    assert large.memory > 200 * MIB
    with pytest.raises(BenchError, match="no space"):
        run([sys.executable, "-c", "raise SystemExit('no space')"], env=dict(os.environ))


def test_the_client_that_came_with_the_engine_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, name, version in (
        ("a", "docker", "28.2"),
        ("b", "docker", "20.10"),
        ("b", "dockerd", "20.10"),
    ):
        program = tmp_path / folder / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\necho 'Docker version {version}, build 1'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/a:{tmp_path}/b:{os.environ['PATH']}")
    assert peers.docker_client() == str(tmp_path / "b" / "docker")


def test_the_weights_are_a_whole_checkpoint_that_hardly_compresses(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    make_weights(tmp_path, 0.03)
    found = check_weights(tmp_path, load_format="auto", tensor_parallel=1)
    assert len(found.files) == 4
    assert found.size == pytest.approx(0.03 * (1 << 30), rel=0.01)
    packed = subprocess.run(["gzip", "-1", "-c", tmp_path / found.files[0]], capture_output=True, check=True)
    assert 0.7 < len(packed.stdout) * 4 / found.size < 0.95


def test_another_length_changes_the_catalog_and_nothing_else(tmp_path: Path) -> None:
    material = Material(tmp_path)
    material.write_catalog(4096)
    before = material.catalog.read_text()
    material.write_catalog(8192)
    assert material.catalog.read_text() == before.replace("4096", "8192")
