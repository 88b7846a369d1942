"""Whether an Ascend host can run an image: captures of the host, judged one by one against what a base wants."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pipeline.ascend.container import MANAGERS, RUNTIME
from pipeline.ascend.host import NOTHING, Capture, version_in
from pipeline.ascend.npu_smi import HELD, Chip, NpuSmi, parse_npu_smi
from pipeline.catalog.schema import Base
from pipeline.errors import DuopackError, quoted
from pipeline.files import human_size

Verdict = Literal["pass", "warn", "fail"]
KERNEL: Final = (5, 10, 0, 136)
MEMORY: Final = 128 * 10**9
"""Bytes of host memory that the guide recommends; loading holds a copy of the weights."""
WARM, HOT = 75.0, 90.0
"""°C: the guide saw 40 to 60 in use."""
IDLE_MEMORY = 4096
"""MiB that the driver and its services take of an idle chip at most; seen: 1.1 to 1.9 thousand."""
ARCHITECTURES = {"aarch64": "arm64", "arm64": "arm64", "x86_64": "amd64", "amd64": "amd64"}
TESTED_SYSTEMS = ("openEuler", "Kylin", "Ubuntu", "CentOS", "UOS", "BCLinux", "CULinux")


@dataclass(frozen=True)
class Wanted:
    """What the host is judged against: a base, chips (0: any number), bytes of an image (None: not known)."""

    base: Base
    base_key: str
    platform: str
    chips: int = 0
    image_size: int | None = None


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, the verdict, what was found and wanted, and how to mend it."""

    id: str
    verdict: Verdict
    found: str
    wanted: str = ""
    mend: str = ""


@dataclass(frozen=True)
class _Host:
    """The captures with what several checks take from them."""

    captures: Mapping[str, Capture]
    npu: NpuSmi | None
    npu_problem: str

    def __getitem__(self, name: str) -> Capture:
        return self.captures.get(name, NOTHING)


def diagnose(captures: Mapping[str, Capture], wanted: Wanted) -> tuple[Check, ...]:
    """Every check in order; none depends on another's verdict. Nothing is read but the captures."""
    host = _host(captures)
    return tuple(check for make in _CHECKS for check in make(host, wanted))


def _host(captures: Mapping[str, Capture]) -> _Host:
    capture = captures.get("npu-smi", NOTHING)
    if not capture.found and "FileNotFoundError" in capture.text:
        return _Host(captures, None, "npu-smi is not installed, or not on the PATH")
    try:
        return _Host(captures, parse_npu_smi(capture.text), "")
    except DuopackError as error:
        return _Host(captures, None, error.what)


# --- The system --------------------------------------------------------------------------------------------


def _system(host: _Host, wanted: Wanted) -> Iterator[Check]:
    del wanted
    fields = dict(re.findall(r'(?m)^([A-Z_]+)="?([^"\n]*)"?$', host["os-release"].text))
    name = fields.get("PRETTY_NAME") or fields.get("NAME") or ""
    known = any(one.lower() in name.lower() for one in TESTED_SYSTEMS)
    yield Check(
        "os",
        "pass" if known else "warn",
        quoted(name) or "no /etc/os-release",
        "openEuler 24.03, or a Linux that the Ascend driver supports",
        "" if known else "look it up in the driver's list of systems",
    )
    yield from _kernel(host["uname"].text)


def _kernel(text: str) -> Iterator[Check]:
    words = text.split()
    release = words[1] if len(words) > 1 else ""
    numbers = tuple(int(number) for number in re.findall(r"\d+", release)[:4])
    newer = numbers[: len(KERNEL)] >= KERNEL
    yield Check(
        "kernel",
        "pass" if newer else "warn",
        quoted(release) or "uname told nothing",
        "5.10.0-136 or newer",
        "" if newer else "update the kernel, then build the driver for it again",
    )


