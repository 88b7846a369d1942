"""What the launch stage adds to an image: files, labels, health check, launch.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.launching import NEW_BASE, OLD_BASE, model, profile, sharded_model

from pipeline.ascend.rules import Severity
from pipeline.ascend.serve import arguments, command, defaults, settings
from pipeline.catalog.load import load_catalog
from pipeline.catalog.schema import Model
from pipeline.errors import DuopackError
from pipeline.stages.launch import LaunchFiles, launch_files

DIGEST = f"sha256:{'5' * 64}"
CATALOG = load_catalog(Path(__file__).parents[2] / "models.yaml")


def make(models: dict[str, Model] | None = None, default: str = "n9") -> LaunchFiles:
    return launch_files(models or {"9b": model()}, OLD_BASE, DIGEST, default)


def launch_json(made: LaunchFiles) -> dict[str, Any]:
    (data,) = (data for path, _, data in made.files if path == "models/launch.json")
    value: dict[str, Any] = json.loads(data)
    return value


def small(**changes: Any) -> Model:
    return model(profile(served_name="small", port=12322, tensor_parallel=1), **changes)


def two() -> dict[str, Model]:
    other = small(title="Small", directory="Small", license="MIT OR Apache-2.0")
    return {"9b": model(), "small": other.model_copy(update={"profiles": {"ns": other.profiles["n9"]}})}


def test_the_image_gets_a_script_for_every_profile_and_the_common_ones() -> None:
    made = make(two())
    assert [(path, oct(mode)) for path, mode, _ in made.files] == [
        ("models/launch.json", "0o644"),
        ("models/scripts/healthcheck.sh", "0o755"),
        ("models/scripts/list.sh", "0o755"),
        ("models/scripts/n9.sh", "0o755"),
        ("models/scripts/ns.sh", "0o755"),
    ]


def test_the_command_is_the_chosen_profile_s_script() -> None:
    assert make(two(), "ns").command == ["/models/scripts/ns.sh"]


def test_a_profile_that_no_model_has_is_refused_with_the_ones_there_are() -> None:
    with pytest.raises(DuopackError, match="n9, ns"):
        make(two(), "n99")


def test_the_same_catalog_gives_the_same_bytes() -> None:
    assert make(two()).files == make(two()).files
    assert make(two()).labels == make(two()).labels


def test_launch_json_says_what_is_inside() -> None:
    described = launch_json(make(two()))
    assert described["version"] == 1
    assert described["default"] == "n9"
    assert described["base"] == {
        "image": OLD_BASE.images[0],
        "digest": DIGEST,
        "vllm": "0.20.2",
        "vllm_ascend": "0.20.2rc1",
        "cann": "9.1.0-beta.1",
    }
    first, second = described["models"]
    assert (first["key"], first["directory"], first["quantization"]) == ("9b", "/models/Qwen3.5-9B", "float")
    assert second["profiles"][0] | {"port": 12322, "served_name": "small"} == second["profiles"][0]
    assert first["profiles"][0]["script"] == "/models/scripts/n9.sh"


def test_launch_json_names_the_directory_of_split_weights() -> None:
    (one,) = launch_json(make({"8b": sharded_model()}))["models"][0]["profiles"]
    assert one["weights"] == "/models/Qwen3-8B/TP2/shards"
    assert (one["load_format"], one["tensor_parallel"]) == ("sharded_state", 2)


def test_labels_carry_the_essentials() -> None:
    made = make(two(), "ns")
    assert made.labels["org.opencontainers.image.title"] == "Qwen3.5-9B, Small"
    assert made.labels["org.opencontainers.image.base.digest"] == DIGEST
    assert made.labels["org.opencontainers.image.licenses"] == "Apache-2.0 AND (MIT OR Apache-2.0)"
    assert made.labels["io.duopack.models"] == "9b,small"
    assert made.labels["io.duopack.port"] == "12322"
    assert made.labels["io.duopack.tensor-parallel"] == "1"
    assert json.loads(made.labels["io.duopack.launch"]) == launch_json(made)


def test_licences_are_told_only_when_all_are_known() -> None:
    assert "org.opencontainers.image.licenses" not in make({"9b": model(license=None)}).labels


def test_the_health_check_waits_for_a_long_load() -> None:
    made = make()
    assert made.healthcheck.test == ("CMD", "/models/scripts/healthcheck.sh")
    assert made.healthcheck.start_period >= 600
    assert made.healthcheck.timeout == 10


def test_every_port_of_the_image_is_exposed() -> None:
    assert make(two()).exposed_ports == (12320, 12322)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ({"PATH": "/usr/bin:/bin"}, "/usr/bin:/bin:/models/scripts"),
        ({"PATH": "/bin:/models/scripts"}, "/bin:/models/scripts"),
        ({}, "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/models/scripts"),
    ],
)
def test_the_scripts_are_on_the_path_once_and_last(path: dict[str, str], expected: str) -> None:
    assert make().image_env({"SOC_VERSION": "ascend310p1", **path}) == {
        "SOC_VERSION": "ascend310p1",
        "PATH": expected,
    }


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        (model(profile(args=("--max-modell-len", "4"))), "--max-model-len"),
        (model(profile(args=("--speculative-config", "{}"))), "#7394"),
        (model(profile(capture_sizes=(1, 2, 4, 8))), "at most two"),
        (model(profile(media_path="/")), "every client"),
    ],
)
def test_a_profile_that_cannot_work_is_refused(subject: Model, words: str) -> None:
    with pytest.raises(DuopackError) as caught:
        make({"9b": subject})
    assert words in str(caught.value)
    assert "n9: " in str(caught.value)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(DuopackError) as caught:
        make({"9b": model(profile(capture_sizes=(1, 2, 4), media_path="/", args=("--bogus",)))})
    assert all(word in str(caught.value) for word in ("capture-sizes-tp", "media-path-root", "--bogus"))


@pytest.mark.parametrize("name", ["healthcheck", "list"])
def test_a_profile_cannot_take_a_common_script_s_name(name: str) -> None:
    with pytest.raises(DuopackError, match="taken"):
        make({"9b": model().model_copy(update={"profiles": {name: profile()}})}, name)


@pytest.mark.parametrize("directory", ["scripts", "scripts/x", "launch.json"])
def test_a_model_cannot_lie_where_the_scripts_are(directory: str) -> None:
    with pytest.raises(DuopackError, match="start scripts"):
        make({"9b": model(directory=directory)})


def test_two_models_cannot_share_a_script_name() -> None:
    with pytest.raises(DuopackError, match="9b and other"):
        make({"9b": model(), "other": small(directory="Small")})


def test_a_warning_that_profiles_share_is_said_once() -> None:
    (shared,) = (text for text in make(two()).warnings if "qwen3.5-base" in text)
    assert shared.startswith("n9, ns: ")


def test_notes_are_findings_but_no_warnings() -> None:
    made = make()
    assert any(finding.severity is Severity.NOTE for finding in made.findings)
    assert not any("capture-sizes-eager" in text for text in made.warnings)


@pytest.mark.parametrize("base", CATALOG.bases)
@pytest.mark.parametrize("key", CATALOG.models)
def test_every_model_of_the_catalog_can_be_launched_on_every_base(key: str, base: str) -> None:
    one = CATALOG.models[key]
    made = launch_files({key: one}, CATALOG.bases[base], DIGEST, next(iter(one.profiles)))
    assert not [finding for finding in made.findings if finding.severity is Severity.ERROR]


def test_a_newer_base_has_fewer_warnings() -> None:
    newer = launch_files({"9b": model()}, NEW_BASE, DIGEST, "n9")
    assert len(newer.warnings) < len(make().warnings)


# --- The guide's commands ---------------------------------------------------------------------------------

GRAPHS = '{"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1,4]}'
GUIDE: dict[str, dict[str, str | None]] = {
    "n9": {
        "--host": "0.0.0.0",
        "--port": "12320",
        "--tensor-parallel-size": "2",
        "--served-model-name": "qwen3.5-9b",
        "--trust-remote-code": None,
        "--max-num-seqs": "8",
        "--gpu-memory-utilization": "0.6",
        "--additional-config": '{"ascend_compilation_config": {"fuse_norm_quant": false}}',
        "--dtype": "float16",
        "--compilation-config": GRAPHS,
        "--allowed-local-media-path": "/",
        "--mamba-ssm-cache-dtype": "float16",
        "--reasoning-parser": "qwen3",
        "--enable-auto-tool-choice": None,
        "--tool-call-parser": "qwen3_coder",
        "--enable-chunked-prefill": None,
        "--max-model-len": "53248",
        "--enable-prefix-caching": None,
        "--mamba-cache-mode": "align",
    },
    "n27": {
        "--host": "0.0.0.0",
        "--port": "12320",
        "--tensor-parallel-size": "2",
        "--served-model-name": "qwen3.5-27b",
        "--trust-remote-code": None,
        "--max-num-seqs": "8",
        "--gpu-memory-utilization": "0.8",
        "--dtype": "float16",
        "--compilation-config": GRAPHS,
        "--allowed-local-media-path": "/",
        "--mamba-ssm-cache-dtype": "float16",
        "--reasoning-parser": "qwen3",
        "--enable-auto-tool-choice": None,
        "--tool-call-parser": "qwen3_coder",
        "--max-model-len": "40960",
        "--enable-chunked-prefill": None,
        "--enable-prefix-caching": None,
    },
    "n8": {
        "--host": "0.0.0.0",
        "--port": "12320",
        "--tensor-parallel-size": "2",
        "--gpu-memory-utilization": "0.9",
        "--served-model-name": "qwen3-8b",
        "--dtype": "float16",
        "--additional-config": '{"ascend_compilation_config": {"fuse_norm_quant": false}}',
        "--compilation-config": GRAPHS.replace("1,4", "1,2,4,8"),
        "--quantization": "ascend",
        "--max-model-len": "53248",
        "--enable-chunked-prefill": None,
        "--max-num-batched-tokens": "4096",
        "--max-num-seqs": "40",
        "--enable-prefix-caching": None,
        "--load-format": "sharded_state",
    },
}
DEPARTURES = {
    "n9": {"--trust-remote-code", "--allowed-local-media-path", "--additional-config"},
    "n27": {
        "--trust-remote-code",
        "--allowed-local-media-path",
        "--additional-config",
        "--mamba-cache-mode",
        "--quantization",
    },
    "n8": {
        "--additional-config",
        "--compilation-config",
        "--reasoning-parser",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
    },
}


def ours(name: str) -> dict[str, str | None]:
    (one,) = (one for one in CATALOG.models.values() if name in one.profiles)
    chosen = one.profiles[name]
    words = arguments(command(one, chosen, OLD_BASE), defaults(settings(one, chosen)))[1:]
    options: dict[str, str | None] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            options[word] = None if after.startswith("--") else after
    return options | ({"--load-format": None} if options["--load-format"] == "auto" else {})


@pytest.mark.parametrize("name", GUIDE)
def test_the_commands_depart_from_the_guide_s_only_where_the_documentation_says(name: str) -> None:
    guide, mine = GUIDE[name], ours(name)
    differ = {
        flag for flag in guide.keys() | mine.keys() if guide.get(flag, "absent") != mine.get(flag, "absent")
    }
    if mine["--load-format"] is None:
        differ.discard("--load-format")  # auto is vLLM's own default
    assert differ == DEPARTURES[name]
    page = (Path(__file__).parents[2] / "docs/launch.md").read_text()
    assert [flag for flag in differ if flag not in page] == []


def test_a_set_s_command_lists_the_models_and_its_labels_promise_no_profile():
    made = make(two(), "list")
    assert made.command == ["/models/scripts/list.sh"]
    assert launch_json(made)["default"] == "list"
    assert made.labels["io.duopack.default-profile"] == "list"
    assert not {"io.duopack.port", "io.duopack.served-name", "io.duopack.tensor-parallel"} & set(made.labels)
    (text,) = (data.decode() for path, _, data in made.files if path.endswith("/list.sh"))
    assert "IMAGE n9.sh" in text
    assert "starts by itself" not in text
    assert "ns.sh" in text


def test_two_models_of_one_image_cannot_be_served_under_one_name():
    models = two()
    clash = models["small"].profiles["ns"].model_copy(update={"served_name": "qwen3.5-9b"})
    models["small"] = models["small"].model_copy(update={"profiles": {"ns": clash}})
    with pytest.raises(DuopackError, match=r"9b and small, are served as 'qwen3.5-9b'"):
        make(models)
