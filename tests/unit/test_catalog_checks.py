"""Entries that contradict each other are refused, each with the place and the mend."""

import copy
from pathlib import Path

import pytest
import yaml

from pipeline.catalog.document import CatalogError, parse_document
from pipeline.catalog.load import catalog_from

PROFILE = {
    "tensor_parallel": 1,
    "served_name": "one",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "gpu_memory_utilization": 0.8,
}


def model(name: str, **profile) -> dict:
    return {
        "title": name,
        "directory": f"dir-{name}",
        "architecture": "qwen3",
        "max_positions": 40960,
        "sources": [{"dir": "."}],
        "profiles": {f"n{name}": {**PROFILE, "served_name": f"served-{name}", **profile}},
    }


@pytest.fixture
def catalog() -> dict:
    return {
        "version": 1,
        "default_base": "base",
        "bases": {"base": {"images": ["r.example/x:1"], "vllm": "1", "vllm_ascend": "1"}},
        "models": {"one": model("one"), "two": model("two")},
        "sets": {"both": ["one", "two"]},
    }


def check(value: dict):
    return catalog_from(parse_document(yaml.safe_dump(value, sort_keys=False).encode(), Path("models.yaml")))


def only_problem(value: dict) -> str:
    with pytest.raises(CatalogError) as caught:
        check(value)
    (problem,) = caught.value.problems
    assert problem.mend
    return f"{problem.what} ({problem.mend})"


def profile_of(value: dict, key: str = "one") -> dict:
    return value["models"][key]["profiles"][f"n{key}"]


def test_a_sound_catalog_passes(catalog):
    assert set(check(catalog).models) == {"one", "two"}


def test_the_default_base_must_exist(catalog):
    catalog["default_base"] = "bsae"
    assert only_problem(catalog) == "default_base: there is no base 'bsae' (did you mean 'base'?)"


def test_the_default_platform_must_be_one_of_the_default_base(catalog):
    catalog["bases"]["base"]["platforms"] = ["linux/amd64"]
    assert "default_platform: the default base has no platform 'linux/arm64'" in only_problem(catalog)


def test_a_set_names_models_that_exist(catalog):
    catalog["sets"]["both"] = ["one", "tow"]
    assert only_problem(catalog) == "sets.both[1]: there is no model 'tow' (did you mean 'two'?)"


def test_a_set_has_each_model_once(catalog):
    catalog["sets"]["both"] = ["one", "two", "one"]
    assert "sets.both[2]: 'one' is in the set twice" in only_problem(catalog)


def test_two_profiles_cannot_have_one_script(catalog):
    catalog["models"]["two"]["profiles"]["none"] = catalog["models"]["two"]["profiles"].pop("ntwo")
    catalog["models"]["one"]["profiles"] = {"none": profile_of(catalog)}
    assert "models.two.profiles.none: two profiles have the script 'none.sh'" in only_problem(catalog)


@pytest.mark.parametrize("name", ["list", "healthcheck"])
def test_a_profile_cannot_have_the_name_of_a_script_that_every_image_has(catalog, name):
    catalog["models"]["one"]["profiles"] = {name: profile_of(catalog)}
    assert f"every image has a script '{name}.sh' of its own (rename the profile)" in only_problem(catalog)


def test_only_a_set_can_say_what_all_is(catalog):
    catalog["sets"]["all"] = ["two"]
    check(catalog)
    del catalog["sets"]
    catalog["models"]["all"] = catalog["models"].pop("one")
    assert "models.all: 'all' stands for every model" in only_problem(catalog)


@pytest.mark.parametrize(
    ("image", "said"),
    [("user:hidden@r.example/x:1", "password"), ("R.example/X", "capital"), ("oci:", "directory is missing")],
)
def test_a_base_is_a_name_of_an_image_without_a_login(catalog, image, said):
    catalog["bases"]["base"]["images"] = ["r.example/x:1", image]
    problem = only_problem(catalog)
    assert "bases.base.images[1]" in problem
    assert said in problem
    assert "hidden" not in problem


@pytest.mark.parametrize("kind", ["set", "profile", "base"])
def test_one_name_cannot_mean_two_things(catalog, kind):
    if kind == "set":
        catalog["sets"]["one"] = ["two"]
    elif kind == "profile":
        catalog["models"]["two"]["profiles"] = {"one": profile_of(catalog, "two")}
    else:
        catalog["bases"]["two"] = catalog["bases"]["base"]
    assert "rename one of them" in only_problem(catalog)


@pytest.mark.parametrize(
    ("first", "second", "said"), [("x", "x", "is also"), ("x", "x/y", "overlaps"), ("x/y", "x", "overlaps")]
)
def test_no_model_lies_in_the_directory_of_another(catalog, first, second, said):
    catalog["models"]["one"]["directory"] = first
    catalog["models"]["two"]["directory"] = second
    assert f"{said} that of model 'one'" in only_problem(catalog)


def test_a_directory_whose_name_only_begins_alike_is_another_one(catalog):
    catalog["models"]["two"]["directory"] = "dir-one-w8a8"
    check(catalog)


@pytest.mark.parametrize("directory", ["scripts", "scripts/x", "launch.json"])
def test_the_image_keeps_its_own_places(catalog, directory):
    catalog["models"]["two"]["directory"] = directory
    assert "the image itself uses /models/" in only_problem(catalog)


