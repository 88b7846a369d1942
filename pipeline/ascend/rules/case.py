"""What a rule looks at: a model, a profile and a base, with the questions that rules ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.ascend.versions import version_key

if TYPE_CHECKING:
    from pipeline.catalog.schema import Base, Model, Profile


@dataclass(frozen=True)
class Case:
    """One profile of one model on one base."""

    model: Model
    profile: Profile
    base: Base

    def before(self, version: str) -> bool:
        """Whether the base's vllm-ascend is older than `version`."""
        return version_key(self.base.vllm_ascend) < version_key(version)

    @property
    def graphs(self) -> bool:
        """Whether steps run as captured graphs."""
        return self.profile.cudagraph_mode != "NONE"

    @property
    def hybrid(self) -> bool:
        return self.model.architecture.hybrid

    @property
    def ranks(self) -> int:
        return self.profile.tensor_parallel

    @property
    def sharded(self) -> bool:
        return self.profile.load_format == "sharded_state"

    @property
    def env(self) -> Mapping[str, str]:
        """The profile's own environment variables."""
        return self.profile.env

    def flags(self) -> tuple[str, ...]:
        """The options among the profile's arguments, in vLLM's spelling (dashes, no value)."""
        words = (word.partition("=")[0] for word in self.profile.args if word.startswith("-"))
        return tuple(word.replace("_", "-") if word.startswith("--") else word for word in words)

    def given(self, *flags: str) -> str | None:
        """The first of these options that the profile's arguments hold; `--x.y` counts as `--x`."""
        held = {flag.partition(".")[0] for flag in self.flags()}
        return next((flag for flag in flags if flag in held), None)

    def value(self, flag: str) -> str | None:
        """The value of an option among the profile's arguments; the last one counts."""
        found = None
        for word, after in zip(self.profile.args, (*self.profile.args[1:], ""), strict=False):
            name, equals, value = word.partition("=")
            if name.replace("_", "-") == flag:
                found = value if equals else after
        return found
