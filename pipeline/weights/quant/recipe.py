"""A recipe: the YAML file that `msmodelslim quant --config_path` takes, and what of it the streaming engine covers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, NoReturn

from pipeline.errors import UsageError, quoted
from pipeline.weights.quant.modules import NotCoveredError

APIS: Final = ("modelslim_v1", "multimodal_vlm_modelslim_v1")
GIB: Final = 1 << 30
MOST_GIB: Final = 4
"""Per output file: what msmodelslim's own recipes take, and what the result of any engine shall keep."""
INT8: Final = {"dtype": "int8", "method": "minmax"}
DYNAMIC: Final = {
    "act": INT8 | {"scope": "per_token", "symmetric": True},
    "weight": INT8 | {"scope": "per_channel", "symmetric": True},
}
STATIC: Final = DYNAMIC | {"act": INT8 | {"scope": "per_tensor", "symmetric": False}}
SPECIAL: Final = "[]{}!\\|("
"""Characters that mean more to msmodelslim's matching than to ours."""


@dataclass(frozen=True)
class Selection:
    """Modules by name, with `*` for anything: what matches an include and no exclude."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]

    def __contains__(self, module: str) -> bool:
        return _any(module, self.include) and not _any(module, self.exclude)


@dataclass(frozen=True)
class Recipe:
    """A recipe as it was read; `text` is the file."""

    name: str
    text: str
    values: dict[str, Any]
    where: str

    @property
    def api(self) -> str:
        """The msmodelslim service that runs it."""
        return str(self.values["apiversion"])

    @property
    def part_bytes(self) -> int:
        """Bytes of tensors below which an output file stays, unless a single tensor is larger."""
        return int(self._saver().get("part_file_size", MOST_GIB)) * GIB

    @property
    def calibrated(self) -> bool:
        """Whether any step needs activations: then data runs through the model, for minutes or hours."""
        return any(step.get("qconfig") != DYNAMIC for step in self._steps())

    @property
    def static(self) -> bool:
        """Whether any step gives the activations one scale for all tokens."""
        return any(_scope(step) == "per_tensor" for step in self._steps())

    def selections(self) -> tuple[Selection, ...]:
        """Which modules become W8A8_DYNAMIC. Raises NotCoveredError when the recipe does anything else."""
        known = {"process", "save", "dataset", "default_text", "runner"}
        if extra := sorted(set(self._spec()) - known):
            self._uncovered(f"it has spec.{quoted(extra[0])}")
        selections = []
        for step in self._steps():
            if step.get("type") != "linear_quant":
                self._uncovered(f"it has a step of the type {quoted(str(step.get('type')))}")
            if extra := sorted(set(step) - {"type", "qconfig", "include", "exclude"}):
                self._uncovered(f"a step has {quoted(extra[0])}")
            if step.get("qconfig") != DYNAMIC:
                self._uncovered("a step's qconfig is not that of W8A8_DYNAMIC")
            include, exclude = self._patterns(step, "include", ["*"]), self._patterns(step, "exclude", [])
            selections.append(Selection(include, exclude))
        if not selections:
            self._uncovered("it has no step")
        return tuple(selections)

    def _steps(self) -> Iterator[dict[str, Any]]:
        """The steps, those of a group one by one."""
        for step in self._spec().get("process", []):
            if isinstance(step, dict) and step.get("type") == "group":
                yield from step.get("configs", [])
            else:
                yield step

    def _patterns(self, step: dict[str, Any], key: str, default: list[str]) -> tuple[str, ...]:
        patterns = step.get(key, default)
        for pattern in patterns:
            if not isinstance(pattern, str) or any(character in pattern for character in SPECIAL):
                self._uncovered(f"the pattern {quoted(str(pattern))} has more in it than '*' and '?'")
        return tuple(patterns)

    def _saver(self) -> dict[str, Any]:
        saver: dict[str, Any] = self._spec()["save"][0]
        return saver

    def _spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.values["spec"]
        return spec

    def _uncovered(self, what: str) -> NoReturn:
        raise NotCoveredError(
            f"the streaming engine makes W8A8_DYNAMIC without data only: {what}",
            where=self.where,
            mend="use --engine msmodelslim, or the recipe w8a8-dynamic",
        )


def parse_recipe(name: str, text: str, where: str) -> Recipe:
    """A recipe from its text. Raises UsageError when msmodelslim could not run it, or 310P not load the result."""
    import yaml

    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(
            f"it is not valid YAML ({quoted(' '.join(str(error).split()))})",
            where=where,
            mend="correct the file",
        ) from None
    if not isinstance(values, dict) or values.get("apiversion") not in APIS:
        found = quoted(str(values.get("apiversion"))) if isinstance(values, dict) else "missing"
        _refuse(f"apiversion is {found}, not one of {', '.join(APIS)}", where)
    spec = values.get("spec")
    steps = spec.get("process") if isinstance(spec, dict) else None
    if not isinstance(spec, dict) or not isinstance(steps, list) or not steps:
        _refuse("spec.process is not a list of steps", where)
    if not all(isinstance(step, dict) and isinstance(step.get("configs", []), list) for step in steps):
        _refuse("a step of spec.process is not a map, or its configs are not a list", where)
    inner = [one for step in steps for one in step.get("configs") or [step]]
    if not all(isinstance(step, dict) for step in inner):
        _refuse("a step of spec.process is not a map", where)
    if not all(isinstance(step.get(key, []), list) for step in inner for key in ("include", "exclude")):
        _refuse("a step's include or exclude is not a list", where)
    _check_saver(spec.get("save"), where)
    return Recipe(name, text, values, where)


def _check_saver(save: object, where: str) -> None:
    saver = save[0] if isinstance(save, list) and len(save) == 1 else None
    if not isinstance(saver, dict) or saver.get("type") != "ascendv1_saver":
        _refuse("spec.save is not one ascendv1_saver, the form that vllm-ascend reads", where)
    size = saver.get("part_file_size", MOST_GIB)
    if type(size) is not int or not 1 <= size <= MOST_GIB or set(saver) - {"type", "part_file_size"}:
        _refuse(f"spec.save takes a part_file_size from 1 to {MOST_GIB} (GiB) and nothing else", where)


def _scope(step: dict[str, Any]) -> object:
    qconfig = step.get("qconfig")
    act = qconfig.get("act") if isinstance(qconfig, dict) else None
    return act.get("scope") if isinstance(act, dict) else None


def _any(module: str, patterns: tuple[str, ...]) -> bool:
    return any(module == pattern or fnmatchcase(module, pattern) for pattern in patterns)


def _refuse(what: str, where: str) -> NoReturn:
    raise UsageError(what, where=where, mend="correct the recipe; docs/quantize.md shows one")
