"""Shared by all tests: `from support.x import y` works, and no test sees this machine's settings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# A loaded machine is no failure; in CI the examples are the same each time.
settings.register_profile("duopack", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("duopack")

OURS = ("DUOPACK_", "MODELSCOPE_", "HF_", "DOCKER_", "REGISTRY_AUTH_FILE")
KEPT = {"DUOPACK_VLLM", "DUOPACK_MSMODELSLIM"}


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A home of its own and none of the user's variables: tests must not depend on them or touch them."""
    for name in list(os.environ):
        if name.startswith(OURS) and name not in KEPT:
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.getbasetemp() / "home"))