def _architecture(host: _Host, wanted: Wanted) -> Iterator[Check]:
    words = host["uname"].text.split()
    machine = words[-1] if words else ""
    platform = f"linux/{ARCHITECTURES.get(machine, machine)}"
    if platform not in wanted.base.platforms:
        mend = f"use a host of {' or '.join(wanted.base.platforms)}"
        yield Check(
            "architecture", "fail", quoted(machine) or "unknown", " or ".join(wanted.base.platforms), mend
        )
    elif platform != wanted.platform:
        mend = f"build with --platform {platform}"
        yield Check("architecture", "warn", machine, f"{wanted.platform}, which is built by default", mend)
    else:
        yield Check("architecture", "pass", machine, wanted.platform)


# --- Docker ------------------------------------------------------------------------------------------------


def _docker(host: _Host, wanted: Wanted) -> Iterator[Check]:
    del wanted
    facts = host["docker"].json
    if not host["docker"].found or not facts.get("ServerVersion"):
        said = quoted(host["docker"].text.strip(), 160) or "no answer"
        mend = "start it (systemctl start docker), or set DOCKER_HOST; a user needs the group docker"
        yield Check("docker", "fail", said, "a docker engine that answers", mend)
        return
    yield Check(
        "docker", "pass", f"docker {quoted(str(facts['ServerVersion']))}", "a docker engine that answers"
    )
    runtimes = facts.get("Runtimes")
    names = sorted(runtimes) if isinstance(runtimes, dict) else []
    has = RUNTIME in names
    yield Check(
        "runtime",
        "pass" if has else "warn",
        ", ".join(map(quoted, names)) or "none",
        f"the runtime {RUNTIME}",
        ""
        if has
        else "install Ascend Docker Runtime; 'duopack run' also works without it: it maps chips and driver",
    )


