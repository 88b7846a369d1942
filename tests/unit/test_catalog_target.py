"""Keys become targets, and targets have names and destinations."""

import copy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.catalog.load import load_catalog
from pipeline.catalog.schema import Catalog
from pipeline.catalog.target import (
    build_keys,
    default_destination,
    find_target,
    image_name,
    image_tag,
    platforms_of,
    repository_part,
    targets,
)
from pipeline.errors import UsageError
from pipeline.oci.reference import parse_reference

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog(ROOT / "models.yaml")


def with_publish(catalog: Catalog, **publish: str) -> Catalog:
    value = copy.deepcopy(catalog.model_dump(mode="json", exclude_none=True))
    return Catalog.model_validate({**value, "publish": {**value["publish"], **publish}})


def test_a_model_key_builds_the_model_with_its_first_profile(catalog):
    target = find_target(catalog, "27b")
    assert [key for key, _ in target.models] == ["27b"]
    assert target.profile_name == "n27"
    assert (target.base_key, target.platform) == ("v0.20.2rc1", "linux/arm64")
    assert target.base is catalog.bases["v0.20.2rc1"]


def test_a_profile_name_builds_its_model_with_that_command(catalog):
    target = find_target(catalog, "nn27")
    assert [key for key, _ in target.models] == ["27b"]
    assert target.profile.tensor_parallel == 4


def test_a_set_builds_its_models_and_starts_the_first(catalog):
    target = find_target(catalog, "full")
    assert tuple(key for key, _ in target.models) == catalog.sets["full"]
    assert target.default_model is catalog.models["9b"]
    assert target.profile_name == "n9"


def test_another_base_and_platform_can_be_asked_for(catalog):
    target = find_target(catalog, "9b", base="v0.23.0rc1", platform="linux/amd64")
    assert (target.base.vllm, target.platform) == ("0.23.0", "linux/amd64")


@pytest.mark.parametrize(
    ("key", "options", "said"),
    [
        ("9B-w8a", {}, "no model, profile or set '9B-w8a'.*did you mean 9b-w8a8.*duopack list"),
        ("zzzzzz", {}, "'duopack list' shows every key"),
        ("", {}, "no model, profile or set ''"),
        ("9b", {"base": "v0.18"}, "no base 'v0.18'.*take one of v0.20.2rc1, v0.23.0rc1"),
        ("9b", {"platform": "windows/arm64"}, "no platform 'windows/arm64'.*linux/arm64"),
        ("\x1b[31m", {}, "x1b"),
    ],
)
def test_what_the_catalog_does_not_have_is_told_with_what_it_has(catalog, key, options, said):
    with pytest.raises(UsageError, match=said) as caught:
        find_target(catalog, key, **options)
    assert "\x1b" not in str(caught.value)


def test_each_target_is_built_once(catalog):
    assert [target.key for target in targets(catalog, ("9b", "27b", "9b"))] == ["9b", "27b"]


def test_every_build_key_can_be_found_and_says_what_it_is(catalog):
    keys = build_keys(catalog)
    assert {"9b", "nn27", "full", "qwen3-8b"} <= {build.key for build in keys}
    for build in keys:
        target = find_target(catalog, build.key)
        assert build.chips == target.profile.tensor_parallel
        assert "\n" not in build.description


def test_each_image_is_built_under_one_key_only(catalog):
    images = [(t.models, t.profile_name) for t in (find_target(catalog, b.key) for b in build_keys(catalog))]
    assert all(images.count(image) == 1 for image in images)


def test_without_a_registry_images_go_to_a_layout_of_their_own(catalog):
    assert default_destination(catalog, find_target(catalog, "nn27")) == "oci:build/nn27"
    assert default_destination(catalog, find_target(catalog, "nn27"), work="w") == "oci:w/nn27"


def test_the_registry_of_the_environment_wins_over_the_catalogs(catalog):
    ours = with_publish(catalog, repository="catalog.example/team")
    target = find_target(ours, "9b")
    assert default_destination(ours, target) == "docker://catalog.example/team/qwen3.5-9b:v0.20.2rc1-n9"
    named = default_destination(ours, target, registry="docker://10.0.0.5:5000/llm/")
    assert named == "docker://10.0.0.5:5000/llm/qwen3.5-9b:v0.20.2rc1-n9"


