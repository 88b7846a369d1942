"""The directories with weights: whole, by headers and indexes alone, and split for the ranks that will load them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.errors import DuopackError
from pipeline.oci.limits import LimitError
from pipeline.stages.inside.image import Inside
from pipeline.stages.inside.models import ModelDirectory, below
from pipeline.stages.inside.place import ImagePlace, UnreadError
from pipeline.stages.verify.finding import Finding, of_error, of_unread
from pipeline.weights.check import WeightSummary, check_weights
from pipeline.weights.shards.check import check_shards
from pipeline.weights.shards.record import read_record


@dataclass(frozen=True)
class CheckedModel:
    """A directory with weights, and what is in it when it was found whole."""

    directory: ModelDirectory
    summary: WeightSummary | None
    findings: tuple[Finding, ...]


def check_model(inside: Inside, model: ModelDirectory) -> CheckedModel:
    """What a server would trip over when it loads this directory."""
    place = inside.place(model.path)
    try:
        summary, doubt = _checked(model, place)
        findings = (*doubt, *_shards(inside, model, place), *_partly(inside, model))
    except UnreadError as error:
        return CheckedModel(model, None, (of_unread("weights-unread", error, inside),))
    except LimitError as error:
        if error.limit == "seconds":
            raise
        return CheckedModel(model, None, (of_error(f"limit-{error.limit}", error),))
    except DuopackError as error:
        return CheckedModel(model, None, (_refused(inside, error),))
    finally:
        inside.reading.release()
    return CheckedModel(model, summary, findings)


def _checked(model: ModelDirectory, place: ImagePlace) -> tuple[WeightSummary, tuple[Finding, ...]]:
    """The summary; a total in the index that is wrong, as in some hubs' originals, hinders no server."""

    def check(*allow: str) -> WeightSummary:
        return check_weights(
            place, load_format=model.load_format, tensor_parallel=model.tensor_parallel, allow=allow
        )

    try:
        return check(), ()
    except DuopackError as error:
        return check("index-total"), (of_error("index-total", error, severity="warning"),)


def _refused(inside: Inside, error: DuopackError) -> Finding:
    finding = of_error("weights", error)
    if not inside.unread:
        return finding
    # What seems to be missing may be in a layer that was not looked into.
    sentence = f"with layers unread it cannot be judged; as far as was seen: {error.what}"
    return Finding("weights-unread", "note", sentence, "read the whole image: --deep", finding.where)


def _partly(inside: Inside, model: ModelDirectory) -> Iterator[Finding]:
    """What was seen may be whole and yet not all: the layer it comes from goes on."""
    begun = {inside.tree.entries[path].layer for path, _ in below(inside, model)} & {
        layer.number for layer in inside.unread
    }
    if begun:
        sentence = f"what was seen of it is sound; there may be more of it in layer {min(begun)}"
        yield Finding("weights-unread", "note", sentence, "read the whole image: --deep", f"/{model.path}")


def _shards(inside: Inside, model: ModelDirectory, place: ImagePlace) -> Iterator[Finding]:
    """Shards against their record and their plan, where there is one for the architecture."""
    if model.load_format != "sharded_state":
        return
    yield from _other_files(inside, model)
    try:
        record = read_record(place)
        found = check_shards(place, tensor_parallel=model.tensor_parallel)
    except DuopackError as error:
        if isinstance(error, UnreadError | LimitError):
            raise
        sentence = f"the shards cannot be held against a plan: {error.what}"
        yield Finding("shards-no-plan", "note", sentence, error.mend or "take them as they are", error.where)
        return
    for one in found:
        effect = f"; vLLM {one.effect}" if one.effect else ""
        yield Finding(f"shards-{one.id}", one.severity, one.sentence + effect, one.mend, one.where)
    for file in record.files if record and inside.deep else ():
        entry = inside.tree.resolve(f"{model.path}/{file.path}")
        sha256 = inside.layers[entry.layer].hashes.get(entry.member.path) if entry else None
        if sha256 is not None and sha256 != file.sha256:
            sentence = f"its sha256 is {sha256}, and {file.sha256} by the record beside it"
            yield Finding(
                "shards-file-changed",
                "error",
                sentence,
                "split the model again",
                f"/{model.path}/{file.path}",
            )


def _other_files(inside: Inside, model: ModelDirectory) -> Iterator[Finding]:
    """A server started for shards reads the side files from the same directory."""
    names = set(inside.tree.children(model.path))
    if not names & {"tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"}:
        sentence = "there is no tokenizer beside the shards"
        yield Finding(
            "shards-tokenizer",
            "warning",
            sentence,
            "copy the side files of the model there",
            f"/{model.path}",
        )
