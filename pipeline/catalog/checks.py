"""What must hold between the entries of a catalog: references, names, directories, settings that contradict.

Only structure is judged here, from the catalog alone; what a chip or a version can do is for pipeline/ascend.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import PurePosixPath

from pipeline.catalog.document import KeyPath
from pipeline.catalog.schema import Catalog, Model, Profile, Quantization
from pipeline.catalog.target import ALL, OWN_SCRIPTS, build_keys, find_target, image_name, image_tag
from pipeline.catalog.words import close_to
from pipeline.errors import UsageError
from pipeline.oci.reference import parse_reference

# Names under /models/ that the image uses itself.
RESERVED = ("scripts", "launch.json")
# Ranks that communicate use up the chip's event ids: vllm-ascend's page "Atlas 300I DUO" (graph mode notes)
# names two graphs for Qwen3-32B, and no limit at TP 1.
MAX_CAPTURES_TP = 2


@dataclass(frozen=True)
class Finding:
    """A contradiction: the key path it stands at, a sentence, and the mend."""

    path: KeyPath
    what: str
    mend: str


def check_catalog(catalog: Catalog, unsound: frozenset[str] = frozenset()) -> tuple[Finding, ...]:
    """All contradictions; `unsound` names entries that another error has left out, and nobody shall miss."""
    references = tuple(_references(catalog, unsound))
    findings = [*references, *_names(catalog), *_directories(catalog), *_served_names(catalog)]
    findings += _images(catalog)
    for key, model in catalog.models.items():
        findings += _files(("models", key, "files"), model)
        findings += _shards(key, model)
        findings += _made(key, model)
        for name, profile in model.profiles.items():
            findings += _profile(("models", key, "profiles", name), model, profile)
    if not findings and not unsound:
        findings += _destinations(catalog)
    return tuple(findings)


def _references(catalog: Catalog, unsound: frozenset[str]) -> Iterator[Finding]:
    if catalog.default_base not in {*catalog.bases, *unsound}:
        what = f"there is no base '{catalog.default_base}'"
        yield Finding(("default_base",), what, _one_of(catalog.default_base, catalog.bases))
    elif catalog.default_base in catalog.bases:
        platforms = catalog.bases[catalog.default_base].platforms
        if catalog.default_platform not in platforms:
            what = f"the default base has no platform '{catalog.default_platform}'"
            yield Finding(
                ("default_platform",), what, f"take {' or '.join(platforms)}, or add it to the base"
            )
    for key, members in catalog.sets.items():
        for number, member in enumerate(members):
            if member not in {*catalog.models, *unsound}:
                what = f"there is no model '{member}'"
                yield Finding(("sets", key, number), what, _one_of(member, catalog.models))
            if member in members[:number]:
                yield Finding(("sets", key, number), f"'{member}' is in the set twice", "remove one of them")


def _one_of(name: str, known: Iterable[str]) -> str:
    names = list(known)
    meant = close_to(name, names)
    return f"did you mean '{meant}'?" if meant else f"take one of {', '.join(names)}"


def _names(catalog: Catalog) -> Iterator[Finding]:
    """Keys, script names, set names and base keys are all given to commands, so none may mean two things."""
    seen: dict[str, str] = {}
    for name, kind, path in _all_names(catalog):
        if name in seen:
            both = f"the name '{name}' is a {kind} here and a {seen[name]} before"
            what = f"two profiles have the script '{name}.sh'" if seen[name] == kind == "profile" else both
            yield Finding(path, what, "rename one of them")
        if kind == "profile" and name in OWN_SCRIPTS:
            yield Finding(path, f"every image has a script '{name}.sh' of its own", "rename the profile")
        if name == ALL and kind != "set":
            yield Finding(path, f"'{ALL}' stands for every model of the catalog", f"rename the {kind}")
        seen.setdefault(name, kind)


def _all_names(catalog: Catalog) -> Iterator[tuple[str, str, KeyPath]]:
    yield from ((key, "base", ("bases", key)) for key in catalog.bases)
    yield from ((key, "model", ("models", key)) for key in catalog.models)
    for key, model in catalog.models.items():
        yield from ((name, "profile", ("models", key, "profiles", name)) for name in model.profiles)
    yield from ((key, "set", ("sets", key)) for key in catalog.sets)


def _directories(catalog: Catalog) -> Iterator[Finding]:
    for key, model in catalog.models.items():
        if model.directory.split("/")[0] in RESERVED:
            what = f"the image itself uses /models/{model.directory.split('/')[0]}"
            yield Finding(("models", key, "directory"), what, "choose another directory")
    for (first, one), (second, other) in combinations(catalog.models.items(), 2):
        ours, theirs = PurePosixPath(other.directory), PurePosixPath(one.directory)
        if ours == theirs or ours in theirs.parents or theirs in ours.parents:
            relation = "is also" if ours == theirs else "overlaps"
            what = f"the directory '{ours}' {relation} that of model '{first}'"
            yield Finding(("models", second, "directory"), what, "give each model a directory of its own")


def _images(catalog: Catalog) -> Iterator[Finding]:
    for key, base in catalog.bases.items():
        for number, image in enumerate(base.images):
            try:
                parse_reference(image)
            except UsageError as error:
                yield Finding(("bases", key, "images", number), error.what, error.mend)


def _served_names(catalog: Catalog) -> Iterator[Finding]:
    for key, members in catalog.sets.items():
        owner: dict[str, str] = {}
        for number, member in enumerate(members):
            model = catalog.models.get(member)
            for served in sorted(
                {profile.served_name for profile in model.profiles.values()} if model else ()
            ):
                if owner.setdefault(served, member) != member:
                    what = f"'{member}' is served as '{served}' in this image, and so is '{owner[served]}'"
                    yield Finding(("sets", key, number), what, "give one of them another served_name")


def _files(path: KeyPath, model: Model) -> Iterator[Finding]:
    for field in ("include", "exclude"):
        patterns: tuple[str, ...] = getattr(model.files, field)
        for number, pattern in enumerate(patterns):
            if pattern.startswith("/") or "\\" in pattern or {".", ".."} & set(pattern.split("/")):
                what = f"the pattern '{pattern}' can match no file of a model"
                mend = "patterns match the path below the model's directory, as 'TP2/*'"
                yield Finding((*path, field, number), what, mend)
            if pattern in patterns[:number]:
                yield Finding((*path, field, number), f"the pattern '{pattern}' is given twice", "remove one")
            if field == "exclude" and pattern in {"*", *model.files.include}:
                what = f"the pattern '{pattern}' leaves out what 'include' takes"
                yield Finding((*path, field, number), what, "exclude less than is included")


def _profile(path: KeyPath, model: Model, profile: Profile) -> Iterator[Finding]:
    yield from _captures((*path, "capture_sizes"), profile)
    sharded = profile.load_format == "sharded_state"
    if model.quantization == Quantization.W8A8SC and not sharded:
        what = "w8a8sc weights are split per rank, and the default loader fails on them"
        yield Finding((*path, "load_format"), what, "write 'load_format: sharded_state'")
    if not model.shard and profile.weights and not _can_include(profile.weights, model):
        what = f"no pattern in the model's 'files.include' takes files below '{profile.weights}'"
        yield Finding((*path, "weights"), what, f"include '{profile.weights}/*'")
    split_for = _split_for(profile.weights or "")
    if sharded and split_for and split_for != profile.tensor_parallel:
        # vLLM does not check this itself: shards of another TP load and answer garbage.
        what = f"'{profile.weights}' is split for {split_for} ranks, not for {profile.tensor_parallel}"
        yield Finding((*path, "weights"), what, "name the directory that is split for this tensor_parallel")


def _made(key: str, model: Model) -> Iterator[Finding]:
    """What is made from the source must be what the profiles load."""
    path: KeyPath = ("models", key)
    if model.quantize and model.quantization == Quantization.FLOAT:
        what = "the weights are quantized, but 'quantization' says float"
        yield Finding(
            (*path, "quantize"), what, "write 'quantization: w8a8-dynamic', or what the recipe makes"
        )
    name = PurePosixPath(model.directory).name
    for profile_name, profile in model.profiles.items() if model.shard else ():
        ranks = profile.tensor_parallel
        place = f"TP{ranks}/{name}-tp{ranks}"
        if ranks not in model.shard:
            what = f"'shard' does not split the model for {ranks} ranks"
            yield Finding(
                (*path, "profiles", profile_name, "tensor_parallel"), what, f"add {ranks} to 'shard'"
            )
        elif profile.weights != place or profile.load_format != "sharded_state":
            what = f"the model is split, and the weights for {ranks} ranks are in '{place}'"
            mend = f"write 'weights: {place}' and 'load_format: sharded_state'"
            yield Finding((*path, "profiles", profile_name), what, mend)


def _captures(path: KeyPath, profile: Profile) -> Iterator[Finding]:
    sizes = profile.capture_sizes
    if profile.cudagraph_mode == "NONE":
        return
    if not sizes:
        yield Finding(
            path, f"{profile.cudagraph_mode} has no size to capture", "give sizes, or cudagraph_mode: NONE"
        )
    if profile.tensor_parallel > 1 and len(sizes) > MAX_CAPTURES_TP:
        what = (
            f"{len(sizes)} capture sizes, but with tensor_parallel > 1 a 310P takes {MAX_CAPTURES_TP} at most"
        )
        yield Finding(path, what, f"keep two, as [{sizes[0]}, {sizes[-1]}]")
    if sizes and sizes[-1] > profile.max_num_seqs:
        what = f"the capture size {sizes[-1]} is larger than max_num_seqs {profile.max_num_seqs}"
        yield Finding(path, what, "drop it, or raise max_num_seqs")


def _shards(key: str, model: Model) -> Iterator[Finding]:
    """Profiles that load one directory must agree on how it is split."""
    first: dict[str | None, tuple[str, int | None]] = {}
    for name, profile in model.profiles.items():
        ranks = profile.tensor_parallel if profile.load_format == "sharded_state" else None
        other, theirs = first.setdefault(profile.weights, (name, ranks))
        if theirs != ranks:
            what = f"'{other}' loads the same weights {_split_words(theirs)}, this {_split_words(ranks)}"
            mend = "point 'weights' at the directory for each"
            yield Finding(("models", key, "profiles", name), what, mend)


def _split_words(ranks: int | None) -> str:
    return f"as shards for {ranks} ranks" if ranks else "whole"


def _can_include(directory: str, model: Model) -> bool:
    """Whether some pattern could match below a directory, judged by its text before the first wildcard."""
    below = directory + "/"
    starts = (re.split(r"[*?\[]", pattern)[0] for pattern in model.files.include)
    return any(below.startswith(start) or start.startswith(below) for start in starts)


def _split_for(weights: str) -> int | None:
    """The number of ranks that a directory's name tells: `TP2`, `name-tp2`."""
    found = re.findall(r"(?:^|[/._-])tp[_-]?([0-9]+)(?=$|[/._-])", weights, re.IGNORECASE)
    return int(found[-1]) if found else None


def _destinations(catalog: Catalog) -> Iterator[Finding]:
    """Two images under one name and tag would replace each other in the registry."""
    owner: dict[str, tuple[str, object]] = {}
    for build in build_keys(catalog):
        target = find_target(catalog, build.key)
        try:
            name = f"{image_name(target)}:{image_tag(catalog, target)}"
        except UsageError as error:
            yield Finding(("publish", "tag"), f"for '{build.key}' {error.what}", error.mend)
            continue
        content = (target.models, target.profile_name)
        other, theirs = owner.setdefault(name, (build.key, content))
        if theirs != content:
            what = f"'{other}' and '{build.key}' would both be published as '{name}'"
            yield Finding(
                ("publish",), what, "give one model another 'image', or use {profile} in publish.tag"
            )
