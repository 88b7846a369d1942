"""npu-smi's table in the layouts of several cards and driver versions, and what it prints instead of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.ascend.npu_smi import HELD, NpuSmi, parse_npu_smi
from pipeline.errors import DuopackError

CAPTURES = Path(__file__).parent / "data/npu-smi"


def read(name: str) -> NpuSmi:
    return parse_npu_smi((CAPTURES / f"{name}.txt").read_text())


def rows(found: NpuSmi) -> list[tuple[object, ...]]:
    return [
        (one.card, one.number, one.device, one.health, one.memory_used, one.memory_total)
        for one in found.chips
    ]


@pytest.mark.parametrize(
    ("name", "version", "wanted"),
    [
        (
            "duo-25.0.rc1.1-idle",
            "25.0.rc1.1",
            [
                (1, 0, 0, "OK", 1857, 44280),
                (1, 1, 1, "OK", 1391, 43693),
                (2, 0, 2, "OK", 1853, 44280),
                (2, 1, 3, "OK", 1390, 43693),
            ],
        ),
        (
            "duo-24.1.rc2-unhealthy",
            "24.1.rc2",
            [(0, 0, 0, "Warning", 1630, 44280), (0, 1, 1, "Critical", None, None)],
        ),
        ("single-22.0.4", "22.0.4", [(8, 0, 0, "OK", 1702, 21534), (11, 0, 1, "OK", 9120, 21534)]),
        ("hbm-23.0.0", "23.0.0", [(0, 0, 0, "OK", 3161, 65536), (1, 0, 1, "OK", 48121, 65536)]),
        ("one-line-a-chip", "", [(0, 0, 0, "OK", 43624, 44280), (1, 0, 1, "OK", 43008, 43693)]),
        ("none-empty-table", "25.0.rc1.1", []),
    ],
)
def test_the_chips_of_a_layout(name: str, version: str, wanted: list[tuple[object, ...]]) -> None:
    found = read(name)
    assert found.version == version
    assert rows(found) == wanted
    assert found.error is None


def test_names_temperatures_and_buses() -> None:
    first = read("duo-25.0.rc1.1-idle").chips[0]
    assert (first.name, first.temperature, first.bus, first.healthy) == ("310P3", 45.0, "0000:01:00.0", True)
    assert read("one-line-a-chip").chips[0].name == "310P3"
    hot, dead = read("duo-24.1.rc2-unhealthy").chips
    assert (hot.temperature, hot.healthy) == (91.0, False)
    assert (dead.temperature, dead.healthy) == (None, False)


def test_processes_belong_to_their_chips() -> None:
    found = read("duo-25.0.rc1.1-busy")
    assert [(one.pid, one.name, one.memory) for one in found.on(found.chips[0])] == [
        (2104391, "VLLM::Worker_TP", 39342),
        (2104302, "python3", 107),
    ]
    assert [one.pid for one in found.on(found.chips[1])] == [2104392]
    assert found.on(found.chips[2]) == ()
    other = read("hbm-23.0.0")
    assert [one.pid for one in other.on(other.chips[1])] == [1877]


@pytest.mark.parametrize(("name", "code"), [("none-8005", HELD), ("none-8020", -8020)])
def test_an_error_of_npu_smi_is_its_code(name: str, code: int) -> None:
    found = read(name)
    assert (found.chips, found.error) == ((), code)


@pytest.mark.parametrize("text", ["", "bash: npu-smi: command not found", "<html>", "NVIDIA-SMI 550.54"])
def test_what_is_not_npu_smi_s_is_refused(text: str) -> None:
    with pytest.raises(DuopackError, match="not what npu-smi info prints"):
        parse_npu_smi(text)


@pytest.mark.parametrize("name", [path.stem for path in CAPTURES.glob("*.txt")])
def test_windows_line_ends_and_a_prompt_before_it_change_nothing(name: str) -> None:
    text = (CAPTURES / f"{name}.txt").read_text()
    assert parse_npu_smi("$ npu-smi info\r\n" + text.replace("\n", "\r\n")).chips == read(name).chips


@given(st.data())
def test_a_table_cut_or_garbled_anywhere_harms_nobody(data: st.DataObject) -> None:
    text = (CAPTURES / "duo-25.0.rc1.1-busy.txt").read_text()
    at = data.draw(st.integers(0, len(text)))
    noise = data.draw(st.text(alphabet="|+-= 0123456789ab/\n", max_size=40))
    try:
        found = parse_npu_smi(text[:at] + noise + text[at + len(noise) :])
    except DuopackError:
        return
    assert all(chip.card >= 0 for chip in found.chips)
