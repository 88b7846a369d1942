"""The memory budget: exact bytes of real dimensions, headers alone from disk and hub, and what comes of the sum."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.checkpoints import size_of, tensors_of, write_checkpoint
from support.hub import FaultyHub, isolate_clients

from pipeline.ascend.budget import GIB, Budget, Demand, Options, make_budget
from pipeline.ascend.rules.limits import CHIP
from pipeline.catalog.load import load_catalog
from pipeline.catalog.schema import Catalog
from pipeline.cli import main
from pipeline.demo.model import Variant, make_model, make_qwen3
from pipeline.errors import DuopackError
from pipeline.hubs.huggingface import HuggingFace
from pipeline.hubs.modelscope import ModelScope
from pipeline.hubs.remote import take_range
from pipeline.reports.bars import Stack, svg_bars, text_bar
from pipeline.reports.progress import open_progress
from pipeline.stages.budget import GUIDE_TABLE
from pipeline.stages.shard import shard
from pipeline.weights.cache import serving_shape
from pipeline.weights.footprint import checkpoint_footprint, planned_footprint, shards_footprint
from pipeline.weights.known import known_config, usual_quantization
from pipeline.weights.safetensors import read_header
from pipeline.weights.shards.config import Config, read_config
from pipeline.weights.shards.plans import plan_model
from pipeline.weights.shards.quantization import FLOAT, Quantization, read_quantization

ROOT = Path(__file__).resolve().parents[2]

# The published checkpoints' bytes of weights, MTP and vision included.
PUBLISHED = {
    "Qwen3.5-0.8B": 1_746_882_752,
    "Qwen3.5-9B": 19_306_216_416,
    "Qwen3.5-27B": 55_562_872_800,
    "Qwen3.5-35B-A3B": 71_903_655_008,
    "Qwen3-4B-Instruct-2507": 8_044_936_192,
}
NONE = Quantization(None, FLOAT, "")


def known(name: str) -> Config:
    config = known_config(name)
    assert config
    return config


# --- Exact bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_known_dimensions_give_the_published_sizes_to_the_byte(name: str) -> None:
    assert size_of(tensors_of(known(name))) == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_on_one_chip_it_is_the_checkpoint_without_mtp_and_with_vllm_s_own_scales(name: str) -> None:
    config = known(name)
    found = planned_footprint(plan_model(config, NONE, 1, "310p"))
    tensors = tensors_of(config, mtp=False)
    # The norm of linear attention is float32 at the hub and float16 in vLLM.
    halved = sum(
        shape[0] * 2 for tensor, (_, shape) in tensors.items() if tensor.endswith("linear_attn.norm.weight")
    )
    assert found.total - found.added == size_of(tensors) - halved
    assert found.added == 16 * serving_shape(config, 1).full_layers


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_split_shared_and_whole_adds_up_to_the_model(name: str, ranks: int) -> None:
    config = known(name)
    whole, one = (planned_footprint(plan_model(config, NONE, count, "310p")) for count in (1, ranks))
    text = config.section("text_config") if "text_config" in config.values else config
    owners = min(ranks, text.natural("num_key_value_heads"))
    assert ranks * one.split + owners * one.shared + one.replicated + one.added == whole.total
    assert bool(one.shared) == (owners < ranks)


def test_the_real_headers_of_a_9b_say_the_same(tmp_path: Path) -> None:
    config = known("Qwen3.5-9B")
    write_checkpoint(tmp_path, config, tensors_of(config), files=4)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    plan = plan_model(read_config(tmp_path), NONE, 2, "310p")
    assert checkpoint_footprint(plan, tmp_path, names) == planned_footprint(plan)


def test_weights_of_other_dimensions_are_refused(tmp_path: Path) -> None:
    config, other = known("Qwen3.5-2B"), known("Qwen3.5-4B")
    write_checkpoint(tmp_path, config, tensors_of(other))
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    with pytest.raises(DuopackError, match=r"config\.json"):
        checkpoint_footprint(plan_model(config, NONE, 1, "310p"), tmp_path, names)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3.5-tied", "qwen3", "moe"])
def test_it_is_what_the_shards_of_a_rank_really_hold(kind: str, ranks: int, tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "shards"
    if kind == "qwen3":
        make_qwen3(source)
    else:
        make_model(source, variant=Variant(tied=kind.endswith("tied"), experts=4 if kind == "moe" else 0))
    shard(source, target, open_progress(quiet=True), ranks=ranks)
    plan = plan_model(read_config(source), NONE, ranks, "310p")
    names = sorted(path.name for path in source.glob("*.safetensors"))
    held = sum(read_header(path).data_size for path in target.glob("model-rank-0-*"))
    assert checkpoint_footprint(plan, source, names).total == held
    shards = sorted(path.name for path in target.glob("*.safetensors"))
    assert shards_footprint(plan, target, shards).total == held
    with pytest.raises(DuopackError, match="ranks"):
        shards_footprint(
            plan_model(read_config(source), NONE, 8 if ranks == 1 else 1, "310p"), target, shards
        )


def test_a_quantized_checkpoint_counts_its_int8_and_its_scales(tmp_path: Path) -> None:
    config = known("Qwen3.5-2B-W8A8")
    quantization = usual_quantization(config, "w8a8")
    write_checkpoint(tmp_path, config, tensors_of(config, quantization), quantization)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    plan = plan_model(read_config(tmp_path), read_quantization(tmp_path), 1, "310p")
    found = checkpoint_footprint(plan, tmp_path, names)
    half = planned_footprint(plan_model(config, NONE, 1, "310p")).total
    linears = {
        name: shape for name, (dtype, shape) in tensors_of(config, quantization).items() if dtype == "I8"
    }
    weights = [shape for name, shape in linears.items() if name.endswith(".weight")]
    # Per channel: int32 bias, int64 and two float16 scales; per linear vLLM fuses, a float16 and an int8.
    expected = half - sum(rows * columns for rows, columns in weights) + sum(16 * rows for rows, _ in weights)
    assert 0 < found.total - expected < 3 * len(weights)


def test_the_recipes_leave_alone_what_310p_or_accuracy_wants_alone() -> None:
    dense = usual_quantization(known("Qwen3.5-27B"), "w8a8").types or {}
    layer = "model.language_model.layers"
    assert dense[f"{layer}.0.mlp.up_proj.weight"] == dense[f"{layer}.3.self_attn.o_proj.weight"] == "W8A8"
    assert dense[f"{layer}.0.linear_attn.in_proj_qkv.weight"] == dense["lm_head.weight"] == "FLOAT"
    assert {kind for name, kind in dense.items() if "visual" in name} == {"FLOAT"}
    moe = usual_quantization(known("Qwen3.5-35B-A3B"), "w8a8-dynamic").types or {}
    assert moe[f"{layer}.0.mlp.experts.7.up_proj.weight"] == "W8A8_DYNAMIC"
    assert (
        moe[f"{layer}.0.mlp.shared_expert.up_proj.weight"]
        == moe[f"{layer}.3.self_attn.o_proj.weight"]
        == "FLOAT"
    )


def test_a_model_is_known_by_the_longest_name_that_fits() -> None:
    assert known("qwen3.5-35B-A3B-w8a8").section("text_config").natural("num_experts") == 256
    assert known_config("Qwen3.5-9Bx") is None
    assert known_config("Llama-3") is None


# --- Caches ------------------------------------------------------------------------------------------------


def test_the_caches_of_a_9b() -> None:
    shape = serving_shape(known("Qwen3.5-9B"), 2)
    assert (shape.full_layers, shape.linear_layers) == (8, 24)
    assert shape.kv_per_token == 8 * 2 * 2 * 256 * 2
    assert shape.recurrent_state == 24 * 16 * 128 * 128
    assert shape.conv_state == 24 * (2 * 16 * 128 + 32 * 128) // 2 * 3 * 2


def test_fewer_kv_heads_than_chips_are_held_by_several() -> None:
    two, four = (serving_shape(known("Qwen3.5-35B-A3B"), ranks).kv_per_token for ranks in (2, 4))
    assert two == four == 10 * 2 * 1 * 256 * 2


def test_a_plain_transformer_has_no_state_and_caches_every_layer() -> None:
    shape = serving_shape(known("Qwen3-8B"), 2)
    assert (shape.kv_per_token, shape.conv_state, shape.recurrent_state) == (36 * 2 * 4 * 128 * 2, 0, 0)


# --- The sum -----------------------------------------------------------------------------------------------

DEMAND = Demand(9 * GIB, 16384, 100_000, 6_000_000, 4096, 12288, 248320)
ASKED = Options(ranks=2, max_model_len=16384, max_num_seqs=8, utilization=0.6, capture_sizes=(1, 4))


def size(budget: Budget, name: str) -> int:
    return next(part.size for part in budget.parts if part.name == name)


def test_the_cache_gets_half_of_what_is_left() -> None:
    budget = make_budget(DEMAND, ASKED, "0.20.2rc1")
    left = int(CHIP * 0.6) - 9 * GIB - size(budget, "activations")
    assert budget.kv_cache == left // 2 == size(budget, "KV cache and states")
    state = 100_000 + 6_000_000 * 2
    assert budget.state_per_sequence == state
    assert budget.kv_tokens == (left // 2 - 8 * state) // 16384
    assert budget.full_sequences == (left // 2) / (16384 * 16384 + state)
    assert budget.spare == CHIP - sum(part.size for part in budget.parts) > 0
    assert budget.fits
    assert not budget.advice


def test_the_mask_is_the_base_s() -> None:
    long = replace(ASKED, max_model_len=53248)
    assert size(make_budget(DEMAND, long, "0.20.2rc1"), "attention masks") == 2 * 53248**2 * 2
    assert size(make_budget(DEMAND, long, "0.21.0rc1"), "attention masks") == 2 * 2048**2 * 2


def test_one_chip_has_no_traffic_and_eager_no_graphs() -> None:
    budget = make_budget(DEMAND, replace(ASKED, ranks=1, capture_sizes=()), "0.23.0rc1")
    assert size(budget, "traffic between chips") == size(budget, "captured graphs") == 0


def test_estimates_are_named() -> None:
    named = {part.name for part in make_budget(DEMAND, ASKED, "0.20.2rc1").parts if part.estimate}
    assert named == {"activations", "captured graphs", "runtime"}


@pytest.mark.parametrize(
    ("demand", "options", "problem", "advice"),
    [
        (replace(DEMAND, weights=40 * GIB), ASKED, "weights and activations", None),
        (
            replace(DEMAND, weights=25 * GIB),
            replace(ASKED, max_model_len=16384),
            "vLLM refuses",
            "utilization",
        ),
        (
            DEMAND,
            replace(ASKED, max_model_len=98304, utilization=0.9),
            "out of memory after",
            "--max-model-len",
        ),
        (
            replace(DEMAND, weights=24 * GIB),
            replace(ASKED, max_num_seqs=80),
            "states of 80 sequences",
            "--max-num-seqs",
        ),
    ],
)
def test_what_does_not_fit_is_told_and_mended(
    demand: Demand, options: Options, problem: str, advice: str | None
) -> None:
    budget = make_budget(demand, options, "0.20.2rc1")
    assert not budget.fits
    assert problem in " ".join(budget.problems)
    assert (advice in " ".join(budget.advice)) if advice else not budget.advice


def test_each_advice_alone_is_enough() -> None:
    options = replace(ASKED, max_model_len=98304, utilization=0.9)
    flags = {
        "--max-model-len": "max_model_len",
        "--gpu-memory-utilization": "utilization",
        "--max-num-seqs": "max_num_seqs",
    }
    advice = make_budget(DEMAND, options, "0.20.2rc1").advice
    assert advice
    for one in advice:
        flag, value = one.split()
        number = float(value) if "." in value else int(value)
        assert make_budget(DEMAND, replace(options, **{flags[flag]: number}), "0.20.2rc1").fits


# --- The catalog -------------------------------------------------------------------------------------------

# Bytes of weights on one chip, tokens of the KV cache and MiB left: every model of the catalog, 1, 2 and 4 chips.
GOLDEN = json.loads((Path(__file__).parent / "data/budget.json").read_text())


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog(ROOT / "models.yaml")


def run(*arguments: str) -> int:
    return main(["budget", "--catalog", str(ROOT / "models.yaml"), *arguments])


def test_the_golden_table_has_every_model_of_the_catalog(catalog: Catalog) -> None:
    assert {key.partition("@")[0] for key in GOLDEN} == set(catalog.models)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_budgets_of_the_catalog_are_the_golden_ones(
    ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--offline", "--json", "--tp", str(ranks))
    rows = json.loads(capsys.readouterr().out)
    found = {
        f"{key}@{ranks}": [row["weights"]["total"], row["budget"]["kv_tokens"], row["budget"]["spare"] >> 20]
        for key, (row,) in rows.items()
    }
    assert found == {key: value for key, value in GOLDEN.items() if key.endswith(f"@{ranks}")}


@pytest.mark.parametrize(("name", "kind"), GUIDE_TABLE)
def test_the_guide_s_table_is_near_for_what_it_counts(name: str, kind: str) -> None:
    """Its numbers are the checkpoint shared by two; of W8A8 it forgets that linear attention stays float."""
    config = known(name)
    per_chip = planned_footprint(plan_model(config, usual_quantization(config, kind), 2, "310p")).total / 1e9
    guide = GUIDE_TABLE[name, kind]
    assert guide * 0.95 < per_chip < guide * 1.4
    assert kind == "w8a8" or abs(per_chip - guide) < 1


# --- Files and hubs ----------------------------------------------------------------------------------------

CATALOG = """version: 1
default_base: b
bases:
  b: {{images: [registry.example/vllm-ascend:x], vllm: 0.20.2, vllm_ascend: 0.20.2rc1}}
