"""The engines besides the streaming one, by name; making one starts nothing."""

from __future__ import annotations

import os

from pipeline.settings import Settings
from pipeline.stages.quantize.contract import Engine
from pipeline.stages.quantize.msmodelslim import MsmodelslimEngine
from pipeline.stages.quantize.runner import CpuRunner


def open_engines(settings: Settings, *, device: str = "auto", ranks: int = 2) -> dict[str, Engine]:
    """Engines for this machine. `device` is msmodelslim's; `ranks` is the TP that W8A8SC weights are made for."""
    del device, ranks
    msmodelslim = MsmodelslimEngine(CpuRunner(settings.cache, os.environ))
    return {msmodelslim.name: msmodelslim}
