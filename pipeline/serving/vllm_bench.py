"""`vllm bench serve` of vLLM 0.20.2: its command, and what its result file says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import DuopackError, quoted
from pipeline.serving.benchmark import Point, Spread


@dataclass(frozen=True)
class Order:
    """What is to be measured: `requests` prompts of so many tokens, `concurrency` at a time."""

    url: str
    model: str
    tokenizer: str
    input_tokens: int
    output_tokens: int
    requests: int
    concurrency: int
    seed: int


def command(order: Order, *, directory: str, file: str, vllm: str = "vllm") -> list[str]:
    """The words of the command; the result is written to `file` in `directory`."""
    options = {
        "--backend": "openai",
        "--base-url": order.url,
        "--endpoint": "/v1/completions",
        "--model": order.model,
        "--served-model-name": order.model,
        "--tokenizer": order.tokenizer,
        "--dataset-name": "random",
        "--random-input-len": order.input_tokens,
        "--random-output-len": order.output_tokens,
        "--num-prompts": order.requests,
        "--max-concurrency": order.concurrency,
        "--seed": order.seed,
        "--temperature": 0,
        "--percentile-metrics": "ttft,tpot",
        "--metric-percentiles": "50,90,99",
        "--result-dir": directory,
        "--result-filename": file,
    }
    words = [word for name, value in options.items() for word in (name, str(value))]
    return [vllm, "bench", "serve", *words, "--ignore-eos", "--save-result", "--disable-tqdm"]


def tokens_of(text: str) -> tuple[int, int]:
    """Tokens read and made, as the result file counts them. Raises DuopackError when it is none."""
    value = _result(text)
    return int(value.get("total_input_tokens") or 0), int(value.get("total_output_tokens") or 0)


def point_of(text: str, order: Order) -> Point:
    """The point that a result file describes. Raises DuopackError when it is none."""
    value = _result(text)
    try:
        failed = int(value.get("failed", order.requests - int(value["completed"])))
        return Point(
            concurrency=order.concurrency,
            requests=int(value["completed"]),
            failed=failed,
            seconds=round(float(value["duration"]), 3),
            output_throughput=round(float(value["output_throughput"]), 2),
            total_throughput=round(float(value["total_token_throughput"]), 2),
            ttft=_spread(value, "ttft"),
            tpot=_spread(value, "tpot"),
            errors=tuple(dict.fromkeys(quoted(str(one)) for one in value.get("errors", ()) if one))[:3],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(f"{type(error).__name__} {error}") from error


def _result(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged("no JSON") from error
    if not isinstance(value, dict):
        raise _damaged("no object")
    return value


def _spread(value: Mapping[str, Any], name: str) -> Spread | None:
    if not value["completed"]:
        return None
    return Spread(
        round(float(value[f"mean_{name}_ms"]), 3),
        *(round(float(value[f"p{percent}_{name}_ms"]), 3) for percent in (50, 90, 99)),
    )


def _damaged(what: str) -> DuopackError:
    return DuopackError(
        f"the result of 'vllm bench serve' cannot be read: {quoted(what)}",
        mend="measure with duopack's own load: --with own",
    )
