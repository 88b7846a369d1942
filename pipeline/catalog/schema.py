"""The shape of models.yaml: frozen, validated values. `load.py` reads the file, `target.py` picks from it.

Every field is documented here once; the JSON schema for editors is made from these classes.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

KEY = r"^[a-z0-9][a-z0-9._-]{0,62}$"
Key = Annotated[str, StringConstraints(pattern=KEY)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Z_][A-Z0-9_]*$")]
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=4096)]
Platform = Literal["linux/arm64", "linux/amd64"]


def _inside(path: str) -> str:
    if any(part in {".", ".."} for part in path.split("/")):
        raise ValueError("the path must not have . or .. as a part")
    return path


RelativePath = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$"), AfterValidator(_inside)
]


class Strict(BaseModel):
    """A frozen value that takes no unknown key. `load.py` validates in strict JSON mode: no type is guessed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Architecture(StrEnum):
    """The model families that the tool knows; hybrid means linear attention (GDN) beside full attention."""

    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3-moe"
    QWEN3_5 = "qwen3.5"
    QWEN3_5_MOE = "qwen3.5-moe"

    @property
    def hybrid(self) -> bool:
        """Whether the model keeps a mamba-style state, and so takes the mamba options."""
        return self in {Architecture.QWEN3_5, Architecture.QWEN3_5_MOE}

    @property
    def moe(self) -> bool:
        return self in {Architecture.QWEN3_MOE, Architecture.QWEN3_5_MOE}


class Quantization(StrEnum):
    """What the weights in the image are, in msmodelslim's terms."""

    FLOAT = "float"
    W8A8 = "w8a8"
    W8A8_DYNAMIC = "w8a8-dynamic"
    W8A8SC = "w8a8sc"


class Base(Strict):
    """A vllm-ascend image to layer on, and what is known of it."""

    images: tuple[Text, ...] = Field(
        min_length=1, description="References of the same image, tried in order; all must give one digest"
    )
    platforms: tuple[Platform, ...] = Field(default=("linux/arm64", "linux/amd64"), min_length=1)
    vllm: Text = Field(description="vLLM's version inside, e.g. 0.20.2")
    vllm_ascend: Text = Field(description="vllm-ascend's version inside, e.g. 0.20.2rc1")
    cann: Text | None = Field(default=None, description="CANN's version inside")
    driver: Text | None = Field(default=None, description="The driver version that the host must have")
    python: Text | None = Field(default=None, description="Python's version inside")
    note: Text | None = Field(default=None, description="What a user should know before choosing it")


