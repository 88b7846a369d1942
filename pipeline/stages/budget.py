"""The memory budget of a model of the catalog: its real tensors under the real shard plan, summed up for one chip.

Headers come from the downloaded files, else from the hub by range requests; where neither can be had, from the
model's published dimensions, and then it is said.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pipeline.ascend.budget import Budget, Demand, Options, make_budget
from pipeline.catalog.schema import Base, Model, Profile, Source
from pipeline.errors import DuopackError
from pipeline.hubs import open_hub
from pipeline.hubs.remote import HubPlace
from pipeline.hubs.selection import select
from pipeline.lock.values import Lock, LockedModel
from pipeline.reports.progress import Progress
from pipeline.settings import Settings
from pipeline.stages.making import as_source
from pipeline.weights.cache import serving_shape
from pipeline.weights.check import SHARD
from pipeline.weights.footprint import (
    Footprint,
    checkpoint_footprint,
    planned_footprint,
    shards_footprint,
)
from pipeline.weights.known import known_config, usual_quantization
from pipeline.weights.place import Place
from pipeline.weights.shards.config import Config, read_config
from pipeline.weights.shards.plans import plan_model
from pipeline.weights.shards.quantization import Quantization, read_quantization

COMPARED_RANKS: Final = (1, 2, 4)
COMPARED_KINDS: Final = ("float", "w8a8")
GUIDE_TABLE: Final = {
    ("Qwen3.5-9B", "float"): 9,
    ("Qwen3.5-9B", "w8a8"): 5,
    ("Qwen3.5-27B", "float"): 27,
    ("Qwen3.5-27B", "w8a8"): 14,
}
"""The deployment guide's table 4.2: GB of weights per chip at TP 2."""


@dataclass(frozen=True)
class Changes:
    """What the user asks for instead of the profile's own."""

    ranks: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    utilization: float | None = None


@dataclass(frozen=True)
class Facts:
    """What is known of a model's weights: from where, and which files there."""

    origin: str
    config: Config
    quantization: Quantization
    place: Place | None = None
    """None when only the dimensions are known."""
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fitting:
    """The budget of one way to serve a model, and what it was made from."""

    title: str
    kind: str
    """The catalog's word for the quantization."""
    origin: str
    weights: Footprint
    budget: Budget
    guide: int | None
    """What the deployment guide's table says of the weights, in GB."""


@dataclass(frozen=True)
class Impossible:
    """A combination that cannot be served, and why."""

    title: str
    kind: str
    ranks: int
    why: str


def find_facts(
    key: str,
    model: Model,
    profile: Profile,
    settings: Settings,
    lock: Lock,
    progress: Progress,
    *,
    source: Source | None = None,
    offline: bool = False,
) -> Facts:
    """Config, description and file names of what the profile loads: nothing large is fetched.

    With `offline` no hub is asked. Raises DuopackError when nothing tells the model's sizes.
    """
    if model.made:
        whole = as_source(model)
        profile = next(iter(whole.profiles.values()))
        facts = find_facts(key, whole, profile, settings, lock, progress, source=source, offline=offline)
        return _as_made(facts, model) if model.quantize else facts
    locked = lock.models.get(key)
    directory = settings.model_directory(key)
    if source is None and locked and _complete(directory, locked):
        return _read(f"{directory}", directory, model, profile, tuple(file.path for file in locked.files))
    problems = []
    for one in (source,) if source else model.sources:
        if offline and not one.dir:
            continue
        try:
            return _ask(one, model, profile, settings, locked, key)
        except DuopackError as error:
            problems.append(str(error))
            if source:
                raise
    config = known_config(model.title)
    if config is None:
        raise DuopackError(
            "the sizes of its tensors are not known: " + (" ".join(problems) or "no hub was asked"),
            where=key,
            mend="reach a hub, or give the files: --source dir:PATH",
        )
    if problems:
        progress.warn(f"{key}: no source answers, so {config.where} are taken. {problems[0]}")
    return Facts(config.where, config, usual_quantization(config, model.quantization.value))


def _as_made(facts: Facts, model: Model) -> Facts:
    """What the recipe makes of float weights, by the dimensions."""
    kind = model.quantization.value
    quantization = usual_quantization(facts.config, kind)
    return Facts(f"{facts.origin}, as {kind} makes it", facts.config, quantization)


def _complete(directory: Path, locked: LockedModel) -> bool:
    return all(
        (directory / file.path).is_file() and (directory / file.path).stat().st_size == file.size
        for file in locked.files
    )


