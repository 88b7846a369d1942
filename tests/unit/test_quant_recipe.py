"""Recipes: the project's own, those of users, and what the streaming engine refuses to guess at."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import UsageError
from pipeline.stages.quantize.recipes import FAMILIES, find_recipe, recipe_names
from pipeline.weights.quant.modules import NotCoveredError
from pipeline.weights.quant.recipe import GIB, parse_recipe

STEP = """
    - type: linear_quant
      qconfig:
        act: {scope: per_token, dtype: int8, symmetric: True, method: minmax}
        weight: {scope: per_channel, dtype: int8, symmetric: True, method: minmax}
      include: ["*self_attn*"]
      exclude: ["*o_proj*"]
"""
TEXT = f"""
apiversion: modelslim_v1
spec:
  process:{STEP}
  save: [{{type: ascendv1_saver, part_file_size: 2}}]
"""


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_of_the_project_parses(name: str) -> None:
    recipe = find_recipe(name, "any", where="")
    assert recipe.part_bytes == 4 * GIB
    assert recipe.static == recipe.calibrated == name.endswith("static")
    if not recipe.calibrated:
        assert recipe.selections()


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("kind", ["w8a8-dynamic", "w8a8-static"])
def test_a_kind_names_the_recipe_of_the_architecture(kind: str, architecture: str) -> None:
    assert find_recipe(kind, architecture, where="").name == f"{FAMILIES[architecture]}-{kind}"


def test_an_architecture_without_a_recipe_is_named() -> None:
    with pytest.raises(UsageError, match="LlamaForCausalLM"):
        find_recipe("w8a8-dynamic", "LlamaForCausalLM", where="")


def test_a_file_is_a_recipe_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT)
    recipe = find_recipe(str(path), "any", where="")
    (selection,) = recipe.selections()
    assert recipe.part_bytes == 2 * GIB
    assert "model.layers.0.self_attn.q_proj" in selection
    assert "model.layers.0.self_attn.o_proj" not in selection
    assert "model.layers.0.mlp.up_proj" not in selection
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="UTF-8"):
        find_recipe(str(path), "any", where="")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("scope: per_token", "scope: per_tensor", "qconfig"),
        ("method: minmax}\n        weight", "method: histogram}\n        weight", "qconfig"),
        ("type: linear_quant", "type: iter_smooth", "iter_smooth"),
        ('"*self_attn*"', '"*[sm]*"', "pattern"),
        ('"*self_attn*"', '"{a,b}"', "pattern"),
        ("  save:", "  prior: []\n  save:", "prior"),
    ],
)
def test_the_streaming_engine_does_not_guess(old: str, new: str, why: str) -> None:
    assert old in TEXT
    with pytest.raises(NotCoveredError, match=why):
        parse_recipe("mine", TEXT.replace(old, new), "mine.yaml").selections()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("\t- x", "valid YAML"),
        ("just text", "apiversion"),
        ("apiversion: modelslim_v0\nspec: {}", "modelslim_v0"),
        ("apiversion: modelslim_v1\nspec: {process: {}}", "spec.process"),
        ("apiversion: modelslim_v1\nspec: {process: [3], save: [{type: ascendv1_saver}]}", "not a map"),
        ("apiversion: modelslim_v1\nspec: {process: [{type: group, configs: 3}]}", "configs are not a list"),
        (TEXT.replace("part_file_size: 2", "part_file_size: 5"), "part_file_size"),
        (TEXT.replace("part_file_size: 2", "part_file_size: true"), "part_file_size"),
        (TEXT.replace("ascendv1_saver", "mindie_format_saver"), "ascendv1_saver"),
        (TEXT.replace('["*self_attn*"]', "self_attn"), "include or exclude"),
    ],
)
def test_a_recipe_that_cannot_be_run_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        parse_recipe("mine", text, "mine.yaml")
    assert "mine.yaml" in str(caught.value)
    assert caught.value.mend
