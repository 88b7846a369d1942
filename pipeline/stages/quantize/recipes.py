"""Recipes by name: the project's own for each architecture, or a file of the user's."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Final

from pipeline.errors import UsageError, quoted
from pipeline.weights.check import MAX_JSON
from pipeline.weights.quant.recipe import Recipe, parse_recipe

KINDS: Final = ("w8a8-dynamic", "w8a8-static")
FAMILIES: Final = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3_5ForConditionalGeneration": "qwen3.5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3.5-moe",
}

W8A8SC: Final = "w8a8sc"
"""No recipe of ours: upstream has one of its own, and the engine of this name runs it."""


def recipe_names() -> tuple[str, ...]:
    """The recipes that come with the project."""
    entries = (entry.name for entry in (files("pipeline") / "recipes").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in entries if name.endswith(".yaml")))


def find_recipe(name: str, architecture: str, *, where: str) -> Recipe:
    """A recipe by its kind (w8a8-dynamic: the one for the architecture), its full name, or its file.

    Raises UsageError when there is none.
    """
    if name == W8A8SC:
        return Recipe(name, "", {"apiversion": "modelslim_v0", "spec": {"process": []}}, f"recipe {name}")
    if name in KINDS:
        family = FAMILIES.get(architecture)
        full = f"{family}-{name}"
        if family is None or full not in recipe_names():
            known = ", ".join(each for each, short in FAMILIES.items() if f"{short}-{name}" in recipe_names())
            raise UsageError(
                f"there is no recipe {name} for {quoted(architecture)}",
                where=where,
                mend=f"give a recipe file with --recipe FILE; {name} is there for {known}",
            )
        return _own(full)
    if name in recipe_names():
        return _own(name)
    path = Path(name)
    if path.is_file() and path.stat().st_size <= MAX_JSON:
        return parse_recipe(path.name, _text(path), str(path))
    raise UsageError(
        f"'{quoted(name)}' is neither a recipe nor a file",
        where="--recipe",
        mend=f"give one of {', '.join((*KINDS, W8A8SC, *recipe_names()))}, or a YAML file for msmodelslim",
    )


def _own(name: str) -> Recipe:
    text = (files("pipeline") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    return parse_recipe(name, text, f"recipe {name}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError("it is not text in UTF-8", where=str(path), mend="give a YAML file") from None