def _disk(host: _Host, wanted: Wanted) -> Iterator[Check]:
    facts = host["storage"].json
    free, root = facts.get("free"), quoted(str(facts.get("root", "")))
    if not isinstance(free, int):
        yield Check(
            "disk",
            "warn",
            "the engine's directory cannot be looked at",
            "free space for the image",
            "run as root",
        )
        return
    if wanted.image_size is None:
        yield Check(
            "disk", "pass", f"{human_size(free)} free at {root}", "name a KEY to hold it against its image"
        )
        return
    # A pull keeps each layer once compressed until it is unpacked; the weights' layers are not compressed.
    need = wanted.image_size + max(wanted.image_size // 10, 10 << 30)
    enough = free >= need
    mend = (
        f"free {human_size(need - free)}, or move the engine's data-root to another disk"
        if not enough
        else ""
    )
    yield Check(
        "disk", "pass" if enough else "fail", f"{human_size(free)} free at {root}", human_size(need), mend
    )


# --- Chips -------------------------------------------------------------------------------------------------


def _chips(host: _Host, wanted: Wanted) -> Iterator[Check]:
    need = max(1, wanted.chips)
    goal = f"{need} chip{'s' if need > 1 else ''} of 310P"
    if host.npu is None:
        mend = "install the Ascend driver; npu-smi must be on the PATH"
        yield Check("npu-smi", "fail", host.npu_problem, "npu-smi info lists the chips", mend)
        return
    if not host.npu.chips:
        held = host.npu.error == HELD
        found = "no chip" + (f", error {host.npu.error}" if host.npu.error else "")
        mend = (
            "another container holds the chips, or none is mapped into this one"
            if held
            else "check the cards (lspci | grep d500) and the driver (systemctl status), and that you may use it"
        )
        yield Check("npu-smi", "fail", found, goal, mend)
        return
    chips = host.npu.chips
    names = ", ".join(sorted({quoted(chip.name) for chip in chips}))
    right = [chip for chip in chips if "310P" in chip.name]
    enough = len(right) >= need
    mend = "" if enough else "use a host with more chips, or a profile of a smaller TP"
    yield Check("npu-smi", "pass" if enough else "fail", f"{len(chips)} chips ({names})", goal, mend)
    yield _health(chips)
    yield _temperature(chips)
    yield _topology(chips)
    yield from _in_use(host, wanted)


def _health(chips: tuple[Chip, ...]) -> Check:
    ill = [f"chip {chip.device}: {quoted(chip.health)}" for chip in chips if not chip.healthy]
    mend = (
        "look at npu-smi info -t health -i CARD; reset the chip, or leave it out with --chips" if ill else ""
    )
    return Check("health", "fail" if ill else "pass", ", ".join(ill) or "all OK", "OK on every chip", mend)


def _temperature(chips: tuple[Chip, ...]) -> Check:
    known = [(chip.temperature, chip.device) for chip in chips if chip.temperature is not None]
    if not known:
        return Check(
            "temperature", "warn", "npu-smi tells none", f"below {WARM:.0f} °C", "look at the sensors"
        )
    degrees, device = max(known)
    verdict: Verdict = "fail" if degrees >= HOT else "warn" if degrees >= WARM else "pass"
    mend = "" if verdict == "pass" else "check the fans and the air flow: these cards have none of their own"
    return Check(
        "temperature", verdict, f"{degrees:.0f} °C at most (chip {device})", f"below {WARM:.0f} °C", mend
    )


def _topology(chips: tuple[Chip, ...]) -> Check:
    cards: dict[int, list[int]] = {}
    for chip in chips:
        cards.setdefault(chip.card, []).append(chip.device)
    shown = "; ".join(f"card {card}: chips {', '.join(map(str, held))}" for card, held in cards.items())
    odd = [card for card, held in cards.items() if len(held) != 2]
    mend = "a 300I Duo card shows two chips: if it shows one, look at its health" if odd else ""
    return Check("topology", "warn" if odd else "pass", shown, "two chips on each card", mend)


def _in_use(host: _Host, wanted: Wanted) -> Iterator[Check]:
    """Who uses which chip: containers by what they have, processes by their ids, memory where neither is seen."""
    assert host.npu
    users = {chip.device: _users(host, chip) for chip in host.npu.chips}
    free = [device for device, names in users.items() if not names]
    busy = "; ".join(f"chip {device}: {', '.join(names)}" for device, names in users.items() if names)
    need = wanted.chips
    mend = "" if len(free) >= need else "stop what uses them ('duopack ps' lists it), or use other chips"
    verdict: Verdict = "pass" if len(free) >= need else "fail"
    found = f"free: {', '.join(map(str, free)) or 'none'}" + (f"; {busy}" if busy else "")
    yield Check("chips-free", verdict, found, f"{need} free" if need else "", mend)


def _users(host: _Host, chip: Chip) -> list[str]:
    assert host.npu
    rows = host["containers"].json.get("containers")
    containers = [one for one in rows if isinstance(one, dict)] if isinstance(rows, list) else []
    owners = {pid: str(one.get("name")) for one in containers for pid in one.get("pids") or ()}
    names = [
        f"container {quoted(str(one.get('name')))}"
        for one in containers
        if one.get("running") and (one.get("chips") is None or chip.device in (one.get("chips") or ()))
    ]
    for process in host.npu.on(chip):
        if process.pid not in owners:
            memory = f", {process.memory} MB" if process.memory is not None else ""
            names.append(f"process {process.pid} ({quoted(process.name)}{memory})")
    if not names and (chip.memory_used or 0) > IDLE_MEMORY:
        names.append(f"{chip.memory_used} MB in use by nobody that is seen")
    return names


# --- Versions ----------------------------------------------------------------------------------------------


def _versions(host: _Host, wanted: Wanted) -> Iterator[Check]:
    yield _driver(host, wanted)
    firmware = version_in(host["firmware"].text)
    yield Check(
        "firmware",
        "pass" if firmware else "warn",
        quoted(firmware) or "no version.info",
        "the one that came with the driver",
        "" if firmware else "look at npu-smi info -t board -i CARD",
    )
    inside = "the image brings its own; the host's is not used"
    for name, version in (("cann", wanted.base.cann), ("atb", None)):
        found = version_in(host[name].text)
        shown = quoted(found) or "not on the host"
        goal = f"{inside}{f' ({version})' if version else ''}"
        yield Check(name, "pass", shown, goal)


def _driver(host: _Host, wanted: Wanted) -> Check:
    found, want = version_in(host["driver"].text), wanted.base.driver
    if not found and host.npu and host.npu.version:
        found = host.npu.version
    if not found:
        return Check(
            "driver", "fail", "no version.info", want or "a driver", "install the Ascend driver and firmware"
        )
    if want is None:
        note = f"nobody has told what {wanted.base_key} needs"
        return Check("driver", "warn", quoted(found), note, "look it up in upstream's release notes")
    same = found.lower() == want.lower()
    mend = f"install driver {want}, or use a base that is made for {quoted(found)}" if not same else ""
    return Check(
        "driver", "pass" if same else "fail", quoted(found), f"{want} for base {wanted.base_key}", mend
    )


# --- Rights, memory, reach ---------------------------------------------------------------------------------


def _devices(host: _Host, wanted: Wanted) -> Iterator[Check]:
    nodes = host["devices"].json
    chips = [name for name in nodes if re.fullmatch(r"davinci\d+", name)]
    missing = [name for name in MANAGERS if name not in nodes]
    need = max(1, wanted.chips)
    goal = f"{need} of /dev/davinciN, and {', '.join(MANAGERS)}"
    found = f"{len(chips)} chips" + (f", without {', '.join(missing)}" if missing else "")
    fine = not missing and len(chips) >= need
    mend = "" if fine else "load the driver: its modules make these nodes"
    yield Check("device-nodes", "pass" if fine else "fail", found, goal, mend)
    if not nodes:
        return
    shut = [name for name, one in nodes.items() if isinstance(one, dict) and not one.get("access")]
    rights = "" if not shut else "add the user to the group HwHiAiUser, or start containers as root"
    yield Check(
        "device-rights",
        "warn" if shut else "pass",
        f"no access to {', '.join(map(quoted, shut[:4]))}" if shut else "this user may read and write them",
        "read and write",
        rights,
    )


def _memory(host: _Host, wanted: Wanted) -> Iterator[Check]:
    fields = dict(re.findall(r"(?m)^(\w+):\s+(\d+) kB", host["meminfo"].text))
    total, free = int(fields.get("MemTotal", 0)) << 10, int(fields.get("MemAvailable", 0)) << 10
    need = wanted.image_size or 0
    found = f"{human_size(total)}, {human_size(free)} free"
    if not total:
        yield Check("memory", "warn", "no /proc/meminfo", human_size(MEMORY))
    elif free < need:
        mend = "free memory: while it loads, the server needs room for the weights"
        yield Check("memory", "warn", found, f"{human_size(need)} free for the weights", mend)
    elif total < MEMORY:
        yield Check(
            "memory",
            "warn",
            found,
            human_size(MEMORY),
            "large models may end with exit code 137 while they load",
        )
    else:
        yield Check("memory", "pass", found, human_size(MEMORY))


def _reach(host: _Host, wanted: Wanted) -> Iterator[Check]:
    del wanted
    for name, answer in host["reach"].json.items():
        text = str(answer)
        fine = text.startswith("answers")
        mend = (
            ""
            if fine
            else "check the network, the proxy and the address; an air-gapped host takes 'duopack export'"
        )
        yield Check(f"reach-{quoted(name)}", "pass" if fine else "warn", quoted(text), "it answers", mend)


_CHECKS: tuple[Callable[[_Host, Wanted], Iterator[Check]], ...] = (
    _system,
    _architecture,
    _docker,
    _chips,
    _devices,
    _versions,
    _memory,
    _disk,
    _reach,
)
