"""The engines besides the streaming one, by name: each opened only when it is asked for."""

from __future__ import annotations

from pipeline.settings import Settings
from pipeline.stages.quantize.contract import Engine


def open_engines(settings: Settings, *, device: str = "auto", ranks: int = 2) -> dict[str, Engine]:
    """Engines for this machine. `device` is msmodelslim's; `ranks` is the TP that W8A8SC weights are made for."""
    del settings, device, ranks
    return {}
