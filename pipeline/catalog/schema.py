"""The shape of models.yaml: frozen, validated values. `load.py` reads the file, `target.py` picks from it.

Every field is documented here once; the JSON schema for editors is made from these classes.
"""

from __future__ import annotations

from enum import StrEnum
from string import Formatter
from typing import Annotated, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

KEY: Final = r"^[a-z0-9][a-z0-9._-]{0,62}$"
NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
ENV_NAME: Final = r"^[A-Z_][A-Z0-9_]*$"
# Letters of any script, but nothing that moves the cursor, is invisible or turns the reading direction.
_UNSEEN = r"\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
TEXT: Final = rf"^[^{_UNSEEN}]+$"
RELATIVE_PATH: Final = r"^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$"
ABSOLUTE_PATH: Final = rf"^/[^{_UNSEEN}]*$"
# The grammar of distribution's reference specification: one part of a repository's path, and a whole one.
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+(?::[0-9]+)?|localhost|[A-Za-z0-9-]+:[0-9]+"
IMAGE: Final = rf"^{_PART}$"
REPOSITORY: Final = rf"^(?:{_HOST})(?:/{_PART})*$"
HUB_ID: Final = r"^[A-Za-z0-9_-][A-Za-z0-9._-]*/[A-Za-z0-9_-][A-Za-z0-9._-]*$"
REVISION: Final = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$"
TAG: Final = r"^[A-Za-z0-9_{}.-]{1,128}$"

FORMS: Final[dict[str, str]] = {
    KEY: "lower-case letters, digits, '.', '_' and '-', 63 at most, starting with a letter or digit",
    NAME: "letters, digits, '.', '_' and '-', 128 at most, starting with a letter or digit",
    ENV_NAME: "capital letters, digits and '_', as environment variables are named",
    TEXT: "text on one line, not empty, without control or invisible characters",
    RELATIVE_PATH: "a relative path of letters, digits, '.', '_' and '-', with '/' between its parts",
    ABSOLUTE_PATH: "an absolute path, starting with '/'",
    IMAGE: "lower-case letters and digits, with single '.', '_' or '-' between them",
    REPOSITORY: "a registry's host and, after it, a path in lower case: registry.example:5000/team",
    HUB_ID: "a model id of the form owner/name",
    REVISION: "a branch, tag or commit: letters, digits, '.', '_' and '-', with '/' between its parts",
    TAG: "letters, digits, '.', '_', '-' and the places {base}, {profile} and {key}, 128 at most",
}
"""What each pattern means in words, for errors."""

Key = Annotated[str, StringConstraints(pattern=KEY)]
Name = Annotated[str, StringConstraints(pattern=NAME)]
EnvName = Annotated[str, StringConstraints(pattern=ENV_NAME)]
Text = Annotated[str, StringConstraints(pattern=TEXT, max_length=4096)]
HubId = Annotated[str, StringConstraints(pattern=HUB_ID, max_length=200)]
Platform = Literal["linux/arm64", "linux/amd64"]


def _wrong(what: str, mend: str) -> PydanticCustomError:
    """A validator's refusal in words; `words.py` shows the mend beside it."""
    # The texts are given as context, since pydantic would fill in what stands in braces.
    return PydanticCustomError("refused", "{what}", {"what": what, "mend": mend})


def _no_truth(value: object) -> object:
    """Refuses true and 2.0 where a number is one of a few: Python, and so Literal, takes them for 1 and 2."""
    if isinstance(value, bool | float):
        raise PydanticCustomError("int_type", "not a whole number")
    return value


def _inside(path: str) -> str:
    if any(part in {".", ".."} for part in path.split("/")):
        raise _wrong("the path must not have . or .. as a part", "write the names below the directory only")
    return path


Ranks = Annotated[Literal[1, 2, 4, 8], BeforeValidator(_no_truth)]
RelativePath = Annotated[str, StringConstraints(pattern=RELATIVE_PATH), AfterValidator(_inside)]


class Strict(BaseModel):
    """A frozen value that takes no unknown key. `load` validates in strict JSON mode: no type is guessed."""

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
    """A vllm-ascend image to layer on, and what is known of it; what is not known is left out."""

    images: tuple[Text, ...] = Field(
        min_length=1,
        description="References of one image: the first, then its mirrors; those that answer must agree",
    )
    platforms: tuple[Platform, ...] = Field(
        default=("linux/arm64", "linux/amd64"), min_length=1, description="Platforms whose digests are locked"
    )
    vllm: Text = Field(description="vLLM's version inside, e.g. 0.20.2")
    vllm_ascend: Text = Field(description="vllm-ascend's version inside, e.g. 0.20.2rc1")
    cann: Text | None = Field(default=None, description="CANN's version inside")
    driver: Text | None = Field(default=None, description="The Ascend driver version that the host must have")
    python: Text | None = Field(default=None, description="Python's version inside")
    note: Text | None = Field(default=None, description="What a user should know before choosing it")


