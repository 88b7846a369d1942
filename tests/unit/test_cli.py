"""The command line: every command's way in and out, and what it never does to who calls it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
import yaml
from support.project import duopack, refused, run

from pipeline.demo.hub import commit_of


def test_list_shows_each_key_what_it_serves_and_where_it_would_go(project):
    ran = project.run("list")
    assert ran.code == 0
    lines = {line.split()[0]: line for line in ran.out.splitlines()}
    assert list(lines) == ["KEY", "one", "nn1", "two", "both"]
    assert lines["nn1"].split()[1:3] == ["2", "no"]
    assert f"oci:{project.work}/both" in lines["both"]
    project.built("one")
    rows = {row["key"]: row for row in project.run("list", "--json").json}
    assert [rows[key]["locked"] for key in ("one", "nn1", "two", "both")] == [True, True, False, False]
    assert rows["one"] == {
        "key": "one",
        "chips": 1,
        "command": "n1.sh",
        "served_name": "tiny-one",
        "locked": True,
        "destination": f"oci:{project.work}/one",
        "description": rows["one"]["description"],
    }


def test_list_names_the_registry_that_the_environment_gives(project, monkeypatch):
    monkeypatch.setenv("DUOPACK_REGISTRY", "registry.example:5000/team")
    monkeypatch.setenv("DUOPACK_TAG", "{key}-1")
    rows = {row["key"]: row["destination"] for row in project.run("list", "--json").json}
    assert rows["both"] == "docker://registry.example:5000/team/both:both-1"
    monkeypatch.setenv("DUOPACK_REGISTRY", "Registry Example")
    refused(project.run("list"), 2, "DUOPACK_REGISTRY")


def test_the_schema_accepts_this_catalog_and_refuses_a_wrong_one(project):
    schema = json.loads(run("schema").out)
    content = yaml.safe_load((project.directory / "models.yaml").read_text())
    jsonschema.validate(content, schema)
    content["models"]["one"]["profiles"]["n1"]["tensor_parallel"] = 3
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, schema)


def test_check_passes_with_findings_and_fails_with_an_error(project):
    ran = project.run("check", "--json")
    assert ran.code == 0
    assert set(ran.json) == {"n1", "nn1", "n2"}
    project.content["bases"]["stand-in"]["vllm"] = "0.20.2"
    project.profile("n2", "two")["args"] = ["--no-such-option"]
    project.write()
    ran = project.run("check", "two")
    assert ran.code == 1
    assert "error: " in ran.out
    assert "--no-such-option" in ran.out
    assert "n1:" not in ran.out
    assert project.run("check", "one").code == 0
    refused(project.run("check", "three"), 2, "'three'")
    refused(project.run("check", "--base", "none-such"), 2, "none-such")


def test_scripts_are_those_that_the_image_has(project, tmp_path):
    project.built("one")
    ran = project.run("scripts", "one", "--to", tmp_path / "s", "--json")
    assert ran.code == 0, ran.err
    written = {Path(path).name: Path(path) for path in ran.json}
    assert set(written) == {"n1.sh", "nn1.sh", "list.sh", "healthcheck.sh", "launch.json"}
    assert os.access(written["n1.sh"], os.X_OK)
    layers = [path.read_bytes() for path in (project.work / "one" / "blobs" / "sha256").iterdir()]
    for path in written.values():
        assert any(path.read_bytes() in layer for layer in layers), path


def test_scripts_without_a_lock_say_that_the_base_is_not_known(project, tmp_path):
    ran = project.run("scripts", "one", "--to", tmp_path / "s")
    assert ran.code == 0
    assert "the base is not locked" in ran.err


def test_lock_resolves_what_is_missing_and_then_has_nothing_to_do(project):
    ran = project.run("lock", "--json")
    assert ran.code == 0, ran.err
    assert [(change["kind"], change["entry"]) for change in ran.json["changes"]] == [
        ("locked", "base stand-in"),
        ("locked", "model one"),
        ("locked", "model two"),
    ]
    locked = json.loads(project.lock.read_bytes())
    assert len(locked["bases"]["stand-in"]["platforms"]) == 2
    before = project.lock.read_bytes()
    ran = project.run("lock")
    assert ran.code == 0
    assert "nothing moved" in ran.out
    assert project.lock.read_bytes() == before


def moved(project) -> str:
    """Changes a file at the hub; returns its new content's length as the hub lists it."""
    path = project.weights() / "config.json"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content + b" \n")
    return str(len(content) + 2)


def test_lock_shows_what_moved_and_takes_it_only_with_update(project):
    project.run("lock")
    before = project.lock.read_bytes()
    moved(project)
    ran = project.run("lock", "one")
    assert ran.code == 1
    assert "moved    model one" in ran.out
    assert "config.json" in ran.out
    assert project.lock.read_bytes() == before
    assert project.run("lock", "two").code == 0
    ran = project.run("lock", "--update")
    assert ran.code == 0, ran.out
    assert project.lock.read_bytes() != before
    assert project.run("lock", "--check").code == 0


def test_lock_check_writes_nothing_also_in_a_directory_that_it_cannot_write(project):
    ran = project.run("lock", "--check")
    assert ran.code == 1
    assert not [path for path in project.directory.iterdir() if "lock" in path.name]
    project.run("lock")
    assert project.run("lock", "--check").code == 0
    project.content["models"]["one"]["files"] = {"exclude": ["tokenizer.json"]}
    project.write()
    before = project.lock.read_bytes()
    assert project.run("lock", "--check").code == 1
    assert project.lock.read_bytes() == before
    refused(project.run("lock", "--check", "--update"), 2, "not allowed with")


