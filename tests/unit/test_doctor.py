"""The host check: each line's verdicts from captures, what is captured, and that no secret is in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.ascend.host import NOTHING, Capture, docker_facts, load, redact, run, save, version_in
from pipeline.catalog.load import load_catalog
from pipeline.catalog.schema import Base
from pipeline.cli import main
from pipeline.errors import UsageError
from pipeline.stages.doctor import Check, Wanted, diagnose

ROOT = Path(__file__).resolve().parents[2]
SMI = Path(__file__).parent / "data/npu-smi"
BASE: Base = load_catalog(ROOT / "models.yaml").bases["v0.20.2rc1"]
NEW_BASE: Base = load_catalog(ROOT / "models.yaml").bases["v0.23.0rc1"]
NODES = ("davinci0", "davinci1", "davinci2", "davinci3", "davinci_manager", "hisi_hdc", "devmm_svm")


def smi(name: str) -> Capture:
    return Capture((SMI / f"{name}.txt").read_text())


def nodes(*names: str, access: bool = True) -> Capture:
    return Capture(
        json.dumps({name: {"access": access, "mode": "crw-rw----", "group": 1000} for name in names})
    )


GOOD = {
    "os-release": Capture('NAME="openEuler"\nPRETTY_NAME="openEuler 24.03 (LTS-SP3)"\n'),
    "uname": Capture("Linux 5.10.0-136.12.0.86.oe2203sp1.aarch64 aarch64\n"),
    "meminfo": Capture("MemTotal:       263843840 kB\nMemFree: 1 kB\nMemAvailable:   240000000 kB\n"),
    "driver": Capture("Version=25.0.rc1.1\nascendhal_version=7.35.23\npackage_version=25.0.rc1.1\n"),
    "firmware": Capture("Version=7.7.0.1.231\nfirmware_version=1.0\n"),
    "cann": Capture("# version: 1.0\ntoolkit_running_version=[7.6.0.1.220:9.1.0-beta.1]\n"),
    "atb": Capture("Ascend-cann-atb : 9.1.T1\n"),
    "npu-smi": smi("duo-25.0.rc1.1-idle"),
    "docker": Capture(json.dumps({"ServerVersion": "20.10.24", "Runtimes": {"runc": {}, "ascend": {}}})),
    "devices": nodes(*NODES),
    "storage": Capture(json.dumps({"root": "/var/lib/docker", "free": 500 << 30})),
    "containers": Capture(json.dumps({"containers": []})),
    "reach": Capture(json.dumps({"registry quay.io": "answers with 401"})),
}


def wanted(**changes: object) -> Wanted:
    values = {
        "base": BASE,
        "base_key": "v0.20.2rc1",
        "platform": "linux/arm64",
        "chips": 2,
        "image_size": 60 << 30,
    }
    return Wanted(**{**values, **changes})  # type: ignore[arg-type]


def check(id_: str, want: Wanted | None = None, **captures: Capture) -> Check:
    changed = {name.replace("_", "-"): capture for name, capture in captures.items()}
    (found,) = (one for one in diagnose({**GOOD, **changed}, want or wanted()) if one.id == id_)
    return found


def test_a_good_host_passes_everything() -> None:
    checks = diagnose(GOOD, wanted())
    assert [one for one in checks if one.verdict != "pass"] == []
    assert len({one.id for one in checks}) == len(checks) >= 18


def test_a_host_of_which_nothing_is_known_fails_without_an_exception() -> None:
    checks = diagnose({}, wanted())
    assert {one.id for one in checks if one.verdict == "fail"} >= {
        "docker",
        "npu-smi",
        "driver",
        "device-nodes",
    }
    assert all(one.mend for one in checks if one.verdict == "fail")


CASES: list[tuple[str, str, dict[str, Capture], Wanted | None, str]] = [
    ("os", "warn", {"os-release": Capture('PRETTY_NAME="Gentoo"')}, None, "Gentoo"),
    ("kernel", "warn", {"uname": Capture("Linux 4.19.90-2112.oe1 aarch64")}, None, "4.19.90"),
    ("kernel", "pass", {"uname": Capture("Linux 6.6.0-72.0.0.76.oe2403sp1.aarch64 aarch64")}, None, "6.6.0"),
    ("architecture", "fail", {"uname": Capture("Linux 6.6.0 riscv64")}, None, "riscv64"),
    ("architecture", "warn", {"uname": Capture("Linux 6.6.0 x86_64")}, None, "x86_64"),
    (
        "architecture",
        "pass",
        {"uname": Capture("Linux 6.6.0 x86_64")},
        wanted(platform="linux/amd64"),
        "x86_64",
    ),
    ("docker", "fail", {"docker": Capture("permission denied", found=False)}, None, "permission denied"),
    (
        "runtime",
        "warn",
        {"docker": Capture('{"ServerVersion": "20.10", "Runtimes": {"runc": {}}}')},
        None,
        "runc",
    ),
    (
        "npu-smi",
        "fail",
        {"npu-smi": Capture("npu-smi: FileNotFoundError", found=False)},
        None,
        "not installed",
    ),
    ("npu-smi", "fail", {"npu-smi": smi("none-8005")}, None, "-8005"),
    ("npu-smi", "fail", {"npu-smi": smi("none-empty-table")}, None, "no chip"),
    ("npu-smi", "fail", {"npu-smi": smi("hbm-23.0.0")}, None, "910B3"),
    ("npu-smi", "fail", {"npu-smi": smi("single-22.0.4")}, wanted(chips=4), "2 chips"),
    ("health", "fail", {"npu-smi": smi("duo-24.1.rc2-unhealthy")}, None, "chip 0: Warning, chip 1: Critical"),
    ("temperature", "fail", {"npu-smi": smi("duo-24.1.rc2-unhealthy")}, None, "91 °C"),
    ("topology", "warn", {"npu-smi": smi("single-22.0.4")}, None, "card 8: chips 0; card 11: chips 1"),
    (
        "chips-free",
        "pass",
        {"npu-smi": smi("duo-25.0.rc1.1-busy")},
        None,
        "free: 2, 3; chip 0: process 2104391",
    ),
    (
        "chips-free",
        "fail",
        {"npu-smi": smi("duo-25.0.rc1.1-busy")},
        wanted(chips=4),
        "VLLM::Worker_TP, 39342 MB",
    ),
    ("chips-free", "fail", {"npu-smi": smi("one-line-a-chip")}, None, "in use by nobody that is seen"),
    ("driver", "fail", {"driver": Capture("Version=24.1.rc2\n")}, None, "24.1.rc2"),
    ("driver", "warn", {}, wanted(base=NEW_BASE, base_key="v0.23.0rc1"), "25.0.rc1.1"),
    ("driver", "pass", {"driver": NOTHING}, None, "25.0.rc1.1"),
    ("driver", "fail", {"driver": NOTHING, "npu-smi": NOTHING}, None, "no version.info"),
    ("firmware", "warn", {"firmware": NOTHING}, None, "no version.info"),
    ("cann", "pass", {"cann": NOTHING}, None, "not on the host"),
    (
        "device-nodes",
        "fail",
        {"devices": nodes("davinci0", "davinci_manager", "hisi_hdc")},
        None,
        "devmm_svm",
    ),
    ("device-rights", "warn", {"devices": nodes(*NODES, access=False)}, None, "no access to davinci0"),
    (
        "memory",
        "warn",
        {"meminfo": Capture("MemTotal: 65536000 kB\nMemAvailable: 65000000 kB\n")},
        None,
        "62.5 GiB",
    ),
    (
        "memory",
        "warn",
        {"meminfo": Capture("MemTotal: 263843840 kB\nMemAvailable: 1000000 kB\n")},
        None,
        "free",
    ),
    ("disk", "fail", {"storage": Capture('{"root": "/var/lib/docker", "free": 1000}')}, None, "1000 B free"),
    ("disk", "pass", {}, wanted(image_size=None), "500 GiB free"),
    ("disk", "warn", {"storage": NOTHING}, None, "cannot be looked at"),
    (
        "reach-registry quay.io",
        "warn",
        {"reach": Capture('{"registry quay.io": "no answer: ConnectionError"}')},
        None,
        "no answer",
    ),
]


@pytest.mark.parametrize(
    ("id_", "verdict", "captures", "want", "found"), CASES, ids=[f"{n}-{c[0]}" for n, c in enumerate(CASES)]
)
def test_a_check_says_what_it_found(
    id_: str, verdict: str, captures: dict[str, Capture], want: Wanted | None, found: str
) -> None:
    (one,) = (one for one in diagnose({**GOOD, **captures}, want or wanted()) if one.id == id_)
    assert one.verdict == verdict
    assert found in one.found
    assert bool(one.mend) == (verdict != "pass")


def test_every_check_is_tried_where_it_does_not_pass() -> None:
    always = {"atb"}
    tried = {case[0] for case in CASES}
    assert {one.id for one in diagnose(GOOD, wanted())} - always == tried


def test_chips_in_use_are_told_by_container_where_one_has_them() -> None:
    rows = [{"name": "vllm-9b", "chips": [0, 1], "running": True, "pids": [2104391, 2104302, 2104392]}]
    held = Capture(json.dumps({"containers": rows}))
    one = check("chips-free", npu_smi=smi("duo-25.0.rc1.1-busy"), containers=held)
    assert one.found == "free: 2, 3; chip 0: container vllm-9b; chip 1: container vllm-9b"
    rows[0] |= {"running": False, "pids": []}
    stopped = Capture(json.dumps({"containers": rows}))
    assert check("chips-free", containers=stopped).found == "free: 0, 1, 2, 3"
    everything = Capture(json.dumps({"containers": [{"name": "p", "chips": None, "running": True}]}))
    assert check("chips-free", containers=everything).verdict == "fail"


@pytest.mark.parametrize(
    "text", ['{"containers": 7}', '{"containers": [7, {"pids": null}]}', "[1]", "{", "\x1b[31m"]
)
def test_captures_that_are_not_what_they_should_be_harm_nobody(text: str) -> None:
    for name in GOOD:
        for one in diagnose({**GOOD, name: Capture(text)}, wanted()):
            assert "\x1b" not in f"{one.id}{one.found}{one.wanted}{one.mend}"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Version=25.0.rc1.1\n", "25.0.rc1.1"),
        ("ascendhal_version=7\npackage_version=24.1.rc2\n", "24.1.rc2"),
        ("[x]\ntoolkit_running_version=[7.6.0.1.220:9.1.0-beta.1]\n", "9.1.0-beta.1"),
        ("package_name=Ascend-cann-toolkit\nversion=8.2.RC1\n", "8.2.RC1"),
        ("Ascend-cann-atb : 9.1.T1\nbranch : x", "9.1.T1"),
        ("", ""),
        ("nothing here", ""),
    ],
)
def test_version_files_of_every_kind_are_read(text: str, version: str) -> None:
    assert version_in(text) == version


# --- Captures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "proxy http://user:hunter2@proxy:3128",
        "HF_TOKEN=hunter2",
        '"password": "hunter2"',
        "Authorization: hunter2",
        "api_key = hunter2,",
        "hf_hunter2hunter2hunter2",
    ],
)
def test_secrets_do_not_reach_a_capture(text: str, tmp_path: Path) -> None:
    assert "hunter2" not in redact(text)
    save({"uname": Capture(text)}, tmp_path)
    assert "hunter2" not in (tmp_path / "uname.txt").read_text()


def test_of_docker_only_what_is_looked_at_is_kept() -> None:
    info = {
        "ServerVersion": "20.10",
        "HttpProxy": "http://u:p@h",
        "Name": "host",
        "Runtimes": {"ascend": {"path": "/x"}},
    }
    assert docker_facts(info).json == {"ServerVersion": "20.10", "Runtimes": {"ascend": {}}}


def test_captures_come_back_as_they_were(tmp_path: Path) -> None:
    captures = {**GOOD, "firmware": Capture("gone", found=False)}
    save(captures, tmp_path)
    found = load(tmp_path)
    assert {name: found[name] for name in captures} == captures
    save({"firmware": GOOD["firmware"]}, tmp_path)
    assert load(tmp_path)["firmware"].found
    assert diagnose(load(tmp_path), wanted()) == diagnose(GOOD, wanted())


def test_a_directory_without_captures_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no captures"):
        load(tmp_path)


def test_a_program_that_is_not_there_or_fails_is_a_capture(tmp_path: Path) -> None:
    assert run(("no-such-program-anywhere",)) == Capture(
        "no-such-program-anywhere: FileNotFoundError", found=False
    )
    failing = tmp_path / "fails"
    failing.write_text("#!/bin/sh\necho out; echo 'ret is -8005' >&2; exit 1\n")
    failing.chmod(0o755)
    found = run((str(failing),))
    assert not found.found
    assert "-8005" in found.text


# --- The command -------------------------------------------------------------------------------------------


def doctor(*arguments: str) -> int:
    return main(["doctor", "--catalog", str(ROOT / "models.yaml"), *arguments])


def test_another_host_is_judged_by_its_captures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(GOOD, tmp_path)
    assert doctor("--from", str(tmp_path), "9b") == 0
    assert "PASS  driver" in capsys.readouterr().out
    save({"driver": Capture("Version=23.0.3\n")}, tmp_path)
    assert doctor("--from", str(tmp_path), "9b") == 1
    out = capsys.readouterr().out
    assert "FAIL  driver         23.0.3 (wanted: 25.0.rc1.1 for base v0.20.2rc1)" in out
    assert "To mend: install driver 25.0.rc1.1" in out


def test_this_host_is_looked_at_and_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in NODES:
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    program = tmp_path / "bin/npu-smi"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n[ "$#" = 1 ] && exec cat {SMI}/duo-25.0.rc1.1-idle.txt\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("DUOPACK_DEVICE_DIR", str(tmp_path / "dev"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    assert doctor("--offline", "--json", "--collect", str(tmp_path / "case")) == 1
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)["checks"]}
    assert (rows["npu-smi"]["verdict"], rows["device-nodes"]["verdict"]) == ("pass", "pass")
    assert rows["docker"]["verdict"] == "fail"
    assert doctor("--json", "--from", str(tmp_path / "case")) == 1
    again = {row["id"]: row for row in json.loads(capsys.readouterr().out)["checks"]}
    assert again == rows


@pytest.mark.parametrize(
    "arguments", [("--from", "/nonexistent"), ("nokey",), ("--from", "a", "--collect", "b")]
)
def test_wrong_use_is_told(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--offline", *arguments) == 2
    assert "To mend" in capsys.readouterr().err