class Source(Strict):
    """Where a model's files come from: exactly one of modelscope, huggingface and dir."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": [name]} for name in ("modelscope", "huggingface", "dir")]}
    )

    modelscope: HubId | None = Field(default=None, description="A ModelScope model id, owner/name")
    huggingface: HubId | None = Field(default=None, description="A Hugging Face model id, owner/name")
    dir: Text | None = Field(default=None, description="A directory on this machine; relative to models.yaml")
    revision: Annotated[str, StringConstraints(pattern=REVISION, max_length=200)] | None = Field(
        default=None, description="Branch, tag or commit; the hub's default branch if absent"
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in ("modelscope", "huggingface", "dir") if getattr(self, name)]
        if len(given) != 1:
            raise _wrong("a source names exactly one of modelscope, huggingface or dir", "keep one of them")
        if self.dir and self.revision:
            raise _wrong("a directory has no revision", "remove the revision")
        return self

    @property
    def label(self) -> str:
        """As a person writes it: `modelscope:Qwen/Qwen3.5-9B@master`; a directory shows no path."""
        if self.dir:
            return "dir"
        hub, name = ("modelscope", self.modelscope) if self.modelscope else ("huggingface", self.huggingface)
        return f"{hub}:{name}" + (f"@{self.revision}" if self.revision else "")


class Files(Strict):
    """Which of the source's files go into the image: shell patterns on the whole path, `*` crosses `/`."""

    include: tuple[Text, ...] = Field(
        default=("*",), min_length=1, description="Take what matches one of these"
    )
    exclude: tuple[Text, ...] = Field(
        default=(), description="Leave out what matches one of these, whatever include says"
    )


