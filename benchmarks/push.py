"""Building an image and pushing it to a registry on loopback, against docker, buildah and the raw limit, in one run.

    python benchmarks/push.py [--gib 2] [--rounds 3] [--work DIR] [--only NAME]…

Needs root for the engine. Prints a table, writes build/bench/push.json, and exits with 1 when a target is missed.
A peer that is not installed is left out, and so is the target that needs it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from material import Material
from measure import BenchError, Sample, median
from peers import Buildah, Contender, Curl, Docker, Duopack, lacks
from support.registry import PROGRAM, RegistryServer

ROOT = Path(__file__).resolve().parents[1]
RAW = "raw limit"
OURS = "duopack"
AGAIN = "duopack, new start script"
Rounds = Sequence[Mapping[str, Sample]]
"""Each round's samples by name."""


def main() -> int:
    options = parse()
    if problem := lacks(PROGRAM):
        print(f"push.py: {problem}", file=sys.stderr)
        return 2
    # A CI runner ends a job with SIGTERM: the servers must end too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work, prefix="push-") as name:
        contenders, missing = choose(Path(name), options.only)
        loads, rounds = measure(Path(name), contenders, options.rounds, options.gib)
        size = Material(Path(name) / "material").size
    targets = judge(rounds)
    print(as_text(size, rounds, targets, missing))
    print(f"load average at the start of each round: {', '.join(f'{load:.1f}' for load in loads)}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps(as_json(size, rounds, targets, missing) | {"loads": loads}, indent=1) + "\n"
    )
    return 1 if any(target.met is False for target in targets) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=2.0, help="weights, in four files (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="the median counts (default: 3)")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "bench", help="where everything is kept"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench" / "push.json")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="contenders whose name begins so"
    )
    options = parser.parse_args()
    # Engines write their paths elsewhere, and are looked for by them.
    options.work = options.work.resolve()
    if options.rounds < 1 or options.gib <= 0:
        parser.error("--rounds and --gib must be above zero")
    return options


def choose(work: Path, only: Sequence[str]) -> tuple[list[Contender], dict[str, str]]:
    """Those to measure, and why others are not."""
    material = Material(work / "material")
    curls = [Curl(material, method, parallel) for method in ("PUT", "PATCH") for parallel in (1, 4)]
    duopacks = [Duopack(material, work / f"duopack-{cold}", cold) for cold in (False, True)]
    dockers = [Docker(material, start_engine, buildkit) for buildkit in (False, True)]
    buildahs = [Buildah(material, unmount, compress) for compress in (True, False)]
    known: list[Contender] = [*curls, *duopacks, *dockers, *buildahs]
    wanted = [one for one in known if not only or one.name.startswith(tuple(only))]
    missing = {one.name: problem for one in wanted if (problem := one.missing())}
    return [one for one in wanted if one.name not in missing], missing


def start_engine(directory: Path) -> AbstractContextManager[str]:
    from support.engine import running_engine

    return running_engine(directory)


def unmount(directory: Path) -> None:
    from support.engine import unmount_below

    unmount_below(directory)