class Source(Strict):
    """Where a model's files come from: exactly one of the three."""

    modelscope: Text | None = Field(default=None, description="A ModelScope model id, owner/name")
    huggingface: Text | None = Field(default=None, description="A Hugging Face model id, owner/name")
    dir: Text | None = Field(default=None, description="A directory; relative to models.yaml")
    revision: Text | None = Field(default=None, description="Branch, tag or commit; the hub's default branch if absent")

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in ("modelscope", "huggingface", "dir") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError("a source names exactly one of modelscope, huggingface or dir")
        for hub in ("modelscope", "huggingface"):
            value = getattr(self, hub)
            if value and not re.fullmatch(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+", value):
                raise ValueError(f"'{value}' is not a model id of the form owner/name")
        if self.dir and self.revision:
            raise ValueError("a directory has no revision")
        return self

    @property
    def label(self) -> str:
        """The source as a person writes it: `modelscope:Qwen/Qwen3.5-9B@master`; a directory shows no path."""
        if self.dir:
            return "dir"
        hub, name = ("modelscope", self.modelscope) if self.modelscope else ("huggingface", self.huggingface)
        return f"{hub}:{name}" + (f"@{self.revision}" if self.revision else "")


class Files(Strict):
    """Which of the source's files go into the image: shell patterns on the whole path, `*` crosses `/`."""

    include: tuple[Text, ...] = Field(default=("*",), min_length=1)
    exclude: tuple[Text, ...] = ()


class Profile(Strict):
    """One way to serve a model: a start script and its settings. The script is the profile's name + `.sh`."""

    tensor_parallel: Literal[1, 2, 4, 8] = Field(description="Chips used: one rank each")
    served_name: Name = Field(description="The model name that clients send")
    port: int = Field(default=12320, ge=1, le=65535, description="The port inside the container")
    weights: RelativePath | None = Field(
        default=None, description="The directory to load, relative to the model's directory; absent: the directory itself"
    )
    load_format: Literal["auto", "sharded_state"] = Field(
        default="auto", description="sharded_state for weights split per rank, and only for those"
    )
    max_model_len: int = Field(ge=256, le=1_048_576, description="Tokens of prompt and answer together")
    max_num_seqs: int = Field(ge=1, le=1024, description="Sequences served at once")
    max_num_batched_tokens: int | None = Field(default=None, ge=256, le=1_048_576)
    gpu_memory_utilization: float = Field(gt=0.0, lt=1.0)
    cudagraph_mode: Literal["FULL_DECODE_ONLY", "PIECEWISE", "NONE"] = "FULL_DECODE_ONLY"
    capture_sizes: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = Field(
        default=(1, 4), description="Batch sizes that get a captured graph; at most two when tensor_parallel > 1"
    )
    prefix_caching: bool = True
    chunked_prefill: bool = True
    trust_remote_code: bool = False
    reasoning_parser: Name | None = None
    tool_call_parser: Name | None = None
    media_path: Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f]*$")] | None = Field(
        default=None, description="Directory from which requests may read local images"
    )
    env: dict[EnvName, Text] = Field(default_factory=dict, description="More environment variables for the server")
    args: tuple[Text, ...] = Field(default=(), description="More arguments for `vllm serve`")
    note: Text | None = Field(default=None, description="Shown by `duopack list` and in the script")

    @field_validator("capture_sizes")
    @classmethod
    def _ascending(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if list(sizes) != sorted(set(sizes)):
            raise ValueError("capture sizes are given once each, in ascending order")
        return sizes


class Model(Strict):
    """One model of the catalog: where it comes from, where it lies in the image, how it is served."""

    title: Text = Field(description="The model's name for people")
    directory: RelativePath = Field(description="Its directory under /models/ in the image")
    architecture: Architecture
    quantization: Quantization = Quantization.FLOAT
    max_positions: int = Field(ge=1, description="The model's own limit on tokens (max_position_embeddings)")
    sources: tuple[Source, ...] = Field(min_length=1, description="Tried in order when the model is locked")
    files: Files = Files()
    profiles: dict[Key, Profile] = Field(min_length=1, description="By script name; the first is the image's command")
    image: Name | None = Field(default=None, description="The repository's last part; absent: the first served name")
    allow: tuple[Literal["index-total"], ...] = Field(
        default=(), description="Checks of the weights that this model is known to fail without harm"
    )
    license: Text | None = Field(default=None, description="SPDX expression of the weights' licence")


class Publish(Strict):
    """Where images go when no --to is given."""

    repository: Text | None = Field(
        default=None, description="registry.example/namespace; DUOPACK_REGISTRY overrides it; absent: oci:build/<key>"
    )
    tag: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_{}.-]{1,128}$")] = Field(
        default="{base}-{profile}", description="May use {base}, {profile} and {key}"
    )


class Catalog(Strict):
    """The whole of models.yaml."""

    version: Literal[1]
    default_base: Key
    default_platform: Platform = "linux/arm64"
    publish: Publish = Publish()
    bases: dict[Key, Base] = Field(min_length=1)
    models: dict[Key, Model] = Field(min_length=1)
    sets: dict[Key, tuple[Key, ...]] = Field(default_factory=dict, description="Images with several models, by key")
