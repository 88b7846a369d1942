"""config.json as a plan needs it: natural numbers, flags and lists, each error with its key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from pipeline.errors import DuopackError, quoted
from pipeline.weights.check import read_json
from pipeline.weights.place import Place

LIMIT = 1 << 32
"""No size in a config of a real model comes near it; a broken one must not make a plan of that length."""


@dataclass(frozen=True)
class Config:
    """One object of config.json; `path` is the keys that lead to it, with dots."""

    values: dict[str, Any]
    where: str
    path: str = ""

    @property
    def architecture(self) -> str:
        """The first of `architectures`, by which vLLM chooses the model class."""
        names = self.values.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            self.refuse(
                "architectures", "names no architecture", "take a config.json that has it, as from the hub"
            )
        return names[0]

    def natural(self, *keys: str, default: int | None = None) -> int:
        """A number above zero under the first of `keys` that is there."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if type(value) is not int or not 0 < value < LIMIT:
                self.refuse(key, f"is {quoted(str(value))}, not a number above zero")
            return value
        if default is None:
            self.refuse(keys[0], "is missing")
        return default

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(key, f"is {quoted(str(value))}, not true or false")
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None when it is not there."""
        return self._list(key, str, "strings")

    def numbers(self, key: str) -> tuple[int, ...] | None:
        """A list of whole numbers, or None when it is not there."""
        return self._list(key, int, "numbers")

    def section(self, key: str) -> Config:
        """An object inside."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            self.refuse(key, "is missing or not an object")
        return Config(value, self.where, f"{self.path}{key}.")

    def refuse_if(self, key: str, why: str) -> None:
        """Refuses when `key` is there and not empty, zero or false."""
        if self.values.get(key):
            self.refuse(key, f"is set: {why}", "such a model cannot be split here; serve it unsplit")

    def divided(self, shards: int, *keys: str) -> None:
        """Refuses when a number is not divisible by the number of ranks."""
        for key in keys:
            value = self.natural(key)
            if value % shards:
                self.refuse(
                    key, f"is {value}, not divisible by the {shards} ranks", "choose a TP that divides it"
                )

    def _list(self, key: str, kind: type, plural: str) -> tuple[Any, ...] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            self.refuse(key, f"is not a list of {plural}")
        return tuple(value)

    def refuse(
        self, key: str, fault: str, mend: str = "take the config.json that belongs to the weights"
    ) -> NoReturn:
        """Refuses the config for what it says under `key`."""
        raise DuopackError(f"{self.path}{key} {fault}", where=self.where, mend=mend)


def read_config(directory: Place) -> Config:
    """config.json of a model's directory. Raises DuopackError when it is missing or no JSON object."""
    path = directory / "config.json"
    if not path.is_file():
        raise DuopackError(
            "config.json is missing", where=str(directory), mend="put the model's config.json there"
        )
    return Config(read_json(path), str(path))