def measure(
    work: Path, contenders: Sequence[Contender], count: int, gib: float
) -> tuple[list[float], Rounds]:
    """Everybody once a round, each with an empty registry; every other round backwards.

    With each round goes the machine's load before it: a ratio means little where others work too.
    """
    material = work / "material"
    say(f"making {gib} GiB of weights")
    maker = [sys.executable, str(Path(__file__).with_name("material.py")), str(material), str(gib)]
    subprocess.run(maker, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    for one in contenders:
        if isinstance(one, Duopack):
            one.lock()
            # One build that does not count, so that the files are known to be verified.
            push(work, one)
    loads, rounds = [], []
    for number in range(count):
        samples: dict[str, Sample] = {}
        loads.append(round(os.getloadavg()[0], 2))
        for one in contenders if number % 2 == 0 else reversed(contenders):
            say(f"round {number + 1} of {count}: {one.name}")
            samples |= push(work, one)
        raw = [sample for name, sample in samples.items() if name.startswith("curl")]
        if raw:
            samples[RAW] = min(raw, key=lambda sample: sample.seconds)
        rounds.append(samples)
    return loads, rounds


def push(work: Path, contender: Contender) -> dict[str, Sample]:
    with (
        tempfile.TemporaryDirectory(dir=work, prefix="registry-") as registry,
        tempfile.TemporaryDirectory(dir=work, prefix="peer-", ignore_cleanup_errors=True) as own,
        RegistryServer(Path(registry)) as server,
    ):
        # What an earlier run left to be written must not be paid for by this one.
        os.sync()
        return contender.push(server.host, Path(own))


@dataclass(frozen=True)
class Target:
    """A promise and what came of it; `met` is None when it could not be measured."""

    text: str
    value: float | None
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def judge(rounds: Rounds) -> list[Target]:
    ours = [samples[OURS] for samples in rounds if OURS in samples]
    again = [samples[AGAIN] for samples in rounds if AGAIN in samples]
    cold = [samples["duopack, cold"] for samples in rounds if "duopack, cold" in samples]
    memory = [sample.memory for sample in (*ours, *again, *cold) if sample.memory]
    slowdowns = [ratio(rounds, peer, OURS) for peer in ("docker", "docker (BuildKit)")]
    return [
        Target("duopack / raw limit", ratio(rounds, OURS, RAW), 1.25),
        Target(
            "docker, the faster builder / duopack",
            min((one for one in slowdowns if one), default=None),
            6,
            at_least=True,
        ),
        Target("seconds for a new start script", middle([one.seconds for one in again]), 2),
        Target("bytes sent for a new start script", max((one.sent or 0 for one in again), default=None), 1e6),
        Target("duopack's memory, MB", max(memory, default=None) and max(memory) / 1e6, 300),
    ]


def ratio(rounds: Rounds, one: str, other: str) -> float | None:
    """The median, over rounds, of one's seconds by the other's in the same round."""
    return middle(
        [
            samples[one].seconds / samples[other].seconds
            for samples in rounds
            if {one, other} <= samples.keys()
        ]
    )


def middle(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def as_text(size: int, rounds: Rounds, targets: Sequence[Target], missing: Mapping[str, str]) -> str:
    names = sorted(rounds[0], key=lambda name: middle([samples[name].seconds for samples in rounds]) or 0)
    lines = [
        f"{size / (1 << 30):.2f} GiB in four files to a registry on loopback, {len(rounds)} rounds, median",
        f"{'':28} {'seconds':>8} {'range':>13} {'MiB/s':>7} {'x raw':>7} {'x duopack':>9} {'memory':>8} {'on disk':>9}",
    ]
    for name in names:
        samples = [each[name] for each in rounds]
        seconds = [one.seconds for one in samples]
        rate = f"{size / (1 << 20) / median(seconds):7.0f}" if name != AGAIN else f"{'':7}"
        steps = ", ".join(
            f"{step} {median([one.steps[step] for one in samples]):.1f} s" for step in samples[0].steps
        )
        lines.append(
            f"{name:28} {median(seconds):8.2f} {min(seconds):6.2f}-{max(seconds):6.2f} {rate}"
            f" {times(ratio(rounds, name, RAW))} {times(ratio(rounds, name, OURS)):>9}"
            f" {mib([one.memory for one in samples]):>8} {mib([one.left for one in samples]):>9}  {steps}"
        )
    lines += ["", *(f"not measured: {name}: {why}" for name, why in missing.items())]
    lines += [describe(target) for target in targets]
    return "\n".join(lines)


def times(value: float | None) -> str:
    return f"{value:7.2f}" if value is not None else f"{'':7}"


def mib(sizes: Sequence[int | None]) -> str:
    known = [size for size in sizes if size is not None]
    return f"{max(known) / (1 << 20):.0f} MiB" if known else ""


def describe(target: Target) -> str:
    verdict = {True: "reached", False: "MISSED", None: "not measured"}[target.met]
    value = "" if target.value is None else f"{target.value:,.2f}, "
    return f"{verdict:12} {target.text}: {value}to be at {'least' if target.at_least else 'most'} {target.limit:,g}"


def as_json(
    size: int, rounds: Rounds, targets: Sequence[Target], missing: Mapping[str, str]
) -> dict[str, object]:
    return {
        "bytes": size,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "rounds": [{name: asdict(sample) for name, sample in samples.items()} for samples in rounds],
        "missing": dict(missing),
        "targets": [{**asdict(target), "met": target.met} for target in targets],
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (BenchError, RuntimeError, pytest.fail.Exception) as error:
        sys.exit(f"push.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