def test_an_empty_variable_counts_as_unset(catalog):
    assert default_destination(catalog, find_target(catalog, "9b"), registry=" ", tag="") == "oci:build/9b"


def test_the_tag_can_be_given_and_may_use_places(catalog):
    named = default_destination(catalog, find_target(catalog, "nn27"), registry="r.example/x", tag="{key}-7")
    assert named == "docker://r.example/x/qwen3.5-27b:nn27-7"


@pytest.mark.parametrize(
    "registry", ["team/x", "https://r.example/x", "r.example/x:tag", "r.example/X", "r.example/x y"]
)
def test_a_wrong_registry_variable_is_told(catalog, registry):
    with pytest.raises(UsageError, match=r"^DUOPACK_REGISTRY: "):
        default_destination(catalog, find_target(catalog, "9b"), registry=registry)


@pytest.mark.parametrize("tag", ["{basse}", "{base", "a b", "-x", "{base!r}", "{base.__class__}", "x" * 129])
def test_a_wrong_tag_variable_is_told(catalog, tag):
    with pytest.raises(UsageError, match="DUOPACK_TAG"):
        default_destination(catalog, find_target(catalog, "9b"), registry="r.example/x", tag=tag)


def test_an_image_for_another_platform_does_not_replace_the_usual_one(catalog):
    usual = image_tag(catalog, find_target(catalog, "9b"))
    assert image_tag(catalog, find_target(catalog, "9b", platform="linux/amd64")) == f"{usual}-amd64"


def test_the_image_is_named_by_its_own_key_first(catalog):
    value = catalog.model_dump(mode="json", exclude_none=True)
    value["models"]["9b"]["image"] = "my-9b"
    assert image_name(find_target(Catalog.model_validate(value), "9b")) == "my-9b"
    assert image_name(find_target(catalog, "full")) == "full"


def test_every_destination_is_one_that_registries_take(catalog):
    for build in build_keys(catalog):
        name = default_destination(catalog, find_target(catalog, build.key), registry="r.example/x")
        reference = parse_reference(name)
        assert (reference.registry, str(reference)) == ("r.example", name)


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True))
def test_every_served_name_gives_a_repository_part(name):
    part = repository_part(name)
    assert parse_reference(f"docker://r.example/x/{part}:1").repository == f"x/{part}"


def test_a_set_lists_its_models_unless_a_profile_is_asked_for(catalog):
    full = find_target(catalog, "full")
    assert (full.lists, full.script) == (True, "list")
    assert image_tag(catalog, full) == "v0.20.2rc1-full"
    asked = find_target(catalog, "full", profile="nn27")
    assert (asked.lists, asked.script, asked.profile.tensor_parallel) == (False, "nn27", 4)
    assert image_tag(catalog, asked) == "v0.20.2rc1-nn27"
    with pytest.raises(UsageError, match="'full' has no profile 'n2'"):
        find_target(catalog, "full", profile="n2")


def test_all_is_every_model_of_the_catalog(catalog):
    target = find_target(catalog, "all")
    assert [key for key, _ in target.models] == list(catalog.models)
    assert (target.script, image_name(target), target.key) == ("list", "all", "all")


def test_a_catalog_may_mean_something_else_by_all(catalog):
    value = copy.deepcopy(catalog.model_dump(mode="json", exclude_none=True))
    own = Catalog.model_validate({**value, "sets": {"all": ["27b", "2b"]}})
    assert [key for key, _ in find_target(own, "all").models] == ["27b", "2b"]


@pytest.mark.parametrize(
    ("text", "platforms"),
    [
        (None, (None,)),
        ("linux/amd64", ("linux/amd64",)),
        ("linux/amd64,linux/arm64", ("linux/amd64", "linux/arm64")),
        ("all", ("linux/arm64", "linux/amd64")),
    ],
)
def test_platforms_are_a_list_or_all_of_the_base_s(catalog, text, platforms):
    assert platforms_of(catalog, text) == platforms


@pytest.mark.parametrize("text", ["", ",", "linux/arm64,", "linux/arm64,linux/arm64"])
def test_a_malformed_list_of_platforms_is_refused(catalog, text):
    with pytest.raises(UsageError, match="not a list of platforms"):
        platforms_of(catalog, text)
