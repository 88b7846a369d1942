"""What a rule looks at: a served model, its command line and a base, with the questions that rules ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from pipeline.ascend.serve import arguments, command, defaults, settings
from pipeline.ascend.serve_line import ServeLine, read_line
from pipeline.ascend.versions import version_key

if TYPE_CHECKING:
    from pipeline.catalog.schema import Architecture, Base, Model, Profile, Quantization

DEFAULT_SEQS = 256
"""vLLM's own --max-num-seqs for a server on a chip of less than 70 GiB."""


class Served(Protocol):
    """What a rule must know of a model; a model of the catalog knows it."""

    @property
    def title(self) -> str: ...

    @property
    def architecture(self) -> Architecture: ...

    @property
    def quantization(self) -> Quantization: ...

    @property
    def max_positions(self) -> int: ...


@dataclass(frozen=True)
class Case:
    """One command that serves one model on one base.

    `profile` is what the command was made from; None for a command that somebody wrote. `own_env` are the variables
    that it sets besides those that every start script has.
    """

    model: Served
    line: ServeLine
    base: Base
    profile: Profile | None = None
    catalog_model: Model | None = None

    @property
    def written(self) -> bool:
        """Whether somebody wrote the command, and no start script of ours stands around it."""
        return self.profile is None

    @property
    def env(self) -> Mapping[str, str]:
        """The variables that the command or the profile sets."""
        return self.line.env

    @property
    def hybrid(self) -> bool:
        return self.model.architecture.hybrid

    @property
    def moe(self) -> bool:
        return self.model.architecture.moe

    @property
    def quantization(self) -> str:
        return self.model.quantization.value

    @property
    def ranks(self) -> int:
        return self.line.number("--tensor-parallel-size") or 1

    @property
    def sharded(self) -> bool:
        return self.line.value("--load-format") == "sharded_state"

    @property
    def max_model_len(self) -> int:
        """Without the option vLLM takes the model's own limit."""
        return self.line.number("--max-model-len") or self.model.max_positions

    @property
    def max_num_seqs(self) -> int:
        return self.line.number("--max-num-seqs") or DEFAULT_SEQS

    @property
    def prefix_caching(self) -> bool:
        """Off for a hybrid model unless asked for, on for others unless refused: vLLM's own defaults."""
        given = self.line.switch("--enable-prefix-caching")
        return not self.hybrid if given is None else given

    @property
    def chunked_prefill(self) -> bool:
        return self.line.switch("--enable-chunked-prefill") is not False

    @cached_property
    def _compilation(self) -> Mapping[str, object]:
        return self.line.config("--compilation-config")

    @property
    def graph_mode(self) -> str | None:
        """The graph mode in capitals; NONE for eager; None when the command leaves it to vLLM."""
        if self.line.switch("--enforce-eager"):
            return "NONE"
        mode = self._compilation.get("cudagraph_mode")
        return str(mode).upper() if mode is not None else None

    @property
    def graphs(self) -> bool:
        """Whether steps run as captured graphs."""
        return self.graph_mode != "NONE"

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        sizes = self._compilation.get("cudagraph_capture_sizes")
        values = sizes if isinstance(sizes, list) else []
        flag = "--cudagraph-capture-sizes"
        for one in self.line.options:
            if one.flag == flag:
                values = [int(text) for text in one.values if text.isdigit()]
        return tuple(value for value in values if type(value) is int and value > 0)

    def before(self, version: str) -> bool:
        """Whether the base's vllm-ascend is older than `version`."""
        return version_key(self.base.vllm_ascend) < version_key(version)

    def given(self, *flags: str) -> str | None:
        """The first of these options that the command has; of a profile, that its own `args` have."""
        line = self.extra if self.profile else self.line
        return next((one.flag for one in line.options if one.flag.partition(".")[0] in flags), None)

    @cached_property
    def extra(self) -> ServeLine:
        """The profile's own arguments alone; the whole command when there is no profile."""
        return read_line(("", *self.profile.args), {}, self.base.vllm) if self.profile else self.line


def case_of(model: Model, profile: Profile, base: Base) -> Case:
    """The case of a profile: the command is the one that its start script gives."""
    words = arguments(command(model, profile, base), defaults(settings(model, profile)))
    return Case(model, read_line(words, profile.env, base.vllm), base, profile, model)
