"""How fast does it answer? A sweep over concurrencies against a running server, checked against its own counters."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from pipeline.errors import DuopackError, UsageError, quoted
from pipeline.serving import vllm_bench
from pipeline.serving.benchmark import AGREED, Benchmark, Point, ServerSide, spread
from pipeline.serving.client import ServedModel, ServerClient
from pipeline.serving.loadgen import Load, Sample, make_prompts, run_load, totals
from pipeline.serving.metrics import Counters, read_counters

if TYPE_CHECKING:
    from docker.models.containers import Container

Tool = Literal["auto", "own", "vllm"]
MAX_CONCURRENCY = 1024
_PER_PLACE = 4
_AT_LEAST = 8
_SETTLE_SECONDS = 3600 * 6
OnNote = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """What to measure: prompts of `input_tokens`, answers of `output_tokens`, at each of the concurrencies.

    `requests` is the number at each, None: four for each place, at least eight. `model` is a served name, None: the
    only or first one.
    """

    concurrencies: tuple[int, ...] = (1, 2, 4, 8)
    input_tokens: int = 512
    output_tokens: int = 128
    requests: int | None = None
    model: str | None = None
    seed: int = 0
    tool: Tool = "auto"

    def __post_init__(self) -> None:
        fits = all(1 <= one <= MAX_CONCURRENCY for one in self.concurrencies)
        if not self.concurrencies or not fits:
            raise UsageError(
                f"a concurrency is 1 to {MAX_CONCURRENCY}", where="--concurrency", mend="give 1,4,8"
            )
        for name, value in (("--input-tokens", self.input_tokens), ("--output-tokens", self.output_tokens)):
            if value < 1:
                raise UsageError("it must be 1 or more", where=name, mend="leave it out for the default")
        if self.requests is not None and self.requests < 1:
            raise UsageError("it must be 1 or more", where="--requests", mend="leave it out for the default")

    def requests_at(self, concurrency: int) -> int:
        return self.requests or max(_AT_LEAST, _PER_PLACE * concurrency)


def bench(
    client: ServerClient, wanted: Wanted, note: OnNote, container: Container | None = None
) -> Benchmark:
    """Measures a server that runs; with a container the load comes from `vllm bench serve` inside of it.

    Raises DuopackError when the server cannot be asked, UsageError when it does not serve what is wanted.
    """
    served = _served(client, wanted)
    tool = _tool(wanted.tool, served, container)
    started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    measure = _Vllm(client, wanted, served, container) if tool == "vllm" else _Own(client, wanted, served)
    note(f"measuring {served.name} with {measure.name}")
    measure.warm_up()
    points = []
    for concurrency in wanted.concurrencies:
        points.append(_checked(client, measure, concurrency))
        note(f"{concurrency} at a time: {points[-1].output_throughput:g} tokens/s")
        if points[-1].failed and not client.healthy():
            note("the server is gone: the rest is left out")
            break
    return Benchmark(
        url=client.url,
        model=served.name,
        root=served.root,
        tool=measure.name,
        input_tokens=wanted.input_tokens,
        output_tokens=wanted.output_tokens,
        seed=wanted.seed,
        started=started,
        points=tuple(points),
    )


def _served(client: ServerClient, wanted: Wanted) -> ServedModel:
    models = client.models()
    found = next((one for one in models if wanted.model in {None, one.name}), None)
    if found is None:
        names = ", ".join(quoted(one.name) for one in models) or "nothing"
        raise UsageError(
            f"the server serves {names}", where="--model", mend="give one of these, or leave it out"
        )
    needed = wanted.input_tokens + wanted.output_tokens
    if found.max_model_len is not None and needed > found.max_model_len:
        raise UsageError(
            f"{needed} tokens do not fit into the server's max_model_len of {found.max_model_len}",
            where="--input-tokens, --output-tokens",
            mend="give smaller numbers",
        )
    return found


def _tool(wanted: Tool, served: ServedModel, container: Container | None) -> Literal["own", "vllm"]:
    """`vllm bench serve` where there is one that can read the model's tokenizer, else the load of our own."""
    if container is not None:
        return "vllm"
    there = shutil.which("vllm") is not None and Path(served.root).is_dir()
    if wanted == "vllm" and not there:
        raise UsageError(
            f"there is no vllm on PATH that can read {quoted(served.root)}",
            where="--with",
            mend="give --container NAME to measure from inside the server's container, or --with own",
        )
    return "vllm" if there and wanted != "own" else "own"


def _checked(client: ServerClient, measure: _Own | _Vllm, concurrency: int) -> Point:
    """A point with what the server counted meanwhile, where it counts."""
    before = _counters(client)
    point, tokens = measure.point(concurrency)
    after = _counters(client)
    if before is None or after is None:
        return point
    added = after.since(before)
    side = ServerSide(
        prompt_tokens=int(added.prompt_tokens),
        generation_tokens=int(added.generation_tokens),
        preemptions=int(added.preemptions),
        prefix_hit_rate=round(added.prefix_hits / added.prefix_queries, 4)
        if added.prefix_queries > 0
        else 0.0,
    )
    agreed = abs(side.generation_tokens - tokens[1]) <= AGREED * max(tokens[1], 1)
    return replace(point, server=side, agreed=agreed)


