"""`duopack build`, from the key to the bytes at the destination, with the real modelscope client."""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import io
import json
import os
import re
import shutil
import socket
import tarfile
import threading
import time
from pathlib import Path

import pytest
from support.fake_registry import FakeRegistry, Fault
from support.project import refused

from pipeline.errors import DuopackError
from pipeline.oci.documents import resolve
from pipeline.oci.layout import LayoutSource
from pipeline.stages import build as build_stage


def image(layout: Path, tag: str = "latest") -> tuple[dict, dict, list[tuple[str, bytes]]]:
    """Manifest, config, and the files of each plain layer, top layer's last."""
    source = LayoutSource(layout)
    found = resolve(source, tag, None)
    config = json.loads(b"".join(source.blob(found.manifest.config).read()))
    files = []
    for layer in found.manifest.layers:
        with tarfile.open(fileobj=io.BytesIO(b"".join(source.blob(layer).read()))) as tar:
            files += [
                (member.name, tar.extractfile(member).read())
                for member in tar.getmembers()
                if member.isfile()
            ]
    return json.loads(found.data), config, files


def test_every_file_of_the_hub_is_in_the_image_byte_for_byte_and_the_start_script_is_its_command(project):
    built = project.built("one", "--to", f"oci:{project.directory}/out")
    manifest, config, files = image(project.directory / "out")
    content = dict(files)
    for path in project.weights().rglob("*"):
        assert content[f"models/Tiny-One/{path.name}"] == path.read_bytes()
    assert set(content) - {f"models/Tiny-One/{path.name}" for path in project.weights().rglob("*")} == {
        "etc/duopack-demo-base",
        "models/launch.json",
        *(f"models/scripts/{name}.sh" for name in ("n1", "nn1", "list", "healthcheck")),
    }
    assert config["config"]["Cmd"] == ["/models/scripts/n1.sh"]
    assert config["config"]["Entrypoint"][0] == "/bin/bash"
    assert config["config"]["ExposedPorts"] == {"12320/tcp": {}}
    assert config["config"]["Healthcheck"]["Test"][0] == "CMD"
    assert (config["os"], config["architecture"]) == ("linux", "arm64")
    assert built["layers"] == len(manifest["layers"]) == 3
    assert built["size"] == sum(layer["size"] for layer in manifest["layers"])
    assert built["models"] == ["Tiny One"]


def test_the_same_again_sends_nothing_downloads_nothing_and_hashes_nothing(project, monkeypatch):
    first = project.built("one")
    assert first["layers_sent"] == 3
    assert first["sent"] == first["size"]
    project.hub.forget()
    monkeypatch.setattr(
        "pipeline.stages.download.sha256_file", lambda *_: pytest.fail("a file was hashed again")
    )
    second = project.built("one")
    assert (second["layers_sent"], second["sent"], second["digest"]) == (0, 0, first["digest"])
    assert project.hub.requests == []


def test_a_changed_start_script_sends_one_small_layer(project):
    first = project.built("one")
    project.profile()["max_model_len"] = 2048
    project.write()
    second = project.built("one")
    assert second["digest"] != first["digest"]
    assert second["layers_sent"] == 1
    assert second["sent"] < 100_000
    _, _, files = image(project.work / "one")
    assert b"2048" in dict(files)["models/scripts/n1.sh"]


def test_two_work_directories_two_destinations_and_two_users_give_one_digest(project, tmp_path, monkeypatch):
    here = project.built("one", "--to", f"oci:{tmp_path}/first:a")
    monkeypatch.setenv("USER", "somebody-else")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    before = os.umask(0o077)
    try:
        there = project.built("one", "--to", f"oci:{tmp_path}/second:b", work=tmp_path / "other work")
        archive = project.built(
            "one", "--to", f"docker-archive:{tmp_path}/a.tar:x:1", work=tmp_path / "third"
        )
    finally:
        os.umask(before)
    assert here["digest"] == there["digest"] == archive["digest"]


