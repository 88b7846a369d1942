"""Where models come from: ModelScope, Hugging Face, a directory. `hub.py` says what they share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.hubs.hub import Hub, Listing, OnBytes, RemoteFile

if TYPE_CHECKING:
    from pipeline.catalog.schema import Source

__all__ = ["Hub", "Listing", "OnBytes", "RemoteFile", "open_hub"]


def open_hub(source: Source, *, relative_to: Path, commit: str | None = None, parallel: int = 4) -> Hub:
    """The hub behind a source of the catalog; nothing is sent yet.

    `relative_to` is the directory of models.yaml, `commit` what the lock says the revision stood for, and
    `parallel` the number of files fetched at once.
    """
    if source.modelscope:
        from pipeline.hubs.modelscope import ModelScope

        return ModelScope(source.modelscope, source.revision, parallel=parallel)
    if source.huggingface:
        from pipeline.hubs.huggingface import HuggingFace

        return HuggingFace(source.huggingface, source.revision, commit=commit, parallel=parallel)
    from pipeline.hubs.directory import Directory

    assert source.dir is not None  # the schema lets exactly one of the three be given
    return Directory(relative_to / Path(source.dir).expanduser())
