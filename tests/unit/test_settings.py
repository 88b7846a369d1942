"""What the environment may say, and what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import UsageError
from pipeline.settings import read_settings


def test_without_anything_the_defaults_hold_and_the_lock_lies_beside_the_catalog():
    settings = read_settings({})
    assert (settings.catalog, settings.work, settings.parallel) == (Path("models.yaml"), Path("build"), 4)
    assert (settings.registry, settings.tag) == (None, None)
    assert settings.lock == Path("models.lock")
    assert settings.model_directory("9b") == Path("build/_work/models/9b")


def test_the_environment_wins_over_the_defaults_and_the_command_line_over_both():
    environ = {
        "DUOPACK_CATALOG": "/c/models.yaml",
        "DUOPACK_WORK": "/w",
        "DUOPACK_PARALLEL": "16",
        "DUOPACK_REGISTRY": "r.example/x",
        "DUOPACK_TAG": "t",
    }
    settings = read_settings(environ)
    assert (settings.lock, settings.work, settings.parallel) == (Path("/c/models.lock"), Path("/w"), 16)
    assert (settings.registry, settings.tag) == ("r.example/x", "t")
    given = read_settings(environ, catalog=Path("mine.yaml"), work=Path("here"))
    assert (given.catalog, given.work) == (Path("mine.yaml"), Path("here"))


def test_an_empty_variable_is_none():
    names = ("CATALOG", "WORK", "PARALLEL", "REGISTRY", "TAG")
    assert read_settings({f"DUOPACK_{name}": "" for name in names}) == read_settings({})


@pytest.mark.parametrize("value", ["0", "17", "-1", "4.0", "four", "²", "٤", " 4", "04", "9" * 5000])
def test_a_number_of_workers_is_from_1_to_16(value):
    with pytest.raises(UsageError, match="1 to 16") as caught:
        read_settings({"DUOPACK_PARALLEL": value})
    assert caught.value.where == "DUOPACK_PARALLEL"
    assert len(str(caught.value)) < 500