def _counters(client: ServerClient) -> Counters | None:
    """None for a server that has no counters; one that is gone says so at the next request."""
    try:
        return read_counters(client)
    except DuopackError:
        return None


class _Own:
    """Points from our own load."""

    name = "duopack"

    def __init__(self, client: ServerClient, wanted: Wanted, served: ServedModel) -> None:
        self._client, self._wanted, self._served = client, wanted, served

    def warm_up(self) -> None:
        samples, _ = run_load(self._client, self._load(2, "warm-up", 8), 1)
        if all(sample.error for sample in samples):
            raise DuopackError(
                f"the server does not answer: {samples[0].error}",
                where=self._client.url,
                mend="see what its log says: duopack diagnose CONTAINER",
            )

    def point(self, concurrency: int) -> tuple[Point, tuple[int, int]]:
        load = self._load(self._wanted.requests_at(concurrency), str(concurrency), self._wanted.output_tokens)
        samples, seconds = run_load(self._client, load, concurrency)
        return point_of(samples, seconds, concurrency), totals(samples)

    def _load(self, count: int, name: str, output_tokens: int) -> Load:
        wanted = self._wanted
        # The server caches prefixes: each point needs prompts that no other one had.
        seed = f"{wanted.seed}/{name}"
        prompts = make_prompts(
            self._client, self._served.name, count=count, tokens=wanted.input_tokens, seed=seed
        )
        return Load(self._served.name, prompts, output_tokens)


def point_of(samples: Sequence[Sample], seconds: float, concurrency: int) -> Point:
    """What some requests make together."""
    answered = [sample for sample in samples if not sample.error]
    read, made = totals(samples)
    failures = [sample.error for sample in samples if sample.error]
    return Point(
        concurrency=concurrency,
        requests=len(answered),
        failed=len(failures),
        seconds=round(seconds, 3),
        output_throughput=round(made / seconds, 2) if seconds > 0 else 0.0,
        total_throughput=round((read + made) / seconds, 2) if seconds > 0 else 0.0,
        ttft=spread([sample.first for sample in answered]),
        tpot=spread([each for sample in answered if (each := sample.per_token) is not None]),
        errors=tuple(dict.fromkeys(failures))[:3],
    )


class _Vllm:
    """Points from `vllm bench serve`, here or inside a container."""

    name = "vllm bench serve"

    def __init__(
        self, client: ServerClient, wanted: Wanted, served: ServedModel, container: Container | None
    ) -> None:
        self._client, self._wanted, self._served, self._container = client, wanted, served, container
        self._url = client.url if container is None else inner_url(client.url, container)

    def warm_up(self) -> None:
        """The tool makes a first request by itself before it measures."""

    def point(self, concurrency: int) -> tuple[Point, tuple[int, int]]:
        wanted = self._wanted
        order = vllm_bench.Order(
            url=self._url,
            model=self._served.name,
            tokenizer=self._served.root,
            input_tokens=wanted.input_tokens,
            output_tokens=wanted.output_tokens,
            requests=wanted.requests_at(concurrency),
            concurrency=concurrency,
            seed=(wanted.seed + concurrency) % 2**31,
        )
        text = _run_here(order) if self._container is None else _run_inside(order, self._container)
        return vllm_bench.point_of(text, order), vllm_bench.tokens_of(text)


def _run_here(order: vllm_bench.Order) -> str:
    with tempfile.TemporaryDirectory(prefix="duopack-bench-") as directory:
        words = vllm_bench.command(order, directory=directory, file="result.json")
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_SETTLE_SECONDS, check=False
        )
        result = Path(directory, "result.json")
        if done.returncode or not result.is_file():
            raise _failed(done.returncode, done.stdout)
        return result.read_text()


def _run_inside(order: vllm_bench.Order, container: Container) -> str:
    from pipeline.serving.container import engine_errors

    file = f"duopack-bench-{order.seed}.json"

    def run(*words: str) -> bytes:
        code, output = container.exec_run(list(words))
        said = output if isinstance(output, bytes) else b"".join(output)
        if code:
            raise _failed(code, said)
        return said

    with engine_errors(str(container.name)):
        run(*vllm_bench.command(order, directory="/tmp", file=file))
        text = run("cat", f"/tmp/{file}")
        run("rm", "-f", f"/tmp/{file}")
    return text.decode("utf-8", "replace")


def _failed(code: int, output: bytes) -> DuopackError:
    lines = [line for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    return DuopackError(
        f"'vllm bench serve' ended with {code}: {quoted(' | '.join(lines[-3:]), 600)}",
        mend="measure with duopack's own load: --with own",
    )


def inner_url(url: str, container: Container) -> str:
    """The server's address as it is inside of its container, from the ports that the engine maps."""
    port = urlsplit(url).port or 80
    ports = (container.attrs.get("NetworkSettings") or {}).get("Ports") or {}
    for inner, bindings in ports.items():
        if any(str(one.get("HostPort")) == str(port) for one in bindings or ()):
            return f"http://127.0.0.1:{inner.partition('/')[0]}"
    return f"http://127.0.0.1:{port}"