def test_nothing_of_this_machine_is_in_any_blob_or_in_the_lock(project, tmp_path, monkeypatch):
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "ms-secret-token")
    monkeypatch.setenv("HF_TOKEN", "hf-secret-token")
    monkeypatch.setenv("HOSTNAME", "build-host-name")
    project.built("one", "--source", f"dir:{project.weights()}")
    places = [*(project.work / "one" / "blobs" / "sha256").iterdir(), project.work / "one" / "index.json"]
    data = {path.name: path.read_bytes() for path in [*places, project.lock]}
    secrets = ["ms-secret-token", "hf-secret-token", "build-host-name", str(tmp_path), project.hub.url]
    secrets += [time.strftime("%Y-%m-%d"), str(Path.home())]
    # Short names of machines and users occur in random weights.
    secrets += [name for name in (socket.gethostname(), getpass.getuser()) if len(name) > 4]
    for name, content in data.items():
        for secret in secrets:
            assert secret.encode() not in content, f"{secret} in {name}"
    for path in places[:-1]:
        if not path.read_bytes().startswith(b"{"):
            with tarfile.open(path) as tar:
                for member in tar.getmembers():
                    assert (member.uid, member.gid, member.mtime) == (0, 0, 0)
                    assert (member.uname, member.gname) == ("", "")


def test_an_archive_has_what_docker_load_reads_and_a_failed_one_leaves_the_old_file(
    project, tmp_path, monkeypatch
):
    destination = f"docker-archive:{tmp_path}/image.tar:tiny:1"
    built = project.built("one", "--to", destination)
    with tarfile.open(tmp_path / "image.tar") as tar:
        (entry,) = json.load(tar.extractfile("manifest.json"))
        assert entry["RepoTags"] == ["tiny:1"]
        config = json.load(tar.extractfile(entry["Config"]))
        for name, diff_id in zip(entry["Layers"], config["rootfs"]["diff_ids"], strict=True):
            assert f"sha256:{hashlib.sha256(tar.extractfile(name).read()).hexdigest()}" == diff_id
    before = (tmp_path / "image.tar").read_bytes()
    weights = next(project.work.glob("_work/models/one/*.safetensors"))
    real = build_stage.download

    def changed_after(*arguments):
        done = real(*arguments)
        change(weights)
        return done

    monkeypatch.setattr(build_stage, "download", changed_after)
    refused(project.run("build", "one", "--to", destination), 1, weights.name)
    assert (tmp_path / "image.tar").read_bytes() == before
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]
    assert built["layers_sent"] == 3


