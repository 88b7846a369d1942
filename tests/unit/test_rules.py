"""The rules about versions and the chip, each with a case where it applies and one where it does not."""

from __future__ import annotations

from typing import Any

import pytest
from support.launching import NEW_BASE, OLD_BASE, model, profile, sharded_model

from pipeline.ascend.rules import RULES, Severity, judge
from pipeline.catalog.schema import Architecture, Base, Model, Quantization

MIDDLE_BASE = OLD_BASE.model_copy(update={"vllm": "0.21.0", "vllm_ascend": "0.21.0rc1"})
MOE = Architecture.QWEN3_5_MOE
QWEN3 = Architecture.QWEN3


def ids(subject: Model, base: Base = OLD_BASE) -> set[str]:
    (one,) = subject.profiles.values()
    return {finding.id for finding in judge(subject, one, base)}


def of(architecture: Architecture = Architecture.QWEN3_5, **changes: Any) -> Model:
    kind = changes.pop("quantization", Quantization.FLOAT)
    limit = changes.pop("max_positions", 262144)
    return model(profile(**changes), architecture=architecture, quantization=kind, max_positions=limit)


CASES = [
    ("capture-sizes-tp", of(capture_sizes=(1, 2, 4)), of(capture_sizes=(1, 2, 4), tensor_parallel=1)),
    ("capture-sizes-tp", of(capture_sizes=(1, 2, 4)), of(capture_sizes=(1, 2, 4), cudagraph_mode="NONE")),
    ("capture-sizes-none", of(capture_sizes=()), of(capture_sizes=(), cudagraph_mode="NONE")),
    ("capture-sizes-idle", of(capture_sizes=(1, 16)), of(capture_sizes=(1, 8))),
    ("capture-sizes-eager", of(capture_sizes=(1, 4)), of(capture_sizes=(1, 8))),
    ("graph-precision", of(), of(cudagraph_mode="NONE")),
    ("launch-blocking", of(env={"ASCEND_LAUNCH_BLOCKING": "1"}), of(env={"ASCEND_LAUNCH_BLOCKING": "0"})),
    ("w8a8sc-sharded", of(QWEN3, quantization=Quantization.W8A8SC), sharded_model()),
    ("sharded-other-tp", sharded_model(tensor_parallel=4), sharded_model()),
    (
        "sharded-options",
        sharded_model(args=("--limit-mm-per-prompt", "{}")),
        of(args=("--limit-mm-per-prompt", "{}")),
    ),
    ("moe-sharded-sc", of(MOE, quantization=Quantization.W8A8SC), sharded_model()),
    ("moe-dynamic", of(MOE, quantization=Quantization.W8A8), of(MOE, quantization=Quantization.W8A8_DYNAMIC)),
    ("bfloat16", of(args=("--kv-cache-dtype", "bfloat16")), of(args=("--kv-cache-dtype", "auto"))),
    ("bfloat16", of(args=("--kv_cache_dtype=bfloat16",)), of(args=("--tokenizer", "bfloat16"))),
    (
        "mamba-on-transformer",
        of(QWEN3, args=("--mamba-cache-mode", "align")),
        of(args=("--mamba-cache-mode", "align")),
    ),
    ("mamba-cache-mode", of(args=("--mamba_cache_mode", "all")), of(args=("--mamba-cache-mode", "align"))),
    ("hybrid-prefix-chunked", of(chunked_prefill=False), of(chunked_prefill=False, prefix_caching=False)),
    ("hybrid-prefix-chunked", of(chunked_prefill=False), of(QWEN3, chunked_prefill=False)),
    ("qwen3.5-base", of(), of(QWEN3)),
    ("attention-mask", of(max_model_len=53248), of(max_model_len=16384)),
    ("model-len-limit", of(max_positions=8192), of()),
    ("batched-tokens", of(max_num_batched_tokens=256, max_num_seqs=300), of(max_num_batched_tokens=256)),
    (
        "batched-tokens",
        of(max_num_batched_tokens=4096, chunked_prefill=False),
        of(max_num_batched_tokens=16384, chunked_prefill=False),
    ),
    ("speculative-unsupported", of(args=("--speculative_config", "{}")), of(args=("--seed", "1"))),
    ("speculative-unsupported", of(args=("--speculative-config.method", "mtp")), of()),
    ("no-lora-no-transfer", of(args=("--enable-lora",)), of()),
    ("hccl-expansion", of(env={"HCCL_OP_EXPANSION_MODE": "AIV"}), of(env={"HCCL_OP_EXPANSION_MODE": "HOST"})),
    ("hccl-ai-cpu-graphs", of(env={"HCCL_OP_EXPANSION_MODE": "AI_CPU"}), of()),
    (
        "allocator",
        of(env={"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:256"}),
        of(env={"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:256"}),
    ),
    ("visible-devices", of(env={"ASCEND_RT_VISIBLE_DEVICES": "2,3"}), of()),
    ("env-reserved", of(env={"PORT": "1"}), of(env={"VLLM_PORT": "1"})),
    ("env-reserved", of(env={"EUID": "1"}), of(env={"DUO": "1"})),
    ("args-repeat", of(args=("-tp", "4")), of(args=("--seed", "4"))),
    ("args-repeat", of(args=("--max_model_len=4",)), of()),
    ("args-repeat", of(args=("--additional-config", "{}")), of()),
    ("media-path-root", of(media_path="/"), of(media_path="/media")),
    ("media-path-root", of(media_path="//./"), of()),
    ("secret-in-image", of(env={"HF_TOKEN": "x"}), of(env={"MAX_TOKENS": "x"})),
    ("secret-in-image", of(args=("--api_key", "x")), of()),
]


