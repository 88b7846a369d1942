"""What a vllm-ascend version can do on 310P, as data: for `duopack bases`, and for whoever chooses a base.

In a source, `#N` is issue or pull request N of vllm-project/vllm-ascend.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pipeline.ascend.rules.rule import Bases


class Verdict(StrEnum):
    """Yes: works. Limited: works with a limit that the sentence names. No: does not work, or is not supported."""

    YES = "yes"
    LIMITED = "limited"
    NO = "no"


@dataclass(frozen=True)
class Ability:
    """One thing that versions differ in."""

    id: str
    bases: Bases
    verdict: Verdict
    sentence: str
    source: str


ABILITIES = (
    Ability(
        "qwen3.5",
        Bases(before="0.23.0rc1"),
        Verdict.LIMITED,
        "Qwen3.5 runs, but the 300I Duo is outside what upstream supports it on",
        "vllm-ascend's support page for 310P",
    ),
    Ability(
        "qwen3.5",
        Bases(since="0.23.0rc1"),
        Verdict.YES,
        "Qwen3.5 on the 300I Duo is supported by upstream, from this version on",
        "vllm-ascend's support page for 310P",
    ),
    Ability(
        "graphs",
        Bases(before="0.21.0rc1"),
        Verdict.LIMITED,
        "graph mode lacks two precision fixes: text may be garbled with FULL_DECODE_ONLY",
        "#9727, #9720",
    ),
    Ability(
        "graphs",
        Bases(since="0.21.0rc1"),
        Verdict.YES,
        "graph mode has the precision fixes",
        "#9727, #9720",
    ),
    Ability(
        "attention-mask",
        Bases(before="0.21.0rc1"),
        Verdict.LIMITED,
        "the attention mask is max_model_len squared in fp16, up to two copies a rank: 5.3 GiB each at 53248",
        "vllm-ascend's attention mask before 0.21.0rc1",
    ),
    Ability(
        "attention-mask",
        Bases(since="0.21.0rc1"),
        Verdict.YES,
        "the attention mask is a compressed one of 2048 with a newer torch_npu and CANN",
        "vllm-ascend's attention mask from 0.21.0rc1 on",
    ),
    Ability(
        "mtp",
        Bases(before="0.21.0rc1"),
        Verdict.NO,
        "speculative decoding with MTP ends the engine at the first request",
        "#7394",
    ),
    Ability(
        "mtp",
        Bases(since="0.21.0rc1", before="0.23.0rc1"),
        Verdict.LIMITED,
        "speculative decoding with MTP is new, and has known faults",
        "#10309, #10640",
    ),
    Ability(
        "mtp",
        Bases(since="0.23.0rc1"),
        Verdict.LIMITED,
        "speculative decoding with MTP works for Qwen3.5 and Qwen3.6; wrong text has been reported",
        "#16979",
    ),
    Ability(
        "fusions",
        Bases(before="0.23.0rc1"),
        Verdict.LIMITED,
        "fuse_norm_quant and enable_npugraph_ex have to be switched off: the start scripts do it",
        "vllm-ascend's notes on 310P",
    ),
    Ability(
        "fusions",
        Bases(since="0.23.0rc1"),
        Verdict.YES,
        "what 310P cannot fuse is switched off by itself",
        "vllm-ascend's notes on 310P",
    ),
    Ability(
        "linear-attention",
        Bases(before="0.21.0rc1"),
        Verdict.LIMITED,
        "linear attention (Qwen3.5) runs in torch, slower than an operator of its own",
        "vllm-ascend's chunk_gated_delta_rule",
    ),
    Ability(
        "linear-attention",
        Bases(since="0.23.0rc1"),
        Verdict.YES,
        "linear attention (Qwen3.5) has an AscendC operator",
        "vllm-ascend's chunk_gated_delta_rule",
    ),
)


def abilities(vllm_ascend: str) -> tuple[Ability, ...]:
    """What is known of a version. Raises DuopackError for a text that is no version."""
    return tuple(one for one in ABILITIES if one.bases.have(vllm_ascend))
