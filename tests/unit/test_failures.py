"""The table of known failures: each entry is met by its log and not by the one that only looks so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import DuopackError
from pipeline.serving.diagnosis import diagnose
from pipeline.serving.failures import load
from pipeline.serving.failures.failure import Failure, Kind, Text, When, holds_test
from pipeline.serving.failures.load import SUBJECTS, load_failures
from pipeline.serving.failures.match import table_of
from pipeline.serving.failures.page import as_rows, failures_page
from pipeline.serving.header import Header

FAILURES = [failure for failures in load_failures().values() for failure in failures]
TABLE = table_of(FAILURES)


def ids(log: str) -> list[str]:
    return [match.failure.id for match in diagnose([log.encode()], TABLE).matches]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.id)
def test_its_log_has_it_first_and_the_near_one_has_it_not(failure: Failure) -> None:
    assert ids(failure.seen)[:1] == [failure.id]
    assert failure.id not in ids(failure.near)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.id)
def test_its_log_is_certain_and_fails_as_its_kind_says(failure: Failure) -> None:
    diagnosis = diagnose([failure.seen.encode()], TABLE)
    assert diagnosis.matches[0].certain
    assert diagnosis.failed == (failure.kind is not Kind.NOTE)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.id)
def test_words_are_for_people(failure: Failure) -> None:
    assert failure.cause.endswith(".")
    assert not failure.mend.endswith(".")
    assert failure.source
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", failure.id)


def test_a_user_who_quotes_an_error_is_no_failure() -> None:
    for failure in FAILURES:
        for text in failure.texts:
            words = text.words.removeprefix("^").replace("…", " … ")
            record = f"INFO 06-14 20:12:01 [logger.py:63] Received request chatcmpl-1: prompt: {words!r}"
            assert failure.id not in ids(f"(APIServer pid=1) {record}"), failure.id


@pytest.mark.parametrize(
    "text",
    [
        # The table of section 7 of the 310P notes: what is seen.
        "NotImplementedError: AscendAttentionState.SpecDecoding is not supported for 310P currently.",
        "KeyError: 'layers.0.mlp.gate_gate_up_proj.deq_scale'",
        "ValueError: Missing keys ('model.norm.bias',) in loaded state!",
        "Cannot find option named 'Ascend310P3'!",
        "Reason: set ASCEND_RT_VISIBLE_DEVICES:4 error, input data rang[0-2)",
        "get device count failed, runtime result = 207004.",
        "open device 0 failed, runtime result = 107001.",
        "dcmi module initialize failed. ret is -8005",
        "NotImplementedError: Unsupported quant_type=W8A8_MIX for layer_type=linear.",
        "ERROR: ModelSlim Quantization Config Not Found",
        "File \"/x/modelslim_config.py\", line 4, in f\nKeyError: 'model.layers.1.mlp.down_proj.weight'",
        "smoke: the answer is one character over and over: !!!!!!!!!!!!!!!!",
        "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB",
        "AttributeError: 'Qwen3ForCausalLM' object has no attribute 'get_mamba_state_copy_func'",
        "RuntimeError: The Inner error is reported as above. and the current working event is 0xfffe",
        "container: ended with exit code 137",
        # The guide, 8.4 and 8.5.
        "/models/scripts/n9.sh: line 2: npu-smi: command not found",
        "    assert param_data.shape == loaded_weight.shape",
        "OSError: [Errno 98] Address already in use",
    ],
)
def test_what_people_see_is_known_without_the_logs_header(text: str) -> None:
    diagnosis = diagnose([text.encode()], TABLE)
    assert diagnosis.causes, text


def test_the_page_is_made_from_the_table() -> None:
    page = Path(__file__).resolve().parents[2] / "docs/failures.md"
    assert page.read_text() == failures_page(), "duopack diagnose --table > docs/failures.md"
    assert [row["id"] for row in as_rows()] == [failure.id for failure in FAILURES]


def test_literal_parts_in_their_order() -> None:
    text = Text("KeyError: '….deq_scale'")
    assert text.found_in("x KeyError: 'layers.0.deq_scale'")
    assert not text.found_in(".deq_scale' KeyError: 'x'")
    assert Text("KeyError: '….mlp.deq_scale'").needle == ".mlp.deq_scale'"
    start = Text("^Killed …now")
    assert start.found_in("Killed right now")
    assert not start.found_in("it was Killed right now")
    assert not Text("aa…aa").found_in("aaa")


@pytest.mark.parametrize(
    ("value", "test", "holds"),
    [
        (None, "absent", True),
        (False, "given", False),
        (True, "given", True),
        ("sharded_state", "is sharded_state|runai", True),
        (None, "not sharded_state", True),
        ([1, 2, 4], "over 2", True),
        ([1, 2], "over 2", False),
        (40960, "over 20480", True),
        (True, "over 0", False),
        (None, "over 0", False),
        (3.5, "under 4", True),
        (None, "under 4", False),
    ],
)
def test_options_are_tested(value: object, test: str, holds: bool) -> None:
    assert holds_test(value, test) is holds


def test_when_the_header_does_not_tell() -> None:
    when = When(before="0.21.0rc1", options={"enforce_eager": "absent"})
    assert when.holds(Header()) is None
    assert when.holds(Header("0.20.2", options={})) is True
    assert when.holds(Header("0.21.0rc1", options={})) is False
    assert when.holds(Header("0.20.2", options={"enforce_eager": True})) is False
    assert when.holds(Header("0.20.2")) is None
    assert when.holds(Header("what?", options={})) is None
    assert When(since="0.20").holds(Header("0.19.1")) is False
    assert str(when) == "vLLM before 0.21.0rc1, enforce_eager absent"


GOOD: dict[str, Any] = {
    "id": "x",
    "kind": "cause",
    "texts": ["abcdefgh"],
    "cause": "C.",
    "mend": "m",
    "source": "s",
    "seen": "",
    "near": "",
}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kind": "reason"}, "reason"),
        ({"texts": ["abc"]}, "six characters"),
        ({"texts": []}, "six characters"),
        ({"when": {"options": {"a": "maybe"}}}, "maybe"),
        ({"when": {"until": "1"}}, "until"),
        ({"when": {"since": "new"}}, "new"),
        ({"yields_to": ["y"]}, "y"),
        ({"health": {"cache_max": "over 1"}}, "texts or health"),
        ({"texts": None, "health": {"speed": "over 1"}}, "speed"),
        ({"extra": 1}, "extra"),
        ({"cause": None}, "x"),
        ({"id": None}, "id"),
    ],
)
def test_a_broken_table_is_told(
    change: dict[str, Any], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import yaml

    row = {
        key: value for key, value in (GOOD | change).items() if not (key in {"texts", "id"} and value is None)
    }
    for subject in SUBJECTS:
        (tmp_path / f"{subject}.yaml").write_text("[]")
    (tmp_path / "chips.yaml").write_text(yaml.safe_dump([row]))
    monkeypatch.setattr(load, "__file__", str(tmp_path / "load.py"))
    with pytest.raises(DuopackError, match=re.escape(complaint)):
        load_failures()


def test_two_failures_of_one_id_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    for subject in SUBJECTS:
        (tmp_path / f"{subject}.yaml").write_text(yaml.safe_dump([GOOD]) if subject != "memory" else "[]")
    monkeypatch.setattr(load, "__file__", str(tmp_path / "load.py"))
    with pytest.raises(DuopackError, match="one id"):
        load_failures()
