"""The launch stage: start scripts, their description, labels and health check, from the catalog alone.

Deterministic: the same models, base and digest give the same bytes. Nothing here reads a disk or the network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.ascend.options import Problem, check_options
from pipeline.ascend.rules import Finding, Severity, judge
from pipeline.ascend.scripts import healthcheck_script, list_script, serve_script
from pipeline.ascend.serve import MODELS_ROOT, arguments, command, defaults, settings, weights_path
from pipeline.catalog.target import LIST, OWN_SCRIPTS
from pipeline.errors import DuopackError, quoted
from pipeline.oci.image import Healthcheck

if TYPE_CHECKING:
    from pipeline.catalog.schema import Base, Model, Profile

SCRIPTS = f"{MODELS_ROOT}/scripts"
LABEL = "io.duopack."
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class LaunchFiles:
    """What the launch stage adds to an image.

    `files` are path without the leading slash, mode and bytes, sorted by path. `findings` are the rules that apply,
    without errors.
    """

    files: tuple[tuple[str, int, bytes], ...]
    labels: Mapping[str, str]
    command: list[str]
    healthcheck: Healthcheck
    exposed_ports: tuple[int, ...]
    findings: tuple[Finding, ...]
    env: Mapping[str, str]
    path_append: str = SCRIPTS

    def image_env(self, base_env: Mapping[str, str]) -> dict[str, str]:
        """The base's variables with ours, and the scripts at the end of the PATH."""
        path = base_env.get("PATH") or DEFAULT_PATH
        parts = path.split(":")
        return {**base_env, **self.env, "PATH": path if SCRIPTS in parts else f"{path}:{self.path_append}"}

    @property
    def warnings(self) -> tuple[str, ...]:
        """The findings that a builder should read; what several profiles share is said once."""
        shared: dict[Finding, list[str]] = {}
        for finding in self.findings:
            if finding.severity is Severity.WARNING:
                shared.setdefault(replace(finding, where=""), []).append(finding.where)
        return tuple(str(replace(finding, where=", ".join(names))) for finding, names in shared.items())


