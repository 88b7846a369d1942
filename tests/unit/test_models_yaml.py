"""The repository's own catalog says what the guide says, and departs from it only where evidence does."""

import re
from pathlib import Path

import pytest

from pipeline.catalog.document import parse_document
from pipeline.catalog.load import catalog_from, load_catalog
from pipeline.catalog.schema import Architecture, Catalog, Quantization
from pipeline.lock.values import read_lock

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog(ROOT / "models.yaml")


def profiles(catalog: Catalog):
    return {
        name: (model, profile)
        for model in catalog.models.values()
        for name, profile in model.profiles.items()
    }


GUIDE_DIRECTORIES = {
    "Qwen3-4B-Instruct-2507",
    "Qwen3-8B-w8a8sc-310-vllm",
    "Qwen3.5-0.8B",
    "Qwen3.5-9B",
    "Qwen3.5-9B-W8A8",
    "qwen3.5-27B-w8a8",
    "qwen3.5-35B-A3B-w8a8",
}


def test_the_full_set_has_the_guides_seven_directories(catalog):
    assert {catalog.models[key].directory for key in catalog.sets["full"]} == GUIDE_DIRECTORIES


def test_the_two_models_of_the_community_matrix_are_there(catalog):
    others = {model.directory for model in catalog.models.values()} - GUIDE_DIRECTORIES
    assert others == {"Qwen3.5-2B-W8A8", "Qwen3.5-4B-W8A8"}


# The guide's commands: what is served below /models/, chips, tokens, sequences, utilization, port.
GUIDE_COMMANDS = {
    "n9": ("Qwen3.5-9B", 2, 53248, 8, 0.6, 12320),
    "n27": ("qwen3.5-27B-w8a8", 2, 40960, 8, 0.8, 12320),
    "n8": ("Qwen3-8B-w8a8sc-310-vllm/TP2/Qwen3-8B-w8a8sc-310-vllm-tp2", 2, 53248, 40, 0.9, 12320),
}


@pytest.mark.parametrize("script", GUIDE_COMMANDS)
def test_a_command_that_the_guide_gives_is_kept(catalog, script):
    model, profile = profiles(catalog)[script]
    weights = "/".join(part for part in (model.directory, profile.weights) if part)
    assert GUIDE_COMMANDS[script] == (
        weights,
        profile.tensor_parallel,
        profile.max_model_len,
        profile.max_num_seqs,
        profile.gpu_memory_utilization,
        profile.port,
    )


@pytest.mark.parametrize(
    ("script", "directory", "ranks"),
    [
        ("n4", "Qwen3-4B-Instruct-2507", 1),
        ("nn9", "Qwen3.5-9B-W8A8", 2),
        ("nn27", "qwen3.5-27B-w8a8", 4),
        ("n36", "qwen3.5-35B-A3B-w8a8", 2),
        ("n08", "Qwen3.5-0.8B", 1),
        ("n2", "Qwen3.5-2B-W8A8", 1),
        ("nn4", "Qwen3.5-4B-W8A8", 1),
    ],
)
def test_a_script_that_the_guide_names_serves_its_model(catalog, script, directory, ranks):
    model, profile = profiles(catalog)[script]
    assert (model.directory, profile.tensor_parallel) == (directory, ranks)


def test_only_the_4b_script_has_a_port_of_its_own(catalog):
    ports = {name: profile.port for name, (_, profile) in profiles(catalog).items()}
    assert ports.pop("n4") == 12322
    assert set(ports.values()) == {12320}


def test_the_dangerous_options_of_the_guide_are_off(catalog):
    for _, profile in profiles(catalog).values():
        assert profile.media_path is None
        assert not profile.trust_remote_code
        assert not any("speculative" in argument for argument in profile.args)


def test_experts_are_quantized_as_the_chip_runs_them(catalog):
    moe = [model for model in catalog.models.values() if model.architecture.moe]
    assert moe
    assert all(model.quantization is Quantization.W8A8_DYNAMIC for model in moe)


def test_parsers_fit_the_family(catalog):
    for model, profile in profiles(catalog).values():
        hybrid = model.architecture in {Architecture.QWEN3_5, Architecture.QWEN3_5_MOE}
        assert profile.tool_call_parser == ("qwen3_coder" if hybrid else "hermes")
    assert profiles(catalog)["n4"][1].reasoning_parser is None


def test_modelscope_is_asked_first(catalog):
    for model in catalog.models.values():
        first, second = model.sources
        assert first.modelscope == second.huggingface


def test_each_base_has_its_mirror_under_the_same_tag(catalog):
    for key, base in catalog.bases.items():
        first, mirror = base.images
        assert mirror == f"m.daocloud.io/{first}"
        assert first == f"quay.io/ascend/vllm-ascend:{key}-310p-openeuler"


def test_every_profile_and_base_has_a_comment_or_a_note():
    text = (ROOT / "models.yaml").read_text()
    for name in re.findall(r"^ {6}(n\w+):$", text, re.MULTILINE):
        assert re.search(rf"(^ +#.*\n)^ {{6}}{name}:$", text, re.MULTILINE), f"{name} has no comment above it"


def test_the_repositorys_lock_is_sound_and_names_only_what_the_catalog_has(catalog):
    lock = read_lock(ROOT / "models.lock")
    assert (ROOT / "models.lock").read_bytes() == lock.to_bytes()
    assert set(lock.models) <= set(catalog.models)
    assert set(lock.bases) <= set(catalog.bases)


def test_the_smallest_catalog_of_the_documentation_is_one():
    page = (ROOT / "docs/catalog.md").read_text()
    example = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert example is not None
    assert (
        catalog_from(parse_document(example[1].encode(), Path("models.yaml"))).models["9b"].default_profile
        == "n9"
    )
