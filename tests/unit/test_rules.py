"""The rules about versions and the chip, each with a case where it applies and one where it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.launching import NEW_BASE, OLD_BASE, model, profile, sharded_model

from pipeline.ascend.docker_line import read_docker_line
from pipeline.ascend.rules import (
    CONTAINER_RULES,
    DERIVED_RULES,
    RULES,
    Case,
    Severity,
    judge,
    judge_case,
    judge_container,
    judge_text,
)
from pipeline.ascend.rules.container import ContainerCase, names_agree
from pipeline.ascend.rules.page import as_rows, rules_page
from pipeline.ascend.serve_line import ServeLine, read_line
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


# --- Commands that somebody wrote --------------------------------------------------------------------------

GOOD = """/models/Qwen3.5-9B --host 0.0.0.0 --port 12320 -tp 2 --served-model-name qwen3.5-9b --max_num_seqs 8
 --gpu_memory_utilization 0.6
 --additional-config {"ascend_compilation_config":{"fuse_norm_quant":false,"enable_npugraph_ex":false}}
 --dtype float16 --compilation-config {"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[1,8]}
 --mamba-ssm-cache-dtype float16 --mamba-cache-mode align --enable-prefix-caching --max-model-len 16384"""
ENV = {
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "OMP_PROC_BIND": "false",
    "OMP_NUM_THREADS": "1",
    "TASK_QUEUE_ENABLE": "1",
    "HCCL_BUFFSIZE": "512",
}
HYBRID = of()
PLAIN = of(QWEN3, max_positions=40960)
QUANTIZED = of(quantization=Quantization.W8A8)


def line(*more: str, without: str = "", path: str | None = None, **env: str) -> ServeLine:
    words = [*GOOD.split(), *more]
    words[0] = path or words[0]
    made = read_line(words, {**ENV, **env}, "0.20.2")
    return made.without(*without.split()) if without else made


def found(one: ServeLine, model: Model = HYBRID, base: Base = OLD_BASE) -> set[str]:
    return {finding.id for finding in judge_case(Case(model, one, base))}


SIZES = "--compilation-config.cudagraph_capture_sizes"
MODE = "--compilation-config.cudagraph_mode"
# The rule, a line that it speaks of, the model, and the text that --fix puts ("no …": removes; "": it cannot).
WRITTEN: list[tuple[str, ServeLine, Model, str]] = [
    ("capture-sizes-tp", line(SIZES, "[1,2,8,16]"), HYBRID, '"cudagraph_capture_sizes": [1, 8]'),
    ("capture-sizes-none", line("--compilation-config", '{"cudagraph_mode":"PIECEWISE"}'), HYBRID, "[1, 8]"),
    (
        "graph-mode",
        line("--compilation-config", '{"cudagraph_capture_sizes":[1]}'),
        HYBRID,
        "FULL_DECODE_ONLY",
    ),
    ("graph-mode-downgraded", line(MODE, "FULL_AND_PIECEWISE"), HYBRID, "FULL_DECODE_ONLY"),
    ("launch-blocking", line(ASCEND_LAUNCH_BLOCKING="1"), HYBRID, "no ASCEND_LAUNCH_BLOCKING"),
    ("mamba-on-transformer", line(), PLAIN, "no --mamba-cache-mode"),
    ("mamba-cache-mode", line("--mamba-cache-mode", "all"), HYBRID, "--mamba-cache-mode align"),
    ("mamba-cache-mode-open", line(without="--mamba-cache-mode"), HYBRID, "--mamba-cache-mode align"),
    ("mamba-state-dtype", line(without="--mamba-ssm-cache-dtype"), HYBRID, "--mamba-ssm-cache-dtype float16"),
    (
        "mamba-state-dtype",
        line("--mamba-ssm-cache-dtype", "float32"),
        HYBRID,
        "--mamba-ssm-cache-dtype float16",
    ),
    ("hybrid-prefix-chunked", line("--no-enable-chunked-prefill"), HYBRID, " --enable-chunked-prefill"),
    ("attention-mask-chip", line(without="--max-model-len"), HYBRID, "--max-model-len 16384"),
    ("model-len-unallowed", line("--max-model-len", "53248"), PLAIN, "--max-model-len 40960"),
    ("batched-tokens", line("--max-num-batched-tokens", "4"), HYBRID, "no --max-num-batched-tokens"),
    ("seqs-default", line(without="--max-num-seqs"), HYBRID, "--max-num-seqs 8"),
    ("number-form", line("--max-model-len", "16 thousand"), HYBRID, ""),
    ("number-form", line("--port", "0"), HYBRID, ""),
    ("tensor-parallel", line("--tensor-parallel-size=3"), HYBRID, ""),
    ("utilization", line("--gpu-memory-utilization", "60"), HYBRID, ""),
    ("utilization", line("--gpu-memory-utilization", "nan"), HYBRID, ""),
    (
        "speculative-unsupported",
        line("--speculative-config", '{"method":"mtp"}'),
        HYBRID,
        "no --speculative-config",
    ),
    ("no-lora-no-transfer", line("--enable-lora"), HYBRID, "no --enable-lora"),
    ("w8a8sc-sharded", line(path="/models/Q/TP2/Q-tp2"), HYBRID, "--load-format sharded_state"),
    (
        "sharded-other-tp",
        line("--load-format", "sharded_state", path="/m/Q-tp4"),
        HYBRID,
        "--tensor-parallel-size 4",
    ),
    ("moe-expert-parallel", line("--enable-expert-parallel"), of(MOE), "no --enable-expert-parallel"),
    ("other-chips", line(path="/models/Qwen3.5-9B-W8A8-A2"), QUANTIZED, ""),
    ("quantization-option", line("--quantization", "ascend"), HYBRID, "no --quantization"),
    ("quantization-option", line("-q", "awq"), QUANTIZED, "no --quantization"),
    ("bfloat16", line("--dtype", "bfloat16"), HYBRID, "--dtype float16"),
    ("dtype", line(without="--dtype"), HYBRID, "--dtype float16"),
    ("dtype", line("--dtype", "auto"), HYBRID, "--dtype float16"),
    ("hccl-expansion", line(HCCL_OP_EXPANSION_MODE="AIV"), HYBRID, "HCCL_OP_EXPANSION_MODE=HOST"),
    ("hccl-ai-cpu-graphs", line(HCCL_OP_EXPANSION_MODE="AI_CPU"), HYBRID, "HCCL_OP_EXPANSION_MODE=HOST"),
    ("omp-threads", line(OMP_NUM_THREADS="8"), HYBRID, "OMP_NUM_THREADS=1"),
    ("hccl-buffer", line(HCCL_BUFFSIZE="64"), HYBRID, "HCCL_BUFFSIZE=512"),
    (
        "allocator",
        line(PYTORCH_NPU_ALLOC_CONF="expandable_segments:True,max_split_size_mb:256"),
        HYBRID,
        "no max_split_size_mb",
    ),
    ("fuse-norm-quant", line(without="--additional-config"), HYBRID, '"fuse_norm_quant": false'),
    (
        "npugraph-ex",
        line("--additional-config", '{"ascend_compilation_config":{"fuse_norm_quant":false},"x":1}'),
        HYBRID,
        '"x": 1',
    ),
    (
        "visible-devices-logical",
        line(ASCEND_RT_VISIBLE_DEVICES="2,3"),
        HYBRID,
        "no ASCEND_RT_VISIBLE_DEVICES",
    ),
    ("media-path-root", line("--allowed-local-media-path", "//"), HYBRID, "no --allowed-local-media-path"),
    ("trust-remote-code", line("--trust-remote-code"), HYBRID, "no --trust-remote-code"),
    ("secret-in-image", line("--api-key", "x"), HYBRID, ""),
    ("served-name-missing", line(without="--served-model-name"), HYBRID, ""),
    ("served-name-other", line("--served-model-name", "qwen3.5-27b"), HYBRID, ""),
    ("port", line("--port", "80"), HYBRID, ""),
    ("host-loopback", line("--host", "127.0.0.1"), HYBRID, "--host 0.0.0.0"),
    ("tool-parser-missing", line("--enable-auto-tool-choice"), HYBRID, "--tool-call-parser qwen3_coder"),
]
VERSIONS_OWN = {"graph-precision", "qwen3.5-base"}


def test_a_good_line_has_nothing_but_what_its_base_has() -> None:
    assert found(line()) == VERSIONS_OWN
    assert found(line(), base=NEW_BASE) == set()
    assert found(line(ASCEND_RT_VISIBLE_DEVICES="0,1")) == VERSIONS_OWN


@pytest.mark.parametrize(
    ("rule", "bad", "subject", "fixed"), WRITTEN, ids=[f"{n}-{case[0]}" for n, case in enumerate(WRITTEN)]
)
def test_a_written_line_is_judged_and_corrected(
    rule: str, bad: ServeLine, subject: Model, fixed: str
) -> None:
    assert rule in found(bad, subject)
    (entry,) = (one for one in RULES if one.id == rule)
    assert bool(entry.fix) == bool(fixed)
    if not entry.fix:
        return
    made = entry.fix(Case(subject, bad, OLD_BASE))
    assert isinstance(made, ServeLine)
    assert rule not in found(made, subject)
    absent, text = fixed.startswith("no "), fixed.removeprefix("no ")
    assert (text in made.text()) != absent


def test_missing_variables_are_told_and_given() -> None:
    bare = line()
    bare = bare.without_env("OMP_NUM_THREADS", "HCCL_BUFFSIZE")
    (finding,) = (one for one in judge_case(Case(HYBRID, bare, OLD_BASE)) if one.id == "environment")
    assert "OMP_NUM_THREADS, HCCL_BUFFSIZE not set" in finding.sentence


# --- Containers --------------------------------------------------------------------------------------------

RUN = """-d --name vllm-ascend-qwen3.5-9b --device /dev/davinci2 --device=/dev/davinci3 --device /dev/davinci_manager
 --device /dev/hisi_hdc --device /dev/devmm_svm -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro -p 12322:12320
 --shm-size=10g --restart unless-stopped"""
IMAGE = "registry.example/qwen3.5-9b:1"


def container(
    *more: str, without: str = "", image: str = IMAGE, command: str = "", **case: Any
) -> ContainerCase:
    docker = read_docker_line([*RUN.split(), *more, image, *command.split()])
    for name in without.split():
        docker = docker.without(name)
    return ContainerCase(docker, case.get("serve", line()), case.get("others", ()))


UPSTREAM = "quay.io/ascend/vllm-ascend:v0.20.2rc1-310p-openeuler"
CONTAINERS: list[tuple[str, ContainerCase]] = [
    ("container-logical-ids", container("-e", "ASCEND_RT_VISIBLE_DEVICES=2,3")),
    ("container-no-chips", container(without="--device")),
    ("container-managers", ContainerCase(read_docker_line(["--device", "/dev/davinci0", IMAGE]))),
    ("container-driver", container(without="--volume")),
    ("container-runtime-choice", container("--runtime=ascend")),
    ("container-chip-count", container(serve=line("-tp", "4"))),
    (
        "container-chip-shared",
        container(others=[read_docker_line(["--device=/dev/davinci3:/dev/davinci3", IMAGE])]),
    ),
    ("container-port-shared", container(others=[read_docker_line(["-p127.0.0.1:12322:80", IMAGE])])),
    ("container-port", container(serve=line("--port", "8000"))),
    ("container-shell", container(command="bash")),
    ("container-base-alone", container(image=UPSTREAM)),
    ("container-name", container("--name", "vllm-ascend-qwen3")),
    ("container-shm", container(without="--shm-size")),
    ("container-privileged", container("--privileged")),
    ("container-restart", container(without="--restart")),
]


def test_a_good_container_has_no_finding() -> None:
    assert judge_container(container(), "0.20.2rc1") == ()
    assert judge_container(container("-v", "/data/models:/models:ro", image=UPSTREAM), "0.20.2rc1") == ()
    runtime = [
        "--runtime=ascend",
        "-e",
        "ASCEND_VISIBLE_DEVICES=2,3",
        "--name",
        "x-qwen3.5-9b",
        "--shm-size",
        "1g",
    ]
    assert judge_container(ContainerCase(read_docker_line([*runtime, IMAGE]), line()), "0.20.2rc1") == ()


@pytest.mark.parametrize(("rule", "bad"), CONTAINERS, ids=[case[0] for case in CONTAINERS])
def test_a_container_is_judged_and_corrected(rule: str, bad: ContainerCase) -> None:
    assert rule in {one.id for one in judge_container(bad, "0.20.2rc1")}
    (entry,) = (one for one in CONTAINER_RULES if one.id == rule)
    if entry.fix:
        made = entry.fix(bad)
        again = ContainerCase(made, bad.serve, bad.others)  # type: ignore[arg-type]
        assert rule not in {one.id for one in judge_container(again, "0.20.2rc1")}


def test_host_ids_in_the_variable_are_taken_for_the_chips_that_were_meant() -> None:
    (entry,) = (one for one in CONTAINER_RULES if one.id == "container-logical-ids")
    guide = read_docker_line(
        ["--device", "/dev/davinci0", "--device", "/dev/davinci1", "-e", "ASCEND_RT_VISIBLE_DEVICES=2,3", "i"]
    )
    assert entry.fix
    made = entry.fix(ContainerCase(guide))
    assert made.chips == (2, 3)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("container_name", "served", "agree"),
    [
        ("vllm-ascend-qwen3.5-9b", "qwen3.5-9b", True),
        ("qwen3.5-9b", "Qwen3.5-9B", True),
        ("vllm_qwen3.5-9b_2", "qwen3.5-9b", True),
        ("vllm-ascend-qwen3", "qwen3.5-27b", False),
        ("vllm-ascend-qwen3.5", "qwen3.5-9b", False),
        ("vllm-ascend-qwen3.5-9b-w8a8x", "qwen3.5-9b-w8a8", False),
    ],
)
def test_a_name_agrees_when_it_says_what_is_served(container_name: str, served: str, agree: bool) -> None:
    assert names_agree(container_name, served) == agree


# --- Derived images ----------------------------------------------------------------------------------------

BASE_NAME = "quay.io/ascend/vllm-ascend:v0.20.2rc1-310p-openeuler"
DERIVED = [
    (
        "derived-triton",
        "RUN pip install -U triton-ascend==3.2.0",
        "RUN pip uninstall -y triton triton-ascend",
    ),
    ("derived-triton", "pip3 install \\\n  numpy triton", "# pip install triton\npip install numpy"),
    ("derived-triton", "pip install https://x/triton-3.1-cp311.whl", "pip install tritonclient"),
    ("derived-pins", "RUN pip install 'transformers>=5.6'", "RUN pip install msmodelslim==26.1.0"),
    ("derived-pins", "uv pip install torch==2.11", "uv pip install torchvision"),
    ("derived-upstream-name", f"docker commit vllm {BASE_NAME}", f"docker pull {BASE_NAME}"),
    ("derived-upstream-name", f"docker build -f x -t {BASE_NAME} .", "docker build -t me/vllm-ascend:1 ."),
    (
        "derived-upstream-name",
        f"docker tag mine {BASE_NAME}",
        f"docker tag {BASE_NAME} registry.example/mine:1",
    ),
]


@pytest.mark.parametrize(
    ("rule", "bad", "good"), DERIVED, ids=[f"{n}-{case[0]}" for n, case in enumerate(DERIVED)]
)
def test_what_a_script_does_to_an_image_is_judged(rule: str, bad: str, good: str) -> None:
    assert [one.id for one in judge_text(f"FROM {BASE_NAME}\n{bad}\n", "0.20.2rc1")] == [rule]
    assert judge_text(f"FROM {BASE_NAME}\n{good}\n", "0.20.2rc1") == ()


# --- The data ----------------------------------------------------------------------------------------------


def test_every_rule_has_a_case_here() -> None:
    tried = {case[0] for case in CASES} | {case[0] for case in WRITTEN} | {"speculative-young", "environment"}
    assert {rule.id for rule in RULES} == tried
    assert {rule.id for rule in CONTAINER_RULES} == {case[0] for case in CONTAINERS}
    assert {rule.id for rule in DERIVED_RULES} == {case[0] for case in DERIVED}


def test_the_page_of_rules_is_the_data_s() -> None:
    page = Path(__file__).resolve().parents[2] / "docs/rules.md"
    assert page.read_text() == rules_page(), "duopack rules > docs/rules.md"
    assert {row["id"] for row in as_rows()} == {
        rule.id for rule in (*RULES, *CONTAINER_RULES, *DERIVED_RULES)
    }


def test_rules_have_ids_of_their_own_and_say_all_that_a_person_needs() -> None:
    rules = (*RULES, *CONTAINER_RULES, *DERIVED_RULES)
    assert len({rule.id for rule in rules}) == len(rules)
    for rule in rules:
        assert rule.looks_at
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