def launch_files(
    models: Mapping[str, Model], base: Base, base_digest: str, default_profile: str
) -> LaunchFiles:
    """Everything that starts the models of one image; `models` are by catalog key.

    `default_profile` is the profile whose script is the image's command, or LIST for a command that only lists
    the models. Raises DuopackError when a rule or vLLM's own options forbid a profile, and when names clash in
    the image.
    """
    profiles = list(_profiles(models))
    _check_names(models, profiles)
    chosen = next((profile for _, _, name, profile in profiles if name == default_profile), None)
    if chosen is None and default_profile != LIST:
        known = ", ".join(name for _, _, name, _ in profiles)
        raise DuopackError(
            f"no profile is called '{quoted(default_profile)}'", where="launch", mend=f"choose one of {known}"
        )
    findings = tuple(
        finding for _, model, name, profile in profiles for finding in check(name, model, profile, base)
    )
    _refuse_errors(findings)
    described = describe(models, base, base_digest, default_profile)
    contents = {
        f"{SCRIPTS}/{name}.sh": serve_script(name, model, profile, base)
        for _, model, name, profile in profiles
    }
    contents[f"{SCRIPTS}/healthcheck.sh"] = healthcheck_script((chosen or profiles[0][3]).port)
    contents[f"{SCRIPTS}/list.sh"] = list_script(_listing(profiles, default_profile))
    files = [(path.lstrip("/"), 0o755, text.encode()) for path, text in contents.items()]
    text = json.dumps(described, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    files.append((f"{MODELS_ROOT}/launch.json".lstrip("/"), 0o644, text.encode()))
    return LaunchFiles(
        files=tuple(sorted(files)),
        labels=_labels(models, base, base_digest, default_profile, chosen, described),
        command=[f"{SCRIPTS}/{default_profile}.sh"],
        # Tens of GB from a slow disk, then graphs to capture: a long start period.
        healthcheck=Healthcheck(("CMD", f"{SCRIPTS}/healthcheck.sh"), start_period=1800),
        exposed_ports=tuple(sorted({profile.port for _, _, _, profile in profiles})),
        findings=findings,
        env={},
    )


def check(name: str, model: Model, profile: Profile, base: Base) -> tuple[Finding, ...]:
    """What the rules and vLLM's own options say of a profile; `name` is where the findings say they are."""
    findings = [replace(finding, where=name) for finding in judge(model, profile, base)]
    args = arguments(command(model, profile, base), defaults(settings(model, profile)))
    findings += [option_finding(name, problem, base) for problem in check_options(args, base.vllm)]
    return tuple(findings)


def describe(
    models: Mapping[str, Model], base: Base, base_digest: str, default_profile: str
) -> dict[str, Any]:
    """The content of /models/launch.json; `docs/launch.md` describes its fields."""
    return {
        "version": 1,
        "default": default_profile,
        "base": {
            "image": base.images[0],
            "digest": base_digest,
            "vllm": base.vllm,
            "vllm_ascend": base.vllm_ascend,
            "cann": base.cann,
        },
        "models": [
            {
                "key": key,
                "title": model.title,
                "directory": f"{MODELS_ROOT}/{model.directory}",
                "architecture": model.architecture.value,
                "quantization": model.quantization.value,
                "license": model.license,
                "max_positions": model.max_positions,
                "profiles": [_describe(name, model, profile) for name, profile in model.profiles.items()],
            }
            for key, model in models.items()
        ],
    }


def _describe(name: str, model: Model, profile: Profile) -> dict[str, Any]:
    return {
        "name": name,
        "script": f"{SCRIPTS}/{name}.sh",
        "served_name": profile.served_name,
        "tensor_parallel": profile.tensor_parallel,
        "chips": profile.tensor_parallel,
        "port": profile.port,
        "weights": weights_path(model, profile),
        "load_format": profile.load_format,
        "max_model_len": profile.max_model_len,
        "max_num_seqs": profile.max_num_seqs,
        "gpu_memory_utilization": profile.gpu_memory_utilization,
        "cudagraph_mode": profile.cudagraph_mode,
        "capture_sizes": list(profile.capture_sizes),
        "prefix_caching": profile.prefix_caching,
        "reasoning_parser": profile.reasoning_parser,
        "tool_call_parser": profile.tool_call_parser,
    }


def _profiles(models: Mapping[str, Model]) -> Iterator[tuple[str, Model, str, Profile]]:
    for key, model in models.items():
        for name, profile in model.profiles.items():
            yield key, model, name, profile


def _check_names(models: Mapping[str, Model], profiles: list[tuple[str, Model, str, Profile]]) -> None:
    owners: dict[str, str] = {}
    for key, _, name, _ in profiles:
        if name in OWN_SCRIPTS:
            raise DuopackError(
                f"the profile name '{name}' is taken by a script that every image has",
                where=f"models.{key}",
                mend="give the profile another name",
            )
        if name in owners:
            raise DuopackError(
                f"two models, {owners[name]} and {key}, have a profile '{name}' and so one script name",
                where="launch",
                mend="rename one of the profiles",
            )
        owners[name] = key
    served: dict[str, str] = {}
    for key, _, _, profile in profiles:
        if served.setdefault(profile.served_name, key) != key:
            raise DuopackError(
                f"two models, {served[profile.served_name]} and {key}, are served as '{profile.served_name}'",
                where="launch",
                mend="give one of them another served_name",
            )
    for key, model in models.items():
        if model.directory.split("/")[0] in {"scripts", "launch.json"}:
            raise DuopackError(
                f"the directory '{model.directory}' is where every image has its start scripts",
                where=f"models.{key}.directory",
                mend="choose another directory",
            )


def _refuse_errors(findings: tuple[Finding, ...]) -> None:
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        shown = "; ".join(f"{error.where}: {error.sentence} [{error.id}; {error.source}]" for error in errors)
        mends = "; ".join(dict.fromkeys(error.mend for error in errors))
        raise DuopackError(shown, where="launch", mend=mends)


def option_finding(name: str, problem: Problem, base: Base) -> Finding:
    """A problem of the command line as a finding."""
    severity = Severity(problem.severity)
    return Finding("option", severity, problem.sentence, problem.mend, f"options of vLLM {base.vllm}", name)


def _labels(
    models: Mapping[str, Model],
    base: Base,
    base_digest: str,
    default_profile: str,
    chosen: Profile | None,
    described: dict[str, Any],
) -> dict[str, str]:
    titles = ", ".join(model.title for model in models.values())
    labels = {
        "org.opencontainers.image.title": titles,
        "org.opencontainers.image.description": (
            f"{titles} on Atlas 300I Duo (Ascend 310P): vLLM {base.vllm}, vllm-ascend {base.vllm_ascend}"
        ),
        "org.opencontainers.image.base.name": base.images[0],
        "org.opencontainers.image.base.digest": base_digest,
        f"{LABEL}models": ",".join(models),
        f"{LABEL}default-profile": default_profile,
        f"{LABEL}launch": json.dumps(described, sort_keys=True, ensure_ascii=False, separators=(",", ":")),
    }
    if chosen:
        labels |= {
            f"{LABEL}tensor-parallel": str(chosen.tensor_parallel),
            f"{LABEL}port": str(chosen.port),
            f"{LABEL}served-name": chosen.served_name,
        }
    licenses = [model.license for model in models.values()]
    if all(licenses):
        labels["org.opencontainers.image.licenses"] = _all_of(sorted({text for text in licenses if text}))
    return dict(sorted(labels.items()))


def _all_of(expressions: list[str]) -> str:
    """One SPDX expression that requires all of these."""
    if len(expressions) == 1:
        return expressions[0]
    return " AND ".join(f"({text})" if re.search(r"\s", text) else text for text in expressions)


def _listing(profiles: list[tuple[str, Model, str, Profile]], default_profile: str) -> list[str]:
    example = profiles[0][2] if default_profile == LIST else default_profile
    lines = [f"Models in this image; start one with its script: docker run … IMAGE {example}.sh", ""]
    width = max(len(name) for _, _, name, _ in profiles) + len(".sh")
    for _, model, name, profile in profiles:
        chips = "1 chip" if profile.tensor_parallel == 1 else f"{profile.tensor_parallel} chips"
        mark = ", starts by itself" if name == default_profile else ""
        lines.append(
            f"  {name + '.sh':<{width}}  {model.title} ({model.quantization.value}), {chips}, "
            f"port {profile.port}, model name {profile.served_name}{mark}"
        )
    return [
        *lines,
        "",
        f"Settings are documented at the head of each script in {SCRIPTS}; also in /models/launch.json.",
    ]