class Profile(Strict):
    """One way to serve a model: a start script and its settings. The script is the profile's name + `.sh`."""

    tensor_parallel: Ranks = Field(description="Chips used, one rank each; a 300I Duo card has two chips")
    served_name: Name = Field(description="The model name that clients send in `model`")
    port: int = Field(default=12320, ge=1, le=65535, description="The port inside the container")
    weights: RelativePath | None = Field(
        default=None,
        description="The directory to load, relative to the model's directory; absent: the directory itself",
    )
    load_format: Literal["auto", "sharded_state"] = Field(
        default="auto",
        description="sharded_state for weights split per rank, which need it; auto for all others",
    )
    max_model_len: int = Field(ge=256, le=1_048_576, description="Tokens of prompt and answer together")
    max_num_seqs: int = Field(ge=1, le=1024, description="Sequences served at once")
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=256,
        le=1_048_576,
        description="Tokens per step over all sequences; absent: vLLM's default",
    )
    gpu_memory_utilization: float = Field(
        gt=0.0,
        lt=1.0,
        description="Share of each chip's memory (about 44 GB) that the server may use, e.g. 0.8",
    )
    cudagraph_mode: Literal["FULL_DECODE_ONLY", "PIECEWISE", "NONE"] = Field(
        default="FULL_DECODE_ONLY",
        description="Graph mode; FULL_DECODE_ONLY is recommended on 310P, NONE runs eagerly",
    )
    capture_sizes: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = Field(
        default=(1, 4),
        description="Batch sizes that get a captured graph, ascending; at most two when tensor_parallel > 1",
    )
    prefix_caching: bool = Field(default=True, description="Keep the KV cache of shared prompt prefixes")
    chunked_prefill: bool = Field(
        default=True, description="Prefill long prompts in pieces; a hybrid model's prefix caching needs it"
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python code that comes with the weights; Qwen3 and Qwen3.5 do not need it",
    )
    reasoning_parser: Name | None = Field(
        default=None, description="qwen3 for models that think; absent: none"
    )
    tool_call_parser: Name | None = Field(
        default=None, description="qwen3_coder for Qwen3.5, hermes for Qwen3; absent: no tool calls"
    )
    media_path: Annotated[str, StringConstraints(pattern=ABSOLUTE_PATH)] | None = Field(
        default=None,
        description="Directory in the container from which requests may read images; absent: none",
    )
    env: dict[EnvName, Text] = Field(
        default_factory=dict, description="More environment variables for the server"
    )
    args: tuple[Text, ...] = Field(default=(), description="More arguments for `vllm serve`")
    note: Text | None = Field(default=None, description="Shown by `duopack list` and in the script")

    @field_validator("capture_sizes")
    @classmethod
    def _ascending(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if list(sizes) != sorted(set(sizes)):
            raise _wrong(
                "capture sizes are given once each, in ascending order", f"write {sorted(set(sizes))}"
            )
        return sizes


class Quantize(Strict):
    """Quantize the source's float weights while building (docs/quantize.md)."""

    recipe: Text = Field(
        default="w8a8-dynamic",
        description="w8a8-dynamic, w8a8-static, w8a8sc, or a recipe file; relative to models.yaml",
    )
    engine: Literal["auto", "streaming", "msmodelslim", "w8a8sc"] = Field(
        default="auto", description="auto: streaming where it covers the recipe, else msmodelslim"
    )


class Model(Strict):
    """One model of the catalog: where it comes from, where it lies in the image, how it is served."""

    title: Text = Field(description="The model's name for people")
    directory: RelativePath = Field(description="Its directory under /models/ in the image")
    architecture: Architecture = Field(
        description="The model family; Qwen3.5 is hybrid and takes the mamba options"
    )
    quantization: Quantization = Field(
        default=Quantization.FLOAT, description="What the weights in the image are"
    )
    max_positions: int = Field(ge=1, description="The model's own limit on tokens (max_position_embeddings)")
    sources: tuple[Source, ...] = Field(min_length=1, description="Tried in order when the model is locked")
    files: Files = Field(default=Files(), description="Which files to take; absent: all")
    quantize: Quantize | None = Field(
        default=None, description="Absent: the source's weights are taken as they are"
    )
    shard: tuple[Ranks, ...] = Field(
        default=(),
        description="Split the weights for these tensor-parallel sizes, each into TP{n}/<name>-tp{n}; only the "
        "splits go into the image (docs/shards.md)",
    )
    profiles: dict[Key, Profile] = Field(
        min_length=1, description="By script name; the first is the image's command"
    )
    image: Annotated[str, StringConstraints(pattern=IMAGE, max_length=128)] | None = Field(
        default=None,
        description="The last part of the image's repository; absent: the first served name in lower case",
    )
    allow: tuple[Literal["index-total", "degenerate-answer"], ...] = Field(
        default=(),
        description="Checks that this model is known to fail without harm: index-total of the weights, "
        "degenerate-answer of `duopack smoke` (a test model with random weights talks nonsense)",
    )
    license: Text | None = Field(
        default=None, description="SPDX expression of the weights' licence, e.g. Apache-2.0"
    )

    @property
    def made(self) -> bool:
        """Whether the image's files are made from the source's, so that the lock does not name them."""
        return self.quantize is not None or bool(self.shard)

    @property
    def default_profile(self) -> str:
        """The first profile: the image's command when nothing else is asked for."""
        return next(iter(self.profiles))


def check_tag_template(template: str) -> str:
    """Returns a tag's template when it can be filled in; raises ValueError in words when it cannot."""
    try:
        places = [(name, spec, conversion) for _, name, spec, conversion in Formatter().parse(template)]
    except ValueError:
        raise ValueError(f"'{template}' has a brace without its partner") from None
    for name, spec, conversion in places:
        if name is not None and (name not in {"base", "profile", "key"} or spec or conversion):
            raise ValueError(f"'{{{name}}}' is not one of {{base}}, {{profile}} and {{key}}")
    return template


class Publish(Strict):
    """Where images go when no --to is given."""

    repository: Annotated[str, StringConstraints(pattern=REPOSITORY, max_length=255)] | None = Field(
        default=None,
        description="registry.example/namespace; DUOPACK_REGISTRY overrides it; absent: build/<key>",
    )
    tag: Annotated[str, StringConstraints(pattern=TAG)] = Field(
        default="{base}-{profile}",
        description="The image's tag; {base}, {profile} and {key} are filled in; DUOPACK_TAG overrides it",
    )

    @field_validator("tag")
    @classmethod
    def _places(cls, tag: str) -> str:
        try:
            return check_tag_template(tag)
        except ValueError as error:
            raise _wrong(str(error), "write plain text with {base}, {profile} and {key} in it") from None


class Catalog(Strict):
    """The whole of models.yaml."""

    version: Annotated[Literal[1], BeforeValidator(_no_truth)] = Field(
        description="The version of this file's form"
    )
    default_base: Key = Field(description="The base that is built on when none is asked for")
    default_platform: Platform = Field(
        default="linux/arm64", description="The platform that is built when none is asked for"
    )
    publish: Publish = Field(default=Publish(), description="Where images go when no --to is given")
    bases: dict[Key, Base] = Field(min_length=1, description="Base images, by key")
    models: dict[Key, Model] = Field(
        min_length=1, description="Models, by the key that `duopack build` takes"
    )
    sets: dict[Key, Annotated[tuple[Key, ...], Field(min_length=1)]] = Field(
        default={},
        description="Images with several models, by key; the command lists them, unless --profile names one",
    )
