"""The engines besides the streaming one, by name; making one starts nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pipeline.catalog.load import load_catalog
from pipeline.settings import Settings
from pipeline.stages.quantize.container import Base, ChipRunner
from pipeline.stages.quantize.contract import Engine
from pipeline.stages.quantize.msmodelslim import MsmodelslimEngine
from pipeline.stages.quantize.runner import CpuRunner, Runner
from pipeline.stages.quantize.w8a8sc import W8a8scEngine

Device = Literal["auto", "cpu", "npu"]
DOCKER_SOCKET = Path("/var/run/docker.sock")


def open_engines(settings: Settings, *, device: Device = "auto", ranks: int = 2) -> dict[str, Engine]:
    """Engines for this machine. `device` is msmodelslim's; `ranks` is the TP that W8A8SC weights are made for.

    Raises DuopackError when the catalog, which names the base image, cannot be read and an engine would need it.
    """
    base = Base(_base_image(settings)) if settings.catalog.is_file() else Base("")
    chips = base.image and base.chips() and ("DOCKER_HOST" in os.environ or DOCKER_SOCKET.exists())
    on_chips = device == "npu" or (device == "auto" and chips)
    runner: Runner = ChipRunner(base) if on_chips else CpuRunner(settings.cache, os.environ)
    engines: tuple[Engine, ...] = (MsmodelslimEngine(runner), W8a8scEngine(base, ranks))
    return {engine.name: engine for engine in engines}


def _base_image(settings: Settings) -> str:
    catalog = load_catalog(settings.catalog)
    return catalog.bases[catalog.default_base].images[0]
