"""The environment, the arguments, and what must not be in an image."""

from __future__ import annotations

import posixpath
import re

from pipeline.ascend.environment import VARIABLES
from pipeline.ascend.rules.case import Case
from pipeline.ascend.rules.rule import Bases, Rule, Severity, when
from pipeline.ascend.serve import settings
from pipeline.ascend.serve_line import ServeLine

_BASH_NAMES = frozenset({"BASHOPTS", "BASH_ENV", "ENV", "EUID", "IFS", "PATH", "PPID", "SHELLOPTS", "UID"})
_SECRET = re.compile(r"(^|_)(TOKEN|PASSWORD|PASSWD|SECRET|API_KEY|ACCESS_KEY|CREDENTIALS?)(_|$)")
_SECRET_FLAGS = ("--api-key", "--hf-token")
HCCL, ALLOCATOR, DEVICES = "HCCL_OP_EXPANSION_MODE", "PYTORCH_NPU_ALLOC_CONF", "ASCEND_RT_VISIBLE_DEVICES"
_PASSES = ("fuse_norm_quant", "enable_npugraph_ex")
CONFIG, INNER = "--additional-config", "ascend_compilation_config"


def _secret(case: Case) -> str | None:
    names = [name for name in case.env if _SECRET.search(name)] if case.profile else []
    return when(names, ", ".join(names)) or case.given(*_SECRET_FLAGS)


def _reserved_env(case: Case) -> str | None:
    if not case.profile or not case.catalog_model:
        return None
    ours = {setting.name for setting in settings(case.catalog_model, case.profile)} | _BASH_NAMES
    names = [name for name in case.env if name in ours or name.startswith("DUOPACK_")]
    return when(names, ", ".join(names))


def _repeated_args(case: Case) -> str | None:
    if not case.profile or not case.catalog_model:
        return None
    ours = [flag for setting in settings(case.catalog_model, case.profile) for flag in setting.flags]
    if case.before("0.23.0rc1"):
        ours.append(CONFIG)
    return case.given(*ours)


def _fixed_devices(case: Case) -> str | None:
    value = case.env.get(DEVICES) if case.profile else None
    return when(value is not None, value)


def _host_ids(case: Case) -> str | None:
    value = case.env.get(DEVICES) if case.written else None
    ids = re.findall(r"\d+", value or "")
    return when(any(int(number) >= case.ranks for number in ids), f"{value} at TP {case.ranks}")


def _whole_disk(case: Case) -> str | None:
    path = case.line.value("--allowed-local-media-path")
    return when(path is not None and posixpath.normpath(path).strip("/") == "")


def _allocator(case: Case) -> str | None:
    value = case.env.get(ALLOCATOR, "")
    return when("expandable_segments:True" in value and "max_split_size_mb" in value, value)


def _missing_env(case: Case) -> str | None:
    wanted = [one.name for one in VARIABLES if one.name != HCCL and case.ranks >= one.from_ranks]
    missing = [name for name in wanted if name not in case.env]
    return when(case.written and missing, ", ".join(missing))


def _with_env(case: Case) -> ServeLine:
    line = case.line
    for one in VARIABLES:
        if one.name not in line.env and case.ranks >= one.from_ranks:
            line = line.with_env(one.name, one.default)
    return line


def _buffer(case: Case) -> str | None:
    value = case.env.get("HCCL_BUFFSIZE", "")
    small = value.isdigit() and int(value) < 200
    return when(small and case.ranks > 1, value)


def _passes(case: Case, name: str) -> str | None:
    inner = case.line.config(CONFIG).get(INNER)
    said = inner.get(name) if isinstance(inner, dict) else None
    return when(said is not False, "true" if said else "not given")


def _without_passes(case: Case) -> ServeLine:
    config = case.line.config(CONFIG)
    inner = config.get(INNER)
    kept = inner if isinstance(inner, dict) else {}
    return case.line.with_config(CONFIG, {**config, INNER: {**kept, **dict.fromkeys(_PASSES, False)}})


