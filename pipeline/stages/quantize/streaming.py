"""The streaming engine: W8A8_DYNAMIC without data, the bytes that msmodelslim writes, file by file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pipeline import __version__
from pipeline.files import FileRecord
from pipeline.stages.quantize.contract import Job, Made, summarize, write_text
from pipeline.stages.quantize.journal import Journal
from pipeline.weights.check import DESCRIPTION
from pipeline.weights.quant.modules import NotCoveredError, parameters
from pipeline.weights.quant.parts import INDEX, Written, description_text, index_text, plan_output, split

if TYPE_CHECKING:
    from pipeline.weights.quant.streaming import Loss


class StreamingEngine:
    """By our own writer: no torch, memory within a few blocks of rows, resumable file by file."""

    name: Final = "streaming"
    version: Final = __version__
    resumes: Final = True

    def covers(self, job: Job) -> NotCoveredError | None:
        """Why it cannot do the job, or None when it can."""
        try:
            self._plan(job)
        except NotCoveredError as error:
            return error
        return None

    def check(self, job: Job) -> int:
        return sum(one.size for one in self._plan(job))

    def run(self, job: Job, directory: Path, journal: Journal) -> Made:
        from pipeline.weights.quant.streaming import Loss, bytes_to_read, streaming

        written = self._plan(job)
        parts = split(written, job.recipe.part_bytes)
        done = {part.name: entry for part in parts if (entry := journal.get(part.name))}
        if done:
            job.progress.note(f"{len(done)} of {len(parts)} files are there already")
        left = [part for part in parts if part.name not in done]
        total = bytes_to_read(one for part in left for one in part.tensors)
        with (
            job.progress.bar(f"quantizing {job.source.name}", total) as bar,
            streaming(job.checkpoint, allow_nonfinite=job.allow_nonfinite, on_bytes=bar.advance) as stream,
        ):
            for part in left:
                record, losses = stream.write(part, directory)
                done[part.name] = {"record": asdict(record), "losses": [asdict(one) for one in losses]}
                journal.add(part.name, done[part.name])
        lost = [Loss(**one) for part in parts for one in done[part.name]["losses"]]
        texts = {INDEX: index_text(parts), DESCRIPTION: description_text(written)}
        files = [FileRecord(**done[part.name]["record"]) for part in parts]
        files += [write_text(directory / name, text) for name, text in texts.items()]
        return Made(
            files=tuple(sorted(files)),
            groups=summarize(
                ((one.name, one.type) for one in written if one.name.endswith(".weight")),
                ((one.tensor, one.relative) for one in lost),
            ),
            notes=_zero_rows(lost),
        )

    def _plan(self, job: Job) -> tuple[Written, ...]:
        selections = job.recipe.selections()
        return plan_output(parameters(job.config, job.checkpoint), selections)


def _zero_rows(losses: Sequence[Loss]) -> tuple[str, ...]:
    """What a person should know of rows of zeros: they are no fault, but rare in a trained model."""
    with_zeros = [one for one in losses if one.zero_rows]
    if not with_zeros:
        return ()
    rows = sum(one.zero_rows for one in with_zeros)
    return (
        f"{rows} rows of {len(with_zeros)} weights are all zeros, first in {with_zeros[0].tensor}: they stay so",
    )
