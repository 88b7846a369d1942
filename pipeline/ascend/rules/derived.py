"""A script or Dockerfile that makes an image of a base, or of a container: what must not be done to it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.ascend.rules.rule import Rule, Severity, when

_INSTALL = re.compile(r"\b(?:pip[0-9.]*|uv|conda)\s+(?:pip\s+)?install\b([^\n;&|]*)")
_PINNED = ("torch", "torch-npu", "torch_npu", "vllm", "vllm-ascend", "transformers")
_NAMING = re.compile(
    r"\b(?:docker|podman)\s+"
    r"(?:(?:commit|tag)\s+(?:-\S+\s+)*\S+|(?:buildx\s+)?build\s[^\n;&|]*?(?:-t|--tag)|push)[ \t=]+(\S+)"
)
"""The name that an image is given or pushed under."""
_UPSTREAM = re.compile(r"(?:^|/)ascend/vllm-ascend(?=[:@]|$)")


@dataclass(frozen=True)
class TextCase:
    """A whole script, with its line continuations joined and its comments removed."""

    text: str

    @classmethod
    def of(cls, text: str) -> TextCase:
        joined = re.sub(r"\\\r?\n", " ", text)
        return cls(re.sub(r"(?m)(^|\s)#[^\n]*", r"\1", joined))

    def installed(self) -> list[str]:
        """The packages that it installs by name, lower case, without versions."""
        words = [word.strip("'\"") for found in _INSTALL.findall(self.text) for word in found.split()]
        names = [
            re.split(r"[=<>!~\[;@ ]", word, maxsplit=1)[0].lower() for word in words if word[:1].isalnum()
        ]
        wheels = [word.rpartition("/")[2].split("-")[0].lower() for word in words if word.endswith(".whl")]
        return [name for name in (*names, *wheels) if name]


def _triton(case: TextCase) -> str | None:
    found = [name for name in case.installed() if name.replace("_", "-") in {"triton", "triton-ascend"}]
    return when(found, ", ".join(dict.fromkeys(found)))


def _replaced(case: TextCase) -> str | None:
    found = [name for name in case.installed() if name in _PINNED]
    return when(found, ", ".join(dict.fromkeys(found)))


def _upstream_name(case: TextCase) -> str | None:
    names = [name for name in _NAMING.findall(case.text) if _UPSTREAM.search(name)]
    return when(names, ", ".join(dict.fromkeys(names)))


RULES: tuple[Rule[TextCase], ...] = (
    Rule(
        "derived-triton",
        Severity.ERROR,
        "pip install",
        _triton,
        'it installs {}, which the base leaves out on purpose: the server ends with "Cannot find option named'
        " 'Ascend310P3'\"",
        "uninstall triton and triton-ascend, and let nothing pull them in",
        "upstream's Dockerfile for 310P, which removes both",
    ),
    Rule(
        "derived-pins",
        Severity.WARNING,
        "pip install",
        _replaced,
        "it installs {} over what the base was built and tested with: the plugin may not load",
        "leave the base's own, or use a base that has the version",
        "upstream's Dockerfile for 310P, which pins them",
    ),
    Rule(
        "derived-upstream-name",
        Severity.ERROR,
        "docker commit, tag, build, push",
        _upstream_name,
        "it gives an image of its own the name {}: nobody can tell it from upstream's, which holds no models",
        "give it a name of your own",
        "the deployment guide's 194 GB image, which was made so",
    ),
)