def _ask(
    source: Source, model: Model, profile: Profile, settings: Settings, locked: LockedModel | None, key: str
) -> Facts:
    known = locked if locked and locked.source == source.label else None
    hub = open_hub(source, relative_to=settings.catalog.parent, commit=known.commit if known else None)
    if known:
        sizes = {file.path: file.size for file in known.files}
    else:
        listing = select(hub.listing(), model.files, where=f"{key} ({source.label})")
        sizes = {file.path: file.size for file in listing.files}
    place: Place = hub.location or HubPlace(hub, source.label, sizes)
    return _read(str(hub.location or source.label), place, model, profile, tuple(sizes))


def _read(origin: str, root: Place, model: Model, profile: Profile, paths: tuple[str, ...]) -> Facts:
    del model
    place = root
    for part in (profile.weights or "").split("/"):
        place = place / part if part else place
    prefix = f"{profile.weights}/" if profile.weights else ""
    names = tuple(
        sorted(
            path.removeprefix(prefix)
            for path in paths
            if path.startswith(prefix)
            and path.endswith(".safetensors")
            and "/" not in path.removeprefix(prefix)
        )
    )
    return Facts(origin, read_config(place), read_quantization(place), place, names)


def fit(facts: Facts, model: Model, profile: Profile, base: Base, changes: Changes) -> Fitting:
    """The budget of serving the model so. Raises DuopackError when the weights do not fit their own config."""
    ranks = changes.ranks or profile.tensor_parallel
    plan = plan_model(facts.config, facts.quantization, ranks, "310p")
    split = any(SHARD.fullmatch(name) for name in facts.files)
    if facts.place is None or (split and ranks != profile.tensor_parallel):
        weights = planned_footprint(plan)
    elif split:
        weights = shards_footprint(plan, facts.place, facts.files)
    else:
        weights = checkpoint_footprint(plan, facts.place, facts.files)
    return _fitting(facts, model, profile, base, changes, weights, model.quantization.value)


def compare(
    facts: Facts, model: Model, profile: Profile, base: Base, changes: Changes
) -> tuple[Fitting | Impossible, ...]:
    """The model at TP 1, 2 and 4, as float and as W8A8; what it is not, as the recipes would make it."""
    rows: list[Fitting | Impossible] = []
    own = model.quantization.value
    for kind in dict.fromkeys(("float", own if own != "float" else COMPARED_KINDS[1])):
        quantization = facts.quantization if kind == own else usual_quantization(facts.config, kind)
        for ranks in COMPARED_RANKS:
            try:
                plan = plan_model(facts.config, quantization, ranks, "310p")
            except DuopackError as error:
                rows.append(Impossible(model.title, kind, ranks, error.what))
                continue
            asked = replace(changes, ranks=ranks)
            rows.append(_fitting(facts, model, profile, base, asked, planned_footprint(plan), kind))
    return tuple(rows)


def _fitting(
    facts: Facts,
    model: Model,
    profile: Profile,
    base: Base,
    changes: Changes,
    weights: Footprint,
    kind: str,
) -> Fitting:
    ranks = changes.ranks or profile.tensor_parallel
    shape = serving_shape(facts.config, ranks)
    demand = Demand(
        weights=weights.total,
        kv_per_token=shape.kv_per_token,
        conv_state=shape.conv_state,
        recurrent_elements=shape.recurrent_state,
        hidden=shape.hidden,
        inner=shape.inner,
        vocabulary=shape.vocabulary,
    )
    options = Options(
        ranks=ranks,
        max_model_len=changes.max_model_len or profile.max_model_len,
        max_num_seqs=changes.max_num_seqs or profile.max_num_seqs,
        utilization=changes.utilization or profile.gpu_memory_utilization,
        max_num_batched_tokens=profile.max_num_batched_tokens,
        chunked_prefill=profile.chunked_prefill,
        capture_sizes=() if profile.cudagraph_mode == "NONE" else profile.capture_sizes,
    )
    budget = make_budget(demand, options, base.vllm_ascend)
    return Fitting(model.title, kind, facts.origin, weights, budget, _guide(model.title, kind, ranks))


def _guide(title: str, kind: str, ranks: int) -> int | None:
    fitting = (size for (name, own), size in GUIDE_TABLE.items() if title.startswith(name) and own == kind)
    return next(fitting, None) if ranks == 2 else None