@pytest.mark.parametrize(
    ("rule", "bad", "good"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)]
)
def test_a_rule_applies_where_it_should_and_only_there(rule: str, bad: Model, good: Model) -> None:
    assert rule in ids(bad)
    assert rule not in ids(good)


@pytest.mark.parametrize(
    ("rule", "subject", "old", "middle", "new"),
    [
        ("graph-precision", of(), True, False, False),
        ("qwen3.5-base", of(), True, True, False),
        ("attention-mask", of(max_model_len=53248), True, False, False),
        ("speculative-unsupported", of(args=("--speculative-config", "{}")), True, False, False),
        ("speculative-young", of(args=("--speculative-config", "{}")), False, True, True),
        ("args-repeat", of(args=("--additional-config", "{}")), True, True, False),
    ],
)
def test_a_rule_knows_the_versions_it_is_about(
    rule: str, subject: Model, old: bool, middle: bool, new: bool
) -> None:
    assert [rule in ids(subject, base) for base in (OLD_BASE, MIDDLE_BASE, NEW_BASE)] == [old, middle, new]


def test_every_rule_has_a_case_here() -> None:
    assert {rule.id for rule in RULES} == {case[0] for case in CASES} | {"speculative-young"}


def test_rules_have_ids_of_their_own_and_say_all_that_a_person_needs() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.consequence
        assert rule.mend
        assert rule.source
        assert not rule.consequence.endswith(".")


def test_the_mask_is_told_in_gib() -> None:
    subject = of(max_model_len=53248)
    (finding,) = (
        one for one in judge(subject, subject.profiles["n9"], OLD_BASE) if one.id == "attention-mask"
    )
    assert "5.3 GiB" in finding.sentence


def test_errors_come_first() -> None:
    subject = of(capture_sizes=(1, 2, 4, 16), media_path="/", max_model_len=53248)
    severities = [finding.severity for finding in judge(subject, subject.profiles["n9"], OLD_BASE)]
    assert severities == sorted(severities, key=list(Severity).index)
    assert {Severity.ERROR, Severity.WARNING} <= set(severities)
