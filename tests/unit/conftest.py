"""Fixtures of the tests that run `duopack` as a whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub import FaultyHub
from support.project import Project, make_models, open_project


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny models, made once."""
    root = tmp_path_factory.mktemp("models")
    make_models(root)
    return root


@pytest.fixture
def project(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A catalog of two tiny models, a hub that serves them, a base for two platforms."""
    shutil.copytree(models, tmp_path / "hub", copy_function=os.link)
    with FaultyHub(tmp_path / "hub") as hub:
        yield open_project(tmp_path, hub, monkeypatch)
