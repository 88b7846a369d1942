"""Command lines held against the options that vLLM really has."""

from __future__ import annotations

import pytest

from pipeline.ascend.options import check_options, load_table
from pipeline.ascend.versions import version_key
from pipeline.errors import DuopackError


def problem(*args: str, version: str = "0.20.2") -> str:
    (found,) = check_options(["/models/m", *args], version)
    assert found.severity == "error"
    return str(found)


@pytest.mark.parametrize(
    "args",
    [
        ("--port", "8000"),
        ("--port=8000",),
        ("-tp", "2"),
        ("--max_model_len", "4096"),
        ("--enable-prefix-caching",),
        ("--no-enable-prefix-caching",),
        ("--no_enable_prefix_caching",),
        ("--served-model-name", "a", "b", "c"),
        ("--served-model-name", "a", "--port", "1"),
        ("--compilation-config", '{"cudagraph_mode": "NONE"}'),
        ("--compilation-config.cudagraph_mode", "NONE"),
        ("--compilation-config.cudagraph_mode=NONE",),
        ("-O3",),
        ("-O", "3"),
        ("--cpu-offload-gb", "-1"),
        ("--hf-token",),
        ("--hf-token", "x"),
        ("--chat-template", "- a text with spaces"),
        ("--mamba-cache-mode", "align"),
    ],
)
def test_what_vllm_takes_is_no_problem(args: tuple[str, ...]) -> None:
    assert check_options(["/models/m", *args], "0.20.2") == []


def test_an_unknown_option_names_close_ones() -> None:
    assert "--max-model-len" in problem("--max-modell-len", "4096")
    assert "no option --speculative-model" in problem("--speculative-model", "x")


def test_an_unknown_option_is_one_problem_with_its_values() -> None:
    assert "no option --wholly-made-up" in problem("--wholly-made-up", "x", "y", "--port", "1")


def test_a_missing_value_is_told() -> None:
    assert "--port needs a value" in problem("--port", "--seed", "1")
    assert "--max-model-len needs a value" in problem("--max-model-len")
    assert "--served-model-name needs a value" in problem("--served-model-name")


def test_a_value_too_many_is_told() -> None:
    assert "belongs to no option" in problem("--enforce-eager", "yes")
    assert "takes no value" in problem("--enforce-eager=yes")
    assert "belongs to no option" in problem("other-model")


def test_a_value_that_is_no_choice_names_the_choices() -> None:
    assert "did you mean align" in problem("--mamba-cache-mode", "aligned")
    assert "use one of" in problem("--dtype", "int8")


def test_a_parser_must_be_one_that_vllm_has_unless_a_plugin_brings_it() -> None:
    assert "did you mean qwen3" in problem("--reasoning-parser", "qwen33")
    assert "does not take 'hermes'" in problem("--reasoning-parser", "hermes")
    assert "did you mean qwen3_coder" in problem("--tool-call-parser", "qwen3-coder")
    plugin = ["/models/m", "--tool-parser-plugin", "/p.py", "--tool-call-parser", "ours"]
    assert check_options(plugin, "0.20.2") == []


def test_a_json_value_must_be_json() -> None:
    assert "not JSON" in problem("--compilation-config", "{'cudagraph_mode': 'NONE'}")


def test_every_problem_is_told() -> None:
    assert len(check_options(["m", "--a1", "--dtype", "int8", "--port"], "0.20.2")) == 3


@pytest.mark.parametrize("version", ["0.20.3", "0.23.0", "1.0"])
def test_a_version_without_a_table_gives_warnings_against_the_newest_older_one(version: str) -> None:
    (found,) = check_options(["m", "--brand-new"], version)
    assert found.severity == "warning"
    assert "0.20.2" in found.sentence
    assert version in found.sentence


def test_an_older_version_than_any_table_gives_warnings() -> None:
    (found,) = check_options(["m", "--brand-new"], "0.9.1")
    assert found.severity == "warning"


def test_a_local_version_part_does_not_count() -> None:
    assert load_table("0.20.2+empty").version == "0.20.2"
    assert "no option" in problem("--brand-new", version="0.20.2+empty")


def test_versions_sort_as_they_were_released() -> None:
    ordered = [
        "0.20.2.dev1",
        "0.20.2rc1",
        "0.20.2rc2",
        "0.20.2",
        "0.20.2.post1",
        "0.20.10",
        "0.21.0rc1",
        "1.0",
    ]
    assert sorted([*ordered[4:], *ordered[:4]], key=version_key) == ordered
    assert version_key("v0.20.2") == version_key("0.20.2+empty") == version_key("0.20.2.0")


@pytest.mark.parametrize("text", ["", "latest", "0.20.x", "0.20.2rc"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(DuopackError, match="is not a version"):
        version_key(text)
