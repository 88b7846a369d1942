"""Order among the versions of vLLM and vllm-ascend: `0.20.2`, `0.21.0rc1`, `0.20.2+empty`."""

from __future__ import annotations

import re

from pipeline.errors import DuopackError, quoted

_FORM = re.compile(r"v?(\d+(?:\.\d+)*)(?:(a|b|rc)(\d+))?(?:\.?(post|dev)(\d+))?(?:[-+].*)?")
_STAGES = {"dev": 0, "a": 1, "b": 2, "rc": 3, "": 4, "post": 5}


def version_key(text: str) -> tuple[int, ...]:
    """A key that sorts versions as PEP 440 does, as far as these projects use it; local parts do not count.

    Raises DuopackError for a text that is no version.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise DuopackError(f"'{quoted(text)}' is not a version", mend="write it like 0.20.2 or 0.20.2rc1")
    release, stage, number, extra, extra_number = match.groups()
    numbers = [int(part) for part in release.split(".")][:4]
    numbers += [0] * (4 - len(numbers))
    if stage is None and extra is not None:
        return (*numbers, _STAGES[extra], int(extra_number), 0)
    return (
        *numbers,
        _STAGES[stage or ""],
        int(number or 0),
        0 if extra is None else {"dev": -1, "post": 1}[extra],
    )