def test_two_models_of_one_image_cannot_share_a_served_name(catalog):
    profile_of(catalog, "two")["served_name"] = "served-one"
    catalog["models"]["two"]["image"] = "two"
    said = only_problem(catalog)
    assert said.startswith("sets.both[1]: 'two' is served as 'served-one' in this image, and so is 'one'")


def test_models_of_different_images_may_share_a_served_name(catalog):
    profile_of(catalog, "two")["served_name"] = "served-one"
    catalog["models"]["two"]["image"] = "two"
    catalog["sets"] = {}
    check(catalog)


def test_profiles_of_one_model_may_share_a_served_name(catalog):
    catalog["models"]["one"]["profiles"]["nmore"] = {**profile_of(catalog), "tensor_parallel": 2}
    check(catalog)


def test_tensor_parallel_takes_two_capture_sizes_at_most(catalog):
    profile_of(catalog).update(tensor_parallel=2, capture_sizes=[1, 2, 4, 8])
    said = only_problem(catalog)
    assert "models.one.profiles.none.capture_sizes: 4 capture sizes" in said
    assert "keep two, as [1, 8]" in said


def test_one_chip_takes_as_many_capture_sizes_as_one_likes(catalog):
    profile_of(catalog).update(capture_sizes=[1, 2, 4, 8])
    check(catalog)


def test_a_capture_size_above_the_sequences_served_is_never_used(catalog):
    profile_of(catalog).update(capture_sizes=[1, 16])
    assert "the capture size 16 is larger than max_num_seqs 8" in only_problem(catalog)


def test_the_default_capture_sizes_are_checked_as_well(catalog):
    profile_of(catalog).update(max_num_seqs=2)
    assert "the capture size 4 is larger than max_num_seqs 2" in only_problem(catalog)


def test_a_graph_mode_needs_a_size(catalog):
    profile_of(catalog).update(capture_sizes=[])
    assert "has no size to capture" in only_problem(catalog)


def test_without_graphs_capture_sizes_do_not_matter(catalog):
    profile_of(catalog).update(capture_sizes=[], cudagraph_mode="NONE")
    check(catalog)


def test_capture_sizes_ascend(catalog):
    profile_of(catalog).update(capture_sizes=[4, 1])
    with pytest.raises(CatalogError, match="ascending order"):
        check(catalog)


def test_w8a8sc_needs_the_sharded_loader(catalog):
    catalog["models"]["one"]["quantization"] = "w8a8sc"
    assert "load_format: sharded_state" in only_problem(catalog)


@pytest.mark.parametrize("weights", ["TP4", "TP4/name-tp4", "name_tp-4"])
def test_shards_of_another_tensor_parallel_are_refused(catalog, weights):
    profile_of(catalog).update(tensor_parallel=2, load_format="sharded_state", weights=weights)
    assert "is split for 4 ranks, not for 2" in only_problem(catalog)


def test_shards_of_the_right_tensor_parallel_pass(catalog):
    profile_of(catalog).update(tensor_parallel=2, load_format="sharded_state", weights="TP2/x-310-vllm-tp2")
    check(catalog)


def test_one_directory_cannot_be_shards_for_two_numbers_of_chips(catalog):
    sharded = {
        **profile_of(catalog),
        "tensor_parallel": 2,
        "load_format": "sharded_state",
        "weights": "shards",
    }
    catalog["models"]["one"]["profiles"] = {"na": sharded, "nb": {**sharded, "tensor_parallel": 4}}
    said = only_problem(catalog)
    assert "'na' loads the same weights as shards for 2 ranks, this as shards for 4 ranks" in said


def test_one_directory_cannot_be_whole_and_sharded(catalog):
    whole = profile_of(catalog)
    catalog["models"]["one"]["profiles"] = {"na": whole, "nb": {**whole, "load_format": "sharded_state"}}
    assert "'na' loads the same weights whole" in only_problem(catalog)


@pytest.mark.parametrize(
    ("pattern", "fits"), [("TP2/*", False), ("TP4/*", True), ("*", True), ("TP*/x", True)]
)
def test_the_patterns_must_take_the_directory_that_is_loaded(catalog, pattern, fits):
    profile_of(catalog)["weights"] = "TP4/x"
    catalog["models"]["one"]["files"] = {"include": [pattern]}
    if fits:
        check(catalog)
    else:
        assert "(include 'TP4/x/*')" in only_problem(catalog)


@pytest.mark.parametrize("pattern", ["/etc/*", "../*", "a\\b", "./x"])
def test_a_pattern_that_can_match_nothing_is_told(catalog, pattern):
    catalog["models"]["one"]["files"] = {"include": ["*", pattern]}
    assert "can match no file" in only_problem(catalog)


def test_excluding_what_is_included_is_told(catalog):
    catalog["models"]["one"]["files"] = {"include": ["a*"], "exclude": ["a*"]}
    assert "leaves out what 'include' takes" in only_problem(catalog)


def test_two_images_cannot_be_published_under_one_name(catalog):
    other = copy.deepcopy(profile_of(catalog))
    catalog["models"]["one"]["profiles"]["nmore"] = {**other, "tensor_parallel": 2}
    catalog["publish"] = {"tag": "{base}"}
    assert "'one' and 'nmore' would both be published as 'served-one:base'" in only_problem(catalog)


def test_a_tag_that_no_registry_takes_is_told(catalog):
    catalog["publish"] = {"tag": "-{base}-{profile}"}
    with pytest.raises(CatalogError, match="is not a valid image tag"):
        check(catalog)