def change(path: Path) -> None:
    """Another byte in the same size, the old times put back."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_weight_file_that_changes_between_verification_and_sending_is_refused(project, monkeypatch):
    real = build_stage.download

    def changed_after(*arguments):
        done = real(*arguments)
        change(next(file.path for file in done.files if file.path.suffix == ".safetensors"))
        return done

    monkeypatch.setattr(build_stage, "download", changed_after)
    ran = project.run("build", "one")
    refused(ran, 1, ".safetensors", "sha256")
    with pytest.raises(DuopackError, match="no such image"):
        LayoutSource(project.work / "one").manifest("latest")


def test_a_changed_file_is_fetched_again_by_the_next_build(project):
    first = project.built("one")
    change(next(project.work.glob("_work/models/one/*.safetensors")))
    shutil.rmtree(project.work / "one")
    assert project.built("one")["digest"] == first["digest"]


def test_nothing_is_downloaded_when_every_layer_is_at_the_destination(project, monkeypatch):
    first = project.built("one")
    shutil.rmtree(project.work / "_work" / "models")
    project.hub.forget()
    ran = project.run("build", "one", "--json")
    assert ran.code == 0, ran.err
    assert ran.json[0]["digest"] == first["digest"]
    assert "nothing is downloaded" in ran.err
    assert project.hub.requests == []
    project.profile()["max_num_seqs"] = 4
    project.write()
    assert project.built("one")["layers_sent"] == 1
    assert project.hub.requests == []


def test_a_set_has_both_models_and_shares_their_layers_with_the_images_of_each(project, tmp_path):
    to = f"oci:{tmp_path}/all"
    one = project.built("one", "--to", f"{to}:one")
    two = project.built("two", "--to", f"{to}:two")
    both = project.built("both", "--to", f"{to}:both")
    assert both["layers_sent"] == 1
    assert both["models"] == ["Tiny One", "Tiny Two"]
    _, config, files = image(tmp_path / "all", "both")
    assert config["config"]["Cmd"] == ["/models/scripts/list.sh"]
    assert {"12320/tcp", "12321/tcp"} == set(config["config"]["ExposedPorts"])
    launch = json.loads(dict(files)["models/launch.json"])
    assert [model["key"] for model in launch["models"]] == ["one", "two"]
    assert len({one["digest"], two["digest"], both["digest"]}) == 3


def test_a_profiles_key_builds_its_model_with_that_command(project):
    project.built("nn1")
    _, config, _ = image(project.work / "nn1")
    assert config["config"]["Cmd"] == ["/models/scripts/nn1.sh"]
    assert config["config"]["Labels"]["io.duopack.default-profile"] == "nn1"


def test_several_keys_are_built_in_turn(project):
    ran = project.run("build", "one", "nn1", "one")
    assert ran.code == 0, ran.err
    assert re.findall(r"^(\S+): oci:", ran.out, re.M) == ["one", "nn1"]


def test_another_platform_has_another_base_and_another_tag_in_a_registry(project, monkeypatch):
    with FakeRegistry() as registry:
        monkeypatch.setenv("DUOPACK_REGISTRY", f"{registry.host}/team")
        built = project.built("one", "--platform", "linux/amd64")
    assert built["platform"] == "linux/amd64"
    assert built["destination"].endswith("/team/tiny-one:stand-in-n1-amd64")
    ran = project.run("build", "one", "--platform", "linux/riscv64")
    refused(ran, 2, "linux/riscv64")


def test_a_base_by_reference_is_named_as_what_it_is(project, tmp_path):
    shutil.copytree(project.directory / "base", tmp_path / "secret-path-of-mine")
    built = project.built("one", "--base", f"oci:{tmp_path}/secret-path-of-mine:arm64")
    _, config, files = image(project.work / "one")
    labels = config["config"]["Labels"]
    assert labels["org.opencontainers.image.base.name"] == "local"
    assert labels["org.opencontainers.image.base.digest"] in built["base"]
    assert b"secret-path-of-mine" not in json.dumps(config).encode() + dict(files)["models/launch.json"]
    assert json.loads(project.lock.read_bytes())["bases"] == {}


def test_locked_takes_no_tag_for_a_base(project):
    project.built("one")
    base = f"oci:{project.directory}/base:demo"
    refused(project.run("build", "one", "--locked", "--base", base), 2, "digest")
    digest = json.loads(project.lock.read_bytes())["bases"]["stand-in"]["platforms"]["linux/arm64"]
    assert project.run("build", "one", "--locked", "--base", f"{base}@{digest}").code == 0


def test_locked_refuses_an_empty_and_a_stale_lock_and_asks_nobody(project):
    ran = project.run("build", "one", "--locked")
    refused(ran, 1, "model 'one' is not in models.lock", "duopack lock one", "base 'stand-in'")
    assert not project.lock.exists()
    project.built("one")
    assert project.run("build", "one", "--locked").code == 0
    project.content["models"]["one"]["files"] = {"exclude": ["tokenizer.json"]}
    project.write()
    before = project.lock.read_bytes()
    project.hub.forget()
    refused(project.run("build", "one", "--locked"), 1, "other sources or files", "--locked")
    assert project.hub.requests == []
    assert project.lock.read_bytes() == before


def test_an_unlocked_model_is_locked_first_and_that_is_said(project):
    ran = project.run("build", "one")
    assert "model 'one' is not in models.lock: locking it first" in ran.err
    assert "base 'stand-in' is not in models.lock: locking it first" in ran.err
    assert "two" not in json.loads(project.lock.read_bytes())["models"]


def test_a_dry_run_shows_the_layers_and_fetches_no_weights(project):
    ran = project.run("build", "one", "--dry-run")
    assert ran.code == 0, ran.err
    assert "models/Tiny-One" in ran.out
    assert "start scripts" in ran.out
    assert not [request for request in project.hub.requests if request.file]
    assert not (project.work / "one").exists()
    planned = project.run("build", "one", "--dry-run", "--json").json[0]
    built = project.built("one")
    assert planned["size"] == built["size"]
    assert [layer["title"] for layer in planned["layers"]][-1] == "start scripts"


def test_a_directory_as_source_serves_without_a_hub(project, tmp_path):
    project.hub.faults.status = 500
    shutil.copytree(project.weights(), tmp_path / "copy")
    built = project.built("one", "--source", f"dir:{tmp_path}/copy")
    assert project.hub.requests == []
    locked = json.loads(project.lock.read_bytes())["models"]["one"]
    assert locked["source"] == "dir"
    project.hub.faults.status = None
    project.lock.unlink()
    assert project.built("one")["digest"] == built["digest"]


def test_a_directory_that_is_not_what_was_locked_is_refused(project, tmp_path):
    project.built("one")
    shutil.copytree(project.weights(), tmp_path / "copy")
    change(tmp_path / "copy" / "config.json")
    shutil.rmtree(project.work)
    ran = project.run("build", "one", "--source", f"dir:{tmp_path}/copy")
    refused(ran, 1, "config.json", "sha256")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["ome"], ["'ome'", "did you mean one"]),
        (["one", "two", "--to", "oci:x"], ["--to is for one image"]),
        (["both", "--source", "dir:x"], ["--source is for one model"]),
        (["one", "--source", "ftp:x"], ["does not name a source"]),
        (["one", "--source", "modelscope:../x"], ["does not name a source"]),
        (["one", "--to", "docker-archive:"], ["the file is missing"]),
        (["one", "--to", "registry.example/UPPER:1"], ["capital letters"]),
        (["one", "--base", "oci:"], ["the directory is missing"]),
        (["one\x1b[2J"], [r"one\x1b[2J"]),
    ],
)
def test_wrong_use_is_one_paragraph_and_code_2_in_text_and_in_json(project, arguments, parts):
    refused(project.run("build", *arguments), 2, *parts)
    ran = project.run("build", *arguments, "--json")
    assert ran.code == 2
    assert set(ran.json) == {"error"}
    assert set(ran.json["error"]) == {"what", "where", "mend"}


@pytest.mark.parametrize("destination", ["oci:{}/base:demo", "oci:{}/../{name}/base:demo"])
def test_the_bases_own_place_is_no_destination(project, destination):
    text = destination.format(project.directory, name=project.directory.name)
    before = (project.directory / "base" / "index.json").read_bytes()
    refused(project.run("build", "one", "--to", text), 2, "name of the base image")
    assert (project.directory / "base" / "index.json").read_bytes() == before


@pytest.mark.parametrize("transport", ["docker://", "docker-daemon:", "docker-archive:out.tar:"])
def test_the_bases_own_name_is_no_destination(project, transport):
    project.content["bases"]["stand-in"]["images"].append("quay.io/ascend/vllm-ascend:v1")
    project.write()
    with FakeRegistry():
        ran = project.run(
            "build", "one", "--base", f"oci:{project.directory}/base:arm64", "--to",
            f"{transport}quay.io/ascend/vllm-ascend:v1",
        )  # fmt: skip
    refused(ran, 2, "name of the base image")
    assert project.hub.bytes_sent == {}


def test_layers_that_are_checked_files_have_digests_before_anything_is_sent(project, monkeypatch):
    monkeypatch.setattr("pipeline.oci.tar.LARGE_FILE", 1 << 14)
    no = json.dumps({"errors": [{"code": "DENIED", "message": "no"}]}).encode()
    with FakeRegistry(faults=[Fault("POST", "uploads", times=99, status=403, body=no)]) as registry:
        destination = f"docker://{registry.host}/team/one:1"
        refused(project.run("build", "one", "--to", destination), 1, registry.host)
        learnt = json.loads((project.work / "_work" / "layers.json").read_text())
        registry.faults.clear()
        built = project.built("one", "--to", destination)
        manifest = json.loads(registry.manifests[built["digest"]][1])
    large = [path for path in project.weights().iterdir() if path.stat().st_size >= 1 << 14]
    assert len(large) >= 2
    assert len(set(learnt.values())) == len(large)
    assert set(learnt.values()) <= {layer["digest"] for layer in manifest["layers"]}


@pytest.mark.parametrize("kind", ["docker", "oci"])
def test_a_wrong_digest_in_the_memo_fails_once_and_is_forgotten(project, kind):
    built = project.built("one")
    memo = project.work / "_work" / "layers.json"
    wrong = dict.fromkeys(json.loads(memo.read_text()), f"sha256:{'1' * 64}")
    memo.write_text(json.dumps(wrong))
    with FakeRegistry() as registry:
        to = f"docker://{registry.host}/team/one:1" if kind == "docker" else f"oci:{project.directory}/other"
        refused(project.run("build", "one", "--to", to), 1, "1" * 64, "run the same command again")
        assert project.built("one", "--to", to)["digest"] == built["digest"]


def test_a_directory_where_a_file_shall_be_downloaded_is_named(project):
    project.built("one")
    path = project.work / "_work" / "models" / "one" / "config.json"
    path.unlink()
    path.mkdir()
    refused(project.run("build", "one", "--to", "oci:other"), 1, str(path), "move it away")


def test_a_registry_that_is_down_is_found_before_the_download(project, monkeypatch):
    monkeypatch.setattr(
        "pipeline.oci.registry.patience.Patience.wait", lambda self, failures, error: gives_up(error)
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ran = project.run("build", "one", "--to", f"docker://127.0.0.1:{port}/x:1", "--json")
    refused(ran, 1, f"127.0.0.1:{port}")
    assert "127.0.0.1" in ran.json["error"]["where"]
    assert project.hub.bytes_sent == {}


def gives_up(error: Exception) -> None:
    raise error


def test_an_engine_that_is_down_is_found_before_the_download(project, monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    refused(
        project.run("build", "one", "--to", "docker-daemon:x:1"),
        1,
        "the engine does not answer",
        "DOCKER_HOST",
    )
    assert project.hub.bytes_sent == {}


def test_a_disk_that_is_too_small_is_found_before_the_download(project, monkeypatch):
    monkeypatch.setattr(
        "pipeline.files.shutil.disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**6)
    )
    refused(project.run("build", "one"), 1, "needs", "short")
    assert project.hub.bytes_sent == {}


def test_a_rule_that_forbids_a_profile_ends_the_build_before_anything_is_fetched(project):
    project.profile("nn1")["args"] = ["--no-such-option"]
    project.content["bases"]["stand-in"]["vllm"] = "0.20.2"
    project.write()
    refused(project.run("build", "one"), 1, "--no-such-option")
    assert project.hub.bytes_sent == {}


def test_a_hub_that_is_down_is_one_paragraph_that_names_each_source(project):
    project.hub.faults.status = 500
    ran = project.run("build", "one")
    refused(ran, 1, "modelscope:tiny/one", "huggingface:tiny/one")
    assert json.loads(project.lock.read_bytes())["models"] == {}


def test_a_broken_catalog_names_file_line_and_key(project):
    (project.directory / "models.yaml").write_text("version: 1\n\tbases: []\n")
    refused(project.run("build", "one"), 2, "models.yaml:2")
    project.content["models"]["one"]["titel"] = "x"
    project.write()
    refused(project.run("build", "one"), 2, "titel", "title")
    (project.directory / "models.yaml").unlink()
    refused(project.run("build", "one"), 2, "models.yaml")


def test_a_fault_of_ours_is_one_paragraph_with_a_hint_and_a_traceback_on_demand(project, monkeypatch):
    monkeypatch.setattr("pipeline.commands.build.build", lambda *_: 1 / 0)
    refused(project.run("build", "one"), 1, "fault of duopack", "ZeroDivisionError", "--debug")
    ran = project.run("build", "one", "--debug", "--json")
    assert "Traceback" in ran.err
    assert "ZeroDivisionError" in ran.error


def test_a_second_build_waits_for_the_first_one_to_let_go_of_the_model(project):
    project.built("one")
    shutil.rmtree(project.work / "one")
    guard = (project.work / "_work" / "models" / "one.lock").open()
    fcntl.flock(guard, fcntl.LOCK_EX)
    threading.Timer(0.5, guard.close).start()
    ran = project.run("build", "one")
    assert ran.code == 0, ran.err
    assert "waiting for another duopack" in ran.err


def test_models_of_a_set_are_taken_in_one_order_by_everybody(project, monkeypatch):
    project.content["sets"]["reversed"] = ["two", "one"]
    project.write()
    taken = []
    real = build_stage.exclusive

    def noted(path, on_wait):
        taken.append(path.name)
        return real(path, on_wait)

    monkeypatch.setattr(build_stage, "exclusive", noted)
    project.built("both")
    project.built("reversed")
    assert taken == ["one.lock", "two.lock"] * 2