def test_lock_goes_on_after_a_failure_and_keeps_what_it_has(project):
    project.hub.faults.file_status = {}
    for path in project.weights("two").iterdir():
        path.unlink()
    project.weights("two").rmdir()
    ran = project.run("lock")
    assert ran.code == 1
    assert "failed   model two" in ran.out
    assert set(json.loads(project.lock.read_bytes())["models"]) == {"one"}


def test_lock_drops_what_left_the_catalog_with_update(project):
    project.run("lock")
    del project.content["models"]["two"], project.content["sets"]
    project.write()
    ran = project.run("lock")
    assert "left     model two" in ran.out
    assert "two" in json.loads(project.lock.read_bytes())["models"]
    project.run("lock", "--update")
    assert set(json.loads(project.lock.read_bytes())["models"]) == {"one"}


def test_lock_from_a_given_source(project):
    refused(project.run("lock", "--source", "dir:x"), 2, "--source is for one model")
    ran = project.run("lock", "one", "--source", "huggingface:tiny/one")
    assert ran.code == 0, ran.err
    locked = json.loads(project.lock.read_bytes())["models"]["one"]
    assert locked["source"] == "huggingface:tiny/one"
    assert locked["commit"] == commit_of(project.hub.files("tiny/one"))


@pytest.mark.parametrize(
    "words", [(), ("bild",), ("build",), ("build", "x", "--no-such"), ("smoke", "x", "--start-limit", "y")]
)
def test_wrong_words_are_one_paragraph_and_code_2_in_text_and_in_json(words):
    refused(run(*words), 2, "--help'")
    ran = run(*words, "--json")
    assert ran.code == 2
    assert set(ran.json["error"]) == {"what", "where", "mend"}


def test_help_and_version_end_well_and_soon():
    started = time.monotonic()
    done = subprocess.run(duopack("--help"), capture_output=True, text=True, check=True)
    assert "publish" in done.stdout
    assert subprocess.run(duopack("build", "--help"), capture_output=True, check=True).returncode == 0
    assert time.monotonic() - started < 5
    code = "import sys; from pipeline.arguments.parser import make_parser; make_parser(); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {
        "modelscope",
        "docker",
        "huggingface_hub",
        "numpy",
        "rich",
        "jinja2",
        "urllib3",
        "pydantic",
        "yaml",
    }
    assert heavy.isdisjoint(loaded)


def test_a_reader_that_leaves_is_no_error(project):
    command = duopack("schema")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_full_disk_under_stdout_is_an_error():
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(duopack("schema"), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_error_is_told_on_stderr_where_stdout_is_full_and_it_is_to_be_json(project):
    words = duopack("list", "--json", "--catalog", project.directory / "models.yaml")
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "No space left on device. To mend: free some space" in done.stderr


@pytest.mark.parametrize("words", [("list",), ("list", "--json"), ("list", "zz"), ("list", "--json", "zz")])
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_closed_stdout_or_stderr_is_only_silent(project, words, closed):
    command = shlex.join(duopack(*words, "--catalog", project.directory / "models.yaml"))
    done = subprocess.run(f"{command} {closed}", shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if "zz" in words else 0), done.stderr
    assert "Traceback" not in done.stderr
    assert ("unrecognized" in done.stderr) == ("zz" in words and "2>" not in closed)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("build", "one", "--work", "{}/file"), "Not a directory"),
        (("build", "one", "--to", "oci:{}/file/x"), "Not a directory"),
        (("build", "one", "--to", "docker-archive:{}/file/x.tar"), "Not a directory"),
        (("build", "one", "--to", "docker-archive:{}"), "this is a directory"),
        (("scripts", "one", "--to", "/proc/x"), "No such file"),
        (("scripts", "one", "--to", "{}/file/x"), "Not a directory"),
    ],
)
def test_a_place_that_cannot_be_written_is_found_before_the_download(project, words, said):
    project.run("lock")
    project.hub.forget()
    (project.directory / "file").write_text("")
    places = ("--catalog", project.directory / "models.yaml")
    work = () if "--work" in words else ("--work", project.work)
    ran = run(*(word.format(project.directory) for word in words), *places, *work)
    refused(ran, 1, said)
    assert "--debug" not in ran.err
    assert not project.hub.bytes_sent


def test_a_terminal_without_chinese_ends_no_command(project):
    project.content["models"]["one"]["title"] = "通义千问 3"
    project.write()
    environ = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    words = duopack("list", "--catalog", project.directory / "models.yaml")
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert r"\u901a" in done.stdout
    done = subprocess.run([*words, "--json"], env=environ, capture_output=True, text=True, check=False)
    assert "通义千问" in json.loads(done.stdout)[0]["description"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_says_so_in_one_paragraph(project, number):
    project.hub.faults.slow = 0.2
    words = duopack(
        "build", "one", "--catalog", project.directory / "models.yaml", "--work", project.work, "--json"
    )
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear_interrupts
    )
    end = time.monotonic() + 20
    while not project.hub.bytes_sent and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert "interrupted" in json.loads(out)["error"]["what"]
    assert "Traceback" not in err
    assert not (project.work / "one" / "index.json").exists()
    project.hub.faults.slow = 0.0
    assert project.built("one")["layers_sent"] > 0


def test_ctrl_c_while_the_program_still_starts_is_one_line(tmp_path):
    # A module that the command line imports, and that takes its time.
    (tmp_path / "traceback.py").write_text("import sys, time; print('here', flush=True); time.sleep(20)")
    process = subprocess.Popen(
        duopack("list"),
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    assert process.stdout
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "duopack: error: interrupted.\n")


def hear_interrupts() -> None:
    # A test runner that was started in the background hands down an ignored SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
