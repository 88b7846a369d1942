"""The environment, the arguments, and what must not be in an image."""

from __future__ import annotations

import posixpath
import re

from pipeline.ascend.rules.case import Case
from pipeline.ascend.rules.rule import Rule, Severity, when
from pipeline.ascend.serve import settings

_BASH_NAMES = frozenset({"BASHOPTS", "BASH_ENV", "ENV", "EUID", "IFS", "PATH", "PPID", "SHELLOPTS", "UID"})
_SECRET = re.compile(r"(^|_)(TOKEN|PASSWORD|PASSWD|SECRET|API_KEY|ACCESS_KEY|CREDENTIALS?)(_|$)")


def _secret(case: Case) -> str | None:
    names = [name for name in case.env if _SECRET.search(name)]
    return when(names, ", ".join(names)) or case.given("--api-key", "--hf-token")


def _reserved_env(case: Case) -> str | None:
    ours = {setting.name for setting in settings(case.model, case.profile)} | _BASH_NAMES
    names = [name for name in case.env if name in ours or name.startswith("DUOPACK_")]
    return when(names, ", ".join(names))


def _repeated_args(case: Case) -> str | None:
    ours = [flag for setting in settings(case.model, case.profile) for flag in setting.flags]
    if case.before("0.23.0rc1"):
        ours.append("--additional-config")
    return case.given(*ours)


def _visible_devices(case: Case) -> str | None:
    value = case.env.get("ASCEND_RT_VISIBLE_DEVICES")
    return when(value is not None, value)


def _whole_disk(case: Case) -> str | None:
    path = case.profile.media_path
    return when(path is not None and posixpath.normpath(path).strip("/") == "")


def _allocator(case: Case) -> str | None:
    value = case.env.get("PYTORCH_NPU_ALLOC_CONF", "")
    return when("expandable_segments:True" in value and "max_split_size_mb" in value, value)


RULES = (
    Rule(
        "hccl-expansion",
        Severity.WARNING,
        lambda case: when(
            case.env.get("HCCL_OP_EXPANSION_MODE", "HOST") not in {"HOST", "AI_CPU"},
            case.env.get("HCCL_OP_EXPANSION_MODE"),
        ),
        "the 300I Duo does not support HCCL_OP_EXPANSION_MODE={}: it silently becomes HOST",
        "remove it from env",
        "CANN's page on HCCL_OP_EXPANSION_MODE",
    ),
    Rule(
        "hccl-ai-cpu-graphs",
        Severity.WARNING,
        lambda case: when(case.graphs and case.env.get("HCCL_OP_EXPANSION_MODE") == "AI_CPU"),
        "HCCL_OP_EXPANSION_MODE=AI_CPU excludes static graphs and everything but AllReduce",
        "remove it from env",
        "CANN's page on HCCL_OP_EXPANSION_MODE",
    ),
    Rule(
        "allocator",
        Severity.ERROR,
        _allocator,
        "PYTORCH_NPU_ALLOC_CONF={}: expandable_segments and max_split_size_mb exclude each other",
        "keep one of them",
        "torch_npu's allocator",
    ),
    Rule(
        "visible-devices",
        Severity.ERROR,
        _visible_devices,
        "ASCEND_RT_VISIBLE_DEVICES={} in an image fixes chips that the container may not have",
        "remove it from env: chips are chosen when the container is started",
        "CANN: ids inside a container are logical and start at 0",
    ),
    Rule(
        "env-reserved",
        Severity.ERROR,
        _reserved_env,
        "env names {}, which the start script or bash uses itself",
        "use the profile's own key for it, or another name",
        "duopack's start script; bash's own variables",
    ),
    Rule(
        "args-repeat",
        Severity.ERROR,
        _repeated_args,
        "args give {}, which the start script gives already: its checks would not see the second one",
        "use the profile's own key for it",
        "vLLM's argument parser takes the last of two",
    ),
    Rule(
        "media-path-root",
        Severity.ERROR,
        _whole_disk,
        "media_path / lets every client read every file of the container",
        "name one directory that holds media, or leave media_path out",
        "vLLM's security notes on allowed-local-media-path",
    ),
    Rule(
        "secret-in-image",
        Severity.ERROR,
        _secret,
        "{} looks like a secret, and everyone who can pull the image could read it",
        "give it when the container is started",
        "duopack: no secret enters an image",
    ),
)