RULES: tuple[Rule[Case], ...] = (
    Rule(
        "hccl-expansion",
        Severity.WARNING,
        HCCL,
        lambda case: when(case.env.get(HCCL, "HOST") not in {"HOST", "AI_CPU"}, case.env.get(HCCL)),
        f"the 300I Duo does not support {HCCL}={{}}: it silently becomes HOST",
        "set HOST, or leave it out",
        "CANN's page on HCCL_OP_EXPANSION_MODE",
        fix=lambda case: case.line.with_env(HCCL, "HOST"),
    ),
    Rule(
        "hccl-ai-cpu-graphs",
        Severity.WARNING,
        HCCL,
        lambda case: when(case.graphs and case.env.get(HCCL) == "AI_CPU"),
        f"{HCCL}=AI_CPU excludes static graphs and everything but AllReduce",
        "set HOST, or leave it out",
        "CANN's page on HCCL_OP_EXPANSION_MODE",
        fix=lambda case: case.line.with_env(HCCL, "HOST"),
    ),
    Rule(
        "hccl-buffer",
        Severity.WARNING,
        "HCCL_BUFFSIZE",
        _buffer,
        "HCCL_BUFFSIZE={} MiB is below CANN's own default of 200: the ranks' traffic stalls or fails",
        "set 512, as the deployment guide does",
        "CANN's page on HCCL_BUFFSIZE",
        fix=lambda case: case.line.with_env("HCCL_BUFFSIZE", "512"),
    ),
    Rule(
        "omp-threads",
        Severity.WARNING,
        "OMP_NUM_THREADS",
        lambda case: when(case.env.get("OMP_NUM_THREADS", "1") != "1", case.env.get("OMP_NUM_THREADS")),
        "OMP_NUM_THREADS={}: each rank gets as many threads, and they take the cores from vLLM's own",
        "set 1, as the base image does",
        "the deployment guide, chapter 5.1; the base image's own environment",
        fix=lambda case: case.line.with_env("OMP_NUM_THREADS", "1"),
    ),
    Rule(
        "environment",
        Severity.NOTE,
        ", ".join(one.name for one in VARIABLES if one.name != HCCL),
        _missing_env,
        "{} not set: memory is fragmented sooner, and threads of the ranks get in each other's way",
        "export them, as the deployment guide and duopack's start scripts do",
        "the deployment guide, chapter 6",
        fix=_with_env,
    ),
    Rule(
        "allocator",
        Severity.ERROR,
        ALLOCATOR,
        _allocator,
        f"{ALLOCATOR}={{}}: expandable_segments and max_split_size_mb exclude each other",
        "keep one of them",
        "torch_npu's allocator",
        fix=lambda case: case.line.with_env(ALLOCATOR, "expandable_segments:True"),
    ),
    Rule(
        "fuse-norm-quant",
        Severity.ERROR,
        f"fuse_norm_quant in {CONFIG}",
        lambda case: _passes(case, "fuse_norm_quant"),
        "fuse_norm_quant is {}: this base does not know that 310P lacks the pass, and answers or compilation break",
        f'give {CONFIG} \'{{"{INNER}": {{"fuse_norm_quant": false}}}}\'',
        "upstream's commands for 310P before 0.23.0rc1; later versions switch it off by themselves",
        Bases(before="0.23.0rc1"),
        fix=_without_passes,
    ),
    Rule(
        "npugraph-ex",
        Severity.NOTE,
        f"enable_npugraph_ex in {CONFIG}",
        lambda case: _passes(case, "enable_npugraph_ex"),
        "enable_npugraph_ex is {}: later versions switch this pass off on 310P, and this one does not",
        f'give {CONFIG} \'{{"{INNER}": {{"enable_npugraph_ex": false}}}}\'',
        "inferred from vllm-ascend's documentation of later versions",
        Bases(before="0.23.0rc1"),
        fix=_without_passes,
    ),
    Rule(
        "visible-devices",
        Severity.ERROR,
        DEVICES,
        _fixed_devices,
        f"{DEVICES}={{}} in an image fixes chips that the container may not have",
        "remove it: chips are chosen when the container is started",
        "CANN: ids inside a container are logical and start at 0",
    ),
    Rule(
        "visible-devices-logical",
        Severity.ERROR,
        DEVICES,
        _host_ids,
        f"{DEVICES}={{}}: ids inside a container count from 0 whatever the host calls the chips, and the server"
        " ends with 'input data rang[0-2)'",
        "leave it unset, and give the container the chips that it shall have",
        "CANN: ids inside a container are logical and start at 0",
        fix=lambda case: case.line.without_env(DEVICES),
    ),
    Rule(
        "env-reserved",
        Severity.ERROR,
        "env of a profile",
        _reserved_env,
        "env names {}, which the start script or bash uses itself",
        "use the profile's own key for it, or another name",
        "duopack's start script; bash's own variables",
    ),
    Rule(
        "args-repeat",
        Severity.ERROR,
        "args of a profile",
        _repeated_args,
        "args give {}, which the start script gives already: its checks would not see the second one",
        "use the profile's own key for it",
        "vLLM's argument parser takes the last of two",
    ),
    Rule(
        "media-path-root",
        Severity.ERROR,
        "--allowed-local-media-path (media_path)",
        _whole_disk,
        "the media path / lets every client read every file of the container",
        "name one directory that holds media, or leave it out",
        "vLLM's security notes on allowed-local-media-path",
        fix=lambda case: case.line.without("--allowed-local-media-path"),
    ),
    Rule(
        "trust-remote-code",
        Severity.NOTE,
        "--trust-remote-code (trust_remote_code)",
        lambda case: when(case.line.switch("--trust-remote-code")),
        "--trust-remote-code runs whatever code lies beside the weights, and Qwen3 and Qwen3.5 need none",
        "leave it out",
        "vLLM's model registry, which has both built in",
        fix=lambda case: case.line.without("--trust-remote-code"),
    ),
    Rule(
        "secret-in-image",
        Severity.ERROR,
        "env and args of a profile; " + ", ".join(_SECRET_FLAGS),
        _secret,
        "{} looks like a secret, and everyone who can pull the image or list processes could read it",
        "give it when the container is started, in the environment (VLLM_API_KEY)",
        "duopack: no secret enters an image",
    ),
)
