"""/models/launch.json as values, read with distrust; `stages.launch` writes it, and docs/launch.md describes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from pipeline.ascend.serve import MODELS_ROOT
from pipeline.errors import DuopackError, quoted
from pipeline.oci.documents import parse_object

LAUNCH = f"{MODELS_ROOT}/launch.json".lstrip("/")
VERSION = 1
MAX_LAUNCH = 1 << 20
MAX_PROFILES = 200

Kind = TypeVar("Kind", str, int)


@dataclass(frozen=True)
class LaunchProfile:
    """One way to serve a model; paths are absolute, as in the file."""

    name: str
    script: str
    served_name: str
    tensor_parallel: int
    port: int
    weights: str
    load_format: str
    max_model_len: int


@dataclass(frozen=True)
class LaunchModel:
    """A model of the image."""

    key: str
    title: str
    directory: str
    quantization: str
    profiles: tuple[LaunchProfile, ...]


@dataclass(frozen=True)
class Launch:
    """What the image says of itself; `document` is the whole JSON value."""

    default: str
    base_image: str
    base_digest: str
    vllm: str
    models: tuple[LaunchModel, ...]
    document: dict[str, Any]

    def profiles(self) -> Iterator[tuple[LaunchModel, LaunchProfile]]:
        for model in self.models:
            for profile in model.profiles:
                yield model, profile

    @property
    def default_profile(self) -> LaunchProfile | None:
        return next((profile for _, profile in self.profiles() if profile.name == self.default), None)


def parse_launch(data: bytes) -> Launch:
    """Raises DuopackError when it is no JSON, of another version, or lacks what it must say."""
    where = f"/{LAUNCH}"
    document = parse_object(data, where=where, limit=MAX_LAUNCH)
    if document.get("version") != VERSION:
        found = quoted(repr(document.get("version")), 40)
        raise _bad(
            f"its version is {found}; this duopack knows {VERSION}", "use the duopack that made the image"
        )
    base = _object(document.get("base"), "base")
    models = tuple(_model(value) for value in _list(document, "models"))
    if sum(len(model.profiles) for model in models) > MAX_PROFILES:
        raise _bad(f"it has more than {MAX_PROFILES} profiles")
    return Launch(
        default=_field(document, "default", str),
        base_image=_field(base, "image", str),
        base_digest=_field(base, "digest", str),
        vllm=_field(base, "vllm", str),
        models=models,
        document=document,
    )


def _model(value: Any) -> LaunchModel:
    found = _object(value, "a model")
    return LaunchModel(
        key=_field(found, "key", str),
        title=_field(found, "title", str),
        directory=_field(found, "directory", str),
        quantization=_field(found, "quantization", str),
        profiles=tuple(_profile(profile) for profile in _list(found, "profiles")),
    )


def _profile(value: Any) -> LaunchProfile:
    found = _object(value, "a profile")
    return LaunchProfile(
        name=_field(found, "name", str),
        script=_field(found, "script", str),
        served_name=_field(found, "served_name", str),
        tensor_parallel=_field(found, "tensor_parallel", int),
        port=_field(found, "port", int),
        weights=_field(found, "weights", str),
        load_format=_field(found, "load_format", str),
        max_model_len=_field(found, "max_model_len", int),
    )


def _field(value: dict[str, Any], name: str, kind: type[Kind]) -> Kind:
    found = value.get(name)
    if not isinstance(found, kind) or isinstance(found, bool):
        raise _bad(f"its '{name}' is {quoted(repr(found), 60)}")
    return found


def _list(value: dict[str, Any], name: str) -> list[Any]:
    found = value.get(name)
    if not isinstance(found, list):
        raise _bad(f"its '{name}' is no list")
    return found


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(f"{name} in it is no object")
    return value


def _bad(what: str, mend: str = "build the image again") -> DuopackError:
    return DuopackError(what, where=f"/{LAUNCH}", mend=mend)