models:
  tiny:
    title: {title}
    directory: Tiny
    architecture: qwen3.5
    max_positions: 262144
    sources: [{sources}]
    profiles:
      t: {{tensor_parallel: 2, served_name: tiny, max_model_len: 4096, max_num_seqs: 4, gpu_memory_utilization: 0.6}}
"""


@pytest.fixture(scope="module")
def hub_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    make_model(root / "Org/Tiny")
    return root


def catalog_file(tmp_path: Path, *sources: str, title: str = "Tiny") -> str:
    path = tmp_path / "models.yaml"
    path.write_text(CATALOG.format(sources=", ".join(f"{{{one}}}" for one in sources), title=title))
    return str(path)


@pytest.mark.parametrize("source", ["modelscope: Org/Tiny", "huggingface: Org/Tiny"])
def test_a_budget_needs_only_headers_of_the_hub(
    source: str,
    hub_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with FaultyHub(hub_root) as hub:
        isolate_clients(monkeypatch, hub.url, tmp_path / "home")
        assert main(["budget", "tiny", "--json", "--catalog", catalog_file(tmp_path, source)]) == 0
        weights = [name for name in hub.bytes_sent if name.endswith(".safetensors")]
        assert len(weights) == 2
        assert all(request.range for name in weights for request in hub.gets(name))
        assert sum(hub.bytes_sent[name] for name in weights) <= 2 * (256 << 10)
    (row,) = json.loads(capsys.readouterr().out)["tiny"]
    plan = plan_model(read_config(hub_root / "Org/Tiny"), NONE, 2, "310p")
    assert row["weights"]["total"] == planned_footprint(plan).total
    assert row["origin"].endswith("Org/Tiny")
    assert not (tmp_path / "build").exists()


def test_files_of_a_directory_are_read_where_they_are(
    hub_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = catalog_file(tmp_path, f"dir: {hub_root / 'Org/Tiny'}")
    assert main(["budget", "tiny", "--offline", "--catalog", file]) == 0
    assert f"Sizes from {hub_root / 'Org/Tiny'}" in capsys.readouterr().out
    assert main(["budget", "tiny", "--source", f"dir:{hub_root}/nothing", "--catalog", file]) == 1


@pytest.mark.parametrize("kind", [ModelScope, HuggingFace])
def test_a_part_of_a_file_is_that_part(
    kind: type, hub_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = next((hub_root / "Org/Tiny").glob("*.safetensors"))
    with FaultyHub(hub_root) as server:
        isolate_clients(monkeypatch, server.url, tmp_path / "home")
        hub = kind("Org/Tiny", None)
        assert hub.read_range(path.name, 5, 1000) == path.read_bytes()[5:1005]
        assert hub.read_range(path.name, path.stat().st_size - 3, 10) == path.read_bytes()[-3:]
        server.faults.status = 403
        with pytest.raises(DuopackError, match="refuses access"):
            hub.read_range(path.name, 0, 8)
        server.faults.status = 404
        with pytest.raises(DuopackError, match="404"):
            hub.read_range("nothing", 0, 8)
    isolate_clients(monkeypatch, "http://127.0.0.1:9", tmp_path / "home")
    with pytest.raises(DuopackError, match="cannot reach"):
        kind("Org/Tiny", None).read_range(path.name, 0, 8)


def test_a_hub_that_ignores_ranges_is_read_only_as_far_as_needed() -> None:
    given: list[int] = []

    def pieces():
        for number in range(100):
            given.append(number)
            yield bytes([number]) * 10

    assert take_range(200, pieces(), 15, 10) == b"\1" * 5 + b"\2" * 5
    assert len(given) == 3
    assert take_range(206, iter([b"ab", b"cdef"]), 15, 4) == b"abcd"


def test_a_cut_header_is_an_error_and_no_budget(
    hub_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FaultyHub(hub_root) as hub:
        isolate_clients(monkeypatch, hub.url, tmp_path / "home")
        hub.faults.cut_after = dict.fromkeys(("config.json",), 10)
        assert main(["budget", "tiny", "--catalog", catalog_file(tmp_path, "modelscope: Org/Tiny")]) == 1
    assert "sizes of its tensors are not known" in capsys.readouterr().err


def test_without_a_hub_the_published_dimensions_are_taken_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    isolate_clients(monkeypatch, "http://127.0.0.1:9", tmp_path / "home")
    file = catalog_file(tmp_path, "modelscope: Org/Tiny", title="Qwen3.5-0.8B")
    assert main(["budget", "tiny", "--catalog", file]) == 0
    shown = capsys.readouterr()
    assert "Sizes from the published dimensions of Qwen3.5-0.8B" in shown.out
    assert "no source answers" in shown.err


# --- The command -------------------------------------------------------------------------------------------


def test_a_model_that_fits_and_one_that_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("9b", "--offline") == 0
    out = capsys.readouterr().out
    assert "9b: Qwen3.5-9B, TP 2" in out
    assert "guide's table 4.2 has about 9 GB of weights per chip; these are 9.4 GB" in out
    assert run("27b", "--offline", "--tp", "1") == 1
    assert "does not fit" in capsys.readouterr().out


def test_the_options_change_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--tp", "4", "--max-model-len", "8192", "--max-num-seqs", "2", "--utilization", "0.5")
    assert run("27b", "--offline", "--json", "--base", "v0.23.0rc1", *asked) == 0
    (row,) = json.loads(capsys.readouterr().out)["27b"]
    options = row["budget"]["options"]
    assert (options["ranks"], options["max_model_len"], options["max_num_seqs"]) == (4, 8192, 2)
    assert options["utilization"] == 0.5


def test_compare_puts_chips_and_types_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "27b.svg"
    assert run("27b", "--offline", "--compare", "--svg", str(picture)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:3] for line in lines[1:]] == [
        [kind, tp] for kind in ("float", "w8a8-dynamic") for tp in "124"
    ]
    assert "~27 GB" in lines[2]
    root = ElementTree.parse(picture).getroot()
    assert root.tag.endswith("svg")
    assert len(root.findall(".//{*}text")) >= 6


@pytest.mark.parametrize(
    "arguments",
    [
        ("nokey",),
        ("full",),
        ("9b", "--utilization", "1.5"),
        ("9b", "--max-model-len", "0"),
        ("--source", "dir:x"),
    ],
)
def test_wrong_use_is_told(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--offline", *arguments) == 2
    assert "To mend" in capsys.readouterr().err


# --- Bars --------------------------------------------------------------------------------------------------


def test_a_bar_is_as_long_as_its_sum() -> None:
    bar, legend = text_bar(Stack("x", [("a", 10), ("b", 5)], 20), width=20, plain=True).splitlines()
    assert bar == "##########=====.....|"
    assert legend == "# a  = b"
    over, _ = text_bar(Stack("x", [("a", 30)], 20), width=20, plain=True).splitlines()
    assert over == "#" * 20 + "|" + "#" * 10


def test_small_parts_do_not_shift_the_others() -> None:
    parts = [(str(number), 0.4) for number in range(10)]
    bar, _ = text_bar(Stack("x", parts, 20), width=20, plain=True).splitlines()
    assert len(bar.split("|")[0].rstrip(".")) == 4


def test_a_picture_escapes_names() -> None:
    text = svg_bars("a<b", [Stack("<x>", [("p&q", 1)], 2)], unit="GiB")
    assert ElementTree.fromstring(text) is not None
    assert "<x>" not in text
