"""Weights that are made while building: the source downloaded, quantized, split per rank, as the catalog asks.

What comes out takes the place of the locked files: from here on the build sees a directory whose files have known
digests, and packs it as it packs a download. The lock keeps naming the source, since that is what can be pinned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.catalog.schema import Model, Quantization, Source
from pipeline.catalog.target import Target
from pipeline.errors import UsageError
from pipeline.files import FileRecord, exclusive
from pipeline.lock.values import Lock
from pipeline.reports.progress import Progress
from pipeline.settings import Settings
from pipeline.stages.download import Downloaded, download

if TYPE_CHECKING:
    from pipeline.hubs.hub import Hub


def make_models(
    target: Target, lock: Lock, settings: Settings, hubs: Mapping[str, Hub], progress: Progress
) -> tuple[Lock, dict[str, Hub]]:
    """The lock and the hubs as the build shall see them: models that are made have their own files in both.

    The lock that comes back is for this build alone and must not be written. Raises DuopackError as `download`,
    `quantize` and `shard` do.
    """
    seen = dict(hubs)
    for key, model in target.models:
        if model.made:
            lock, seen[key] = _make(target, key, model, lock, settings, hubs[key], progress)
    return lock, seen


def _make(
    target: Target, key: str, model: Model, lock: Lock, settings: Settings, hub: Hub, progress: Progress
) -> tuple[Lock, Hub]:
    from pipeline.hubs import open_hub

    locked = lock.models[key]
    directory = settings.source_directory(key)
    with exclusive(directory.with_name(f"{key}.lock"), progress.note):
        source = download(key, as_source(model), locked, hub, directory, progress)
        place = settings.model_directory(key)
        records = _quantized_and_split(target, key, model, source, place, settings, progress)
    made = replace(locked, files=tuple(sorted(records)))
    return lock.with_model(key, made), open_hub(Source(dir=str(place.absolute())), relative_to=Path())


def _quantized_and_split(
    target: Target,
    key: str,
    model: Model,
    source: Downloaded,
    place: Path,
    settings: Settings,
    progress: Progress,
) -> list[FileRecord]:
    """What is in `place` at the end: the quantized weights, or a directory for each number of ranks."""
    files: Sequence[FileRecord] = [file.record for file in source.files]
    directory = source.directory
    if model.quantize:
        quantized = place if not model.shard else settings.quantized_directory(key)
        directory, files = quantized, _quantized(model, directory, files, quantized, settings, progress)
    if not model.shard:
        return list(files)
    return [
        record
        for ranks in model.shard
        for record in _split(model, directory, files, place, ranks, target.base.vllm, progress)
    ]


def _quantized(
    model: Model,
    source: Path,
    files: Sequence[FileRecord],
    place: Path,
    settings: Settings,
    progress: Progress,
) -> list[FileRecord]:
    from pipeline.stages.quantize.engines import open_engines
    from pipeline.stages.quantize.record import RECORD
    from pipeline.stages.quantize.stage import quantize

    assert model.quantize is not None
    recipe = model.quantize.recipe
    beside = settings.catalog.parent / recipe
    made = quantize(
        source,
        place,
        progress,
        recipe=str(beside) if beside.is_file() else recipe,
        engine=model.quantize.engine,
        engines=open_engines(settings),
        files=files,
    )
    return _with_record(place, RECORD, made.record.files)


def _split(
    model: Model,
    source: Path,
    files: Sequence[FileRecord],
    place: Path,
    ranks: int,
    vllm: str,
    progress: Progress,
) -> list[FileRecord]:
    from pipeline.stages.shard import shard, shard_directory
    from pipeline.weights.shards.record import RECORD

    inside = shard_directory(model.directory, ranks).relative_to(model.directory)
    made = shard(source, place / inside, progress, ranks=ranks, vllm=vllm, files=files)
    records = _with_record(place / inside, RECORD, made.record.files)
    return [replace(record, path=f"{inside}/{record.path}") for record in records]


def _with_record(directory: Path, name: str, files: Sequence[FileRecord]) -> list[FileRecord]:
    """The recorded files and the record itself, which travels along."""
    from pipeline.stages.made_directory import hashed

    return [*files, *hashed(directory, [name])]


def as_source(model: Model) -> Model:
    """The model as its source has it: whole, and float when it is still to be quantized."""
    name, profile = next(iter(model.profiles.items()))
    whole = profile.model_copy(update={"weights": None, "load_format": "auto"}) if model.shard else profile
    quantization = Quantization.FLOAT if model.quantize else model.quantization
    changed = {"quantization": quantization, "profiles": {name: whole}, "quantize": None, "shard": ()}
    return model.model_copy(update=changed)


def refuse_plan_of_made(target: Target) -> None:
    """Raises UsageError for a target with weights that are made: what they weigh is known when they are."""
    if made := [key for key, model in target.models if model.made]:
        raise UsageError(
            f"the weights of {', '.join(made)} are made while building, so what is in the image is not known before",
            where="--dry-run",
            mend="'duopack budget KEY' says what they weigh on a chip",
        )
