"""Models whose weights are made while building: quantized, split per rank, or both."""

from __future__ import annotations

import json

import pytest
from support.project import PROFILE, refused
from test_build import image

from pipeline.oci.layout import LayoutSource

SPLIT = {"load_format": "sharded_state", "weights": "TP2/Tiny-Two-tp2", "tensor_parallel": 2}


def ask(project, **changes: object) -> None:
    """Lets the catalog make model two, on the base whose vLLM the shards are known for."""
    project.content["bases"]["stand-in"] |= {"vllm": "0.20.2", "vllm_ascend": "0.20.2rc1"}
    project.content["models"]["two"] |= changes
    project.write()


def quantized(project) -> None:
    ask(project, quantization="w8a8-dynamic", quantize={"recipe": "w8a8-dynamic"})


def files_of(project, name: str) -> dict[str, bytes]:
    _, _, files = image(project.directory / name)
    return dict(files)


def test_a_quantized_model_has_the_recipe_s_files_and_not_the_source_s(project):
    quantized(project)
    project.built("two", "--to", f"oci:{project.directory}/out")
    files = files_of(project, "out")
    description = json.loads(files["models/Tiny-Two/quant_model_description.json"])
    assert description["model_quant_type"] == "W8A8_DYNAMIC"
    assert not any(path.endswith(".safetensors") and "quant_model_weights" not in path for path in files)
    record = json.loads(files["models/Tiny-Two/duopack-quantization.json"])
    locked = json.loads(project.lock.read_text())["models"]["two"]["files"]
    assert record["source"] == sorted(locked, key=lambda file: file["path"])
    assert "--quantization" in files["models/scripts/n2.sh"].decode()


def test_a_split_model_has_its_ranks_where_its_profile_loads_them(project):
    ask(project, shard=[2], profiles={"n2": {**PROFILE, **SPLIT, "served_name": "tiny-two"}})
    project.built("two", "--to", f"oci:{project.directory}/out")
    names = {path.removeprefix("models/Tiny-Two/") for path in files_of(project, "out") if "Tiny-Two" in path}
    assert {f"TP2/Tiny-Two-tp2/model-rank-{rank}-part-0.safetensors" for rank in (0, 1)} <= names
    assert {name.split("/")[0] for name in names} == {"TP2"}


def test_a_model_is_quantized_and_then_split_for_each_size(project):
    profiles = {
        f"n2{ranks}": {
            **PROFILE,
            **SPLIT,
            "tensor_parallel": ranks,
            "weights": f"TP{ranks}/Tiny-Two-tp{ranks}",
            "served_name": "tiny-two",
        }
        for ranks in (1, 2)
    }
    ask(
        project,
        quantization="w8a8-dynamic",
        quantize={"recipe": "w8a8-dynamic"},
        shard=[1, 2],
        profiles=profiles,
    )
    project.built("two", "--to", f"oci:{project.directory}/out")
    record = json.loads(files_of(project, "out")["models/Tiny-Two/TP2/Tiny-Two-tp2/duopack-shards.json"])
    assert (record["tensor_parallel"], record["quantization"]) == (2, "W8A8_DYNAMIC")
    assert project.run("verify", f"oci:{project.directory}/out", "--deep").code == 0


def test_what_is_made_is_made_once_and_the_image_is_the_same_from_another_directory(project, tmp_path):
    quantized(project)
    first = project.built("two", "--to", f"oci:{project.directory}/out")
    again = project.built("two", "--to", f"oci:{project.directory}/out")
    other = project.built("two", "--to", f"oci:{tmp_path}/other", work=tmp_path / "work")
    assert (again["sent"], again["digest"]) == (0, first["digest"])
    assert other["digest"] == first["digest"]


def test_the_lock_names_the_source_and_verify_takes_the_made_files_for_what_they_are(project):
    quantized(project)
    project.built("two", "--to", f"oci:{project.directory}/out")
    locked = {file["path"] for file in json.loads(project.lock.read_text())["models"]["two"]["files"]}
    assert locked == {path.name for path in project.weights("two").iterdir()}
    ran = project.run("verify", f"oci:{project.directory}/out", "--json", "--locked")
    assert ran.code == 0, ran.out


def test_a_rule_that_forbids_the_profile_is_found_before_anything_is_fetched_or_made(project):
    quantized(project)
    project.profile("n2", "two")["args"] = ["--no-such-option"]
    project.content["bases"]["stand-in"] |= {"vllm": "0.20.2", "vllm_ascend": "0.20.2rc1"}
    project.write()
    refused(project.run("build", "two", "--to", f"oci:{project.directory}/out"), 1, "--no-such-option")
    assert not (project.work / "_work" / "sources").exists()
    with pytest.raises(Exception, match="no"):
        LayoutSource(project.directory / "out").manifest("latest")


def test_a_dry_run_says_that_made_weights_are_not_known_before(project):
    quantized(project)
    refused(project.run("build", "two", "--dry-run"), 2, "made while building")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantize": {}}, "'quantization' says float"),
        ({"shard": [2]}, "does not split the model for 1 ranks"),
        (
            {"shard": [2], "profiles": {"n2": {**PROFILE, "served_name": "t", "tensor_parallel": 2}}},
            "TP2/Tiny-Two-tp2",
        ),
        ({"quantize": {"recipe": "w8a8-dynamic", "engin": "auto"}}, "engine"),
    ],
)
def test_a_catalog_that_contradicts_what_is_made_is_refused(project, changes, says):
    ask(project, **changes)
    refused(project.run("list"), 2, says)


def test_a_recipe_that_does_not_fit_leaves_nothing_at_the_destination(project):
    ask(project, quantization="w8a8-dynamic", quantize={"recipe": "no-such-recipe"})
    refused(project.run("build", "two", "--to", f"oci:{project.directory}/out"), 2, "no-such-recipe")
    assert not (project.directory / "out" / "index.json").exists()
