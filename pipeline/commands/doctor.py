"""`duopack doctor`: can this host, or one whose captures are given, run an image?"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from urllib.parse import urlsplit

from pipeline.ascend.host import load, save
from pipeline.catalog.load import load_catalog
from pipeline.catalog.schema import Catalog
from pipeline.catalog.target import Target, find_base, find_target
from pipeline.commands.common import settings_of
from pipeline.errors import UsageError
from pipeline.lock.values import read_lock
from pipeline.oci.reference import parse_reference
from pipeline.reports.output import print_json, print_text
from pipeline.settings import Settings
from pipeline.stages.doctor import Check, Wanted, diagnose

HUBS = {
    "modelscope": ("MODELSCOPE_ENDPOINT", "https://modelscope.cn"),
    "huggingface": ("HF_ENDPOINT", "https://huggingface.co"),
}


def run(options: argparse.Namespace) -> int:
    if options.collect and options.captures:
        raise UsageError("--collect and --from exclude each other", mend="give one of them")
    settings = settings_of(options)
    catalog = load_catalog(settings.catalog)
    target = find_target(catalog, options.key, base=options.base) if options.key else None
    if options.captures:
        captures = load(options.captures)
    else:
        from pipeline.stages.examine import examine

        reach = {} if options.offline else _addresses(catalog, target, settings)
        captures = examine(settings.devices, reach)
    written = save(captures, options.collect) if options.collect else ()
    checks = diagnose(captures, _wanted(catalog, target, settings, options.base))
    if options.json:
        print_json(
            {"checks": [asdict(check) for check in checks], "written": [str(path) for path in written]}
        )
    else:
        print_text("\n".join(map(_line, checks)))
        if written:
            print_text(
                f"{len(written)} captures written to {options.collect}, secrets removed: look through them all the same"
            )
    return 1 if any(check.verdict == "fail" for check in checks) else 0


def _wanted(catalog: Catalog, target: Target | None, settings: Settings, base: str | None) -> Wanted:
    if target is None:
        return Wanted(find_base(catalog, base), base or catalog.default_base, catalog.default_platform)
    lock = read_lock(settings.lock)
    sizes = [lock.models[key].size for key, _ in target.models if key in lock.models]
    return Wanted(
        target.base,
        target.base_key,
        target.platform,
        chips=target.profile.tensor_parallel,
        image_size=sum(sizes) if len(sizes) == len(target.models) else None,
    )


def _addresses(catalog: Catalog, target: Target | None, settings: Settings) -> dict[str, str]:
    """What a build or a pull would reach: the registry to publish to, the base's, and the hubs of the sources."""
    from pipeline.oci.registry.settings import Settings as RegistrySettings

    found: dict[str, str] = {}
    registry = RegistrySettings.from_environment()
    repository = settings.registry or catalog.publish.repository
    base = target.base if target else catalog.bases[catalog.default_base]
    for text in (*([repository] if repository else []), *base.images[:1]):
        if host := parse_reference(text).registry:
            found[f"registry {host}"] = f"{registry.base_url(host)}/v2/"
    models = [model for _, model in target.models] if target else list(catalog.models.values())
    for model in models:
        for source in model.sources:
            for hub, (variable, usual) in HUBS.items():
                if getattr(source, hub):
                    endpoint = os.environ.get(variable) or usual
                    found[f"hub {urlsplit(endpoint).hostname}"] = endpoint
    return found


def _line(check: Check) -> str:
    wanted = f" (wanted: {check.wanted})" if check.wanted and check.verdict != "pass" else ""
    mend = f"\n      To mend: {check.mend}" if check.mend else ""
    return f"{check.verdict.upper():<4}  {check.id:<14} {check.found}{wanted}{mend}"
