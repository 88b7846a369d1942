"""`duopack demo`: the whole job, and nothing of the user's touched."""

from __future__ import annotations

import json
import os
import subprocess
import threading

from support.project import duopack, run

from pipeline.oci.layout import LayoutSource


def test_the_demo_builds_reads_back_and_tells_what_to_type_next(tmp_path):
    ran = run("demo", "--work", tmp_path / "w")
    assert ran.code == 0, ran.err
    digest = LayoutSource(tmp_path / "w" / "demo").manifest("latest")[0].digest
    assert digest in ran.out
    assert "nox -s build-9b" in ran.out
    assert "/models/scripts/ndemo.sh" in ran.out
    again = run("demo", "--work", tmp_path / "other", "--json")
    assert again.json["built"]["digest"] == digest
    assert again.json["read_back"]["digest"] == digest


def test_the_users_endpoint_token_proxy_and_cache_are_left_alone(tmp_path, monkeypatch):
    values = {
        "MODELSCOPE_ENDPOINT": "http://127.0.0.1:1",
        "MODELSCOPE_API_TOKEN": "secret",
        "MODELSCOPE_CACHE": str(tmp_path / "cache"),
        "http_proxy": "http://127.0.0.1:1",
        "no_proxy": "elsewhere.example",
        "DUOPACK_REGISTRY": "registry.example/x",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    home = tmp_path / "home"
    home.mkdir()
    environ = {**os.environ, "HOME": str(home)}
    done = subprocess.run(
        duopack("demo", "--work", tmp_path / "w", "--json"),
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["built"]["destination"] == f"oci:{tmp_path}/w/demo"
    assert not (tmp_path / "cache").exists()
    assert [path for path in home.rglob("*") if path.is_file()] == []
    assert run("demo", "--work", tmp_path / "w2").code == 0
    assert {name: os.environ[name] for name in values} == values


def test_two_demos_at_a_time_in_one_directory_both_succeed(tmp_path):
    codes = []

    def one() -> None:
        done = subprocess.run(duopack("demo", "--work", tmp_path / "w"), capture_output=True, check=False)
        codes.append(done.returncode)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0, 0]
