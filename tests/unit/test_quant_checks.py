"""Quantized weights held against what 310P loads, and repaired where that needs no source."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.cli import main
from pipeline.demo.model import Variant, make_model
from pipeline.errors import DuopackError
from pipeline.reports.progress import open_progress
from pipeline.stages.quantize.stage import quantize
from pipeline.stages.quantize.w8a8sc import check_ranks
from pipeline.weights.check import DESCRIPTION
from pipeline.weights.quant.checks import REPAIR, check_quantized
from pipeline.weights.quant.repair import repair
from pipeline.weights.safetensors import read_header
from pipeline.weights.safetensors_writer import Declared, SafetensorsWriter, lay_out

LAYER = "model.language_model.layers.3"
QUERY = f"{LAYER}.self_attn.q_proj"
EXPERT = f"{LAYER}.mlp.experts.2.up_proj"
Content = dict[str, tuple[str, tuple[int, ...], bytes]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """W8A8_DYNAMIC weights of a tiny model with experts."""
    place = tmp_path_factory.mktemp("original")
    make_model(place / "source", seed=1, variant=Variant(experts=4))
    return quantize(
        place / "source", place / "made", open_progress(quiet=True), recipe="w8a8-dynamic"
    ).directory


@pytest.fixture
def weights(original: Path, tmp_path: Path) -> Path:
    for path in original.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def describe(directory: Path, change: Callable[[dict[str, object]], object]) -> None:
    values = json.loads((directory / DESCRIPTION).read_text())
    change(values)
    (directory / DESCRIPTION).write_text(json.dumps(values))


def edit(directory: Path, change: Callable[[Content], object]) -> None:
    """Writes the weight file and its index anew with other tensors."""
    (path,) = directory.glob("*.safetensors")
    data = path.read_bytes()
    content: Content = {
        name: (one.dtype, one.shape, data[one.begin : one.end])
        for name, one in read_header(path).tensors.items()
    }
    change(content)
    write(path, content)
    (index,) = directory.glob("*.index.json")
    values = {
        "metadata": {"total_size": sum(len(one[2]) for one in content.values())},
        "weight_map": dict.fromkeys(content, path.name),
    }
    index.write_text(json.dumps(values))


def write(path: Path, content: Content) -> None:
    layout = lay_out(Declared(name, dtype, shape) for name, (dtype, shape, _) in content.items())
    with SafetensorsWriter(path, layout) as writer:
        for one in layout.tensors:
            writer.write(content[one.name][2])


def ids(directory: Path) -> list[str]:
    return [one.id for one in check_quantized(directory)]


def test_a_good_directory_has_no_findings(weights: Path) -> None:
    assert check_quantized(weights) == ()


def to_static(directory: Path, module: str, dtype: str) -> None:
    """Makes one linear W8A8, with scales of the given dtype."""

    def change(content: Content) -> None:
        rows = content[f"{module}.weight"][1][0]
        del content[f"{module}.weight_scale"], content[f"{module}.weight_offset"]
        width = {"F32": 4, "I64": 8, "F16": 2}[dtype]
        data = struct.pack("<f", 0.25) * rows if width == 4 else b"\1" * (width * rows)
        content[f"{module}.deq_scale"] = (dtype, (rows,), data)
        content[f"{module}.quant_bias"] = ("I32", (rows,), bytes(4 * rows))
        content[f"{module}.input_scale"] = ("F32", (1,), bytes(4))
        content[f"{module}.input_offset"] = ("F32", (1,), bytes(4))

    edit(directory, change)
    describe(directory, lambda values: values.update({f"{module}.weight": "W8A8"}))


@pytest.mark.parametrize("members", [("q_proj", "k_proj", "v_proj")])
@pytest.mark.parametrize(
    ("dtype", "found"), [("I64", []), ("F32", ["deq-scale-dtype"] * 3), ("F16", ["deq-scale-dtype"] * 3)]
)
def test_scales_of_w8a8(members: tuple[str, ...], dtype: str, found: list[str], weights: Path) -> None:
    for member in members:
        to_static(weights, f"{LAYER}.self_attn.{member}", dtype)
    assert ids(weights) == found
    for finding in check_quantized(weights):
        assert "'!!!!'" in finding.effect
        assert (finding.mend == REPAIR) is (dtype == "F32")


def test_scales_that_were_converted_by_value(weights: Path) -> None:
    for member in ("q_proj", "k_proj", "v_proj"):
        to_static(weights, f"{LAYER}.self_attn.{member}", "I64")

    def zero(content: Content) -> None:
        for name, (dtype, shape, data) in list(content.items()):
            if name.endswith("deq_scale"):
                content[name] = (dtype, shape, bytes(len(data)))

    edit(weights, zero)
    assert ids(weights) == ["deq-scale-zero"]


@pytest.mark.parametrize("type_", ["W4A8_DYNAMIC", "W8A8_MIX", "W8A16", 8])
def test_types_that_310p_does_not_know(type_: object, weights: Path) -> None:
    describe(
        weights, lambda values: values.update({f"{LAYER}.self_attn.{m}_proj.weight": type_ for m in "qkv"})
    )
    assert ids(weights) == ["type-unknown"] * 3
    assert str(type_) in check_quantized(weights)[0].sentence


def test_experts_are_dynamic_or_float(weights: Path) -> None:
    describe(weights, lambda values: values.update({f"{EXPERT}.weight": "W8A8"}))
    assert "type-unknown" in ids(weights)
    assert "mixed-group" in ids(weights)


@pytest.mark.parametrize("module", [QUERY, EXPERT, f"{LAYER}.mlp.shared_expert.gate_proj"])
def test_what_is_fused_has_one_type(module: str, weights: Path) -> None:
    def change(values: dict[str, object]) -> None:
        values[f"{module}.weight"] = "FLOAT" if values[f"{module}.weight"] != "FLOAT" else "W8A8_DYNAMIC"

    describe(weights, change)
    (mixed,) = [one for one in check_quantized(weights) if one.id == "mixed-group"]
    assert module in mixed.sentence


def test_missing_entries_are_found_and_repaired(weights: Path) -> None:
    names = ("lm_head.weight", "model.visual.blocks.0.attn.qkv.weight")
    describe(weights, lambda values: [values.pop(name) for name in names])
    assert ids(weights) == ["entry-missing"] * 2
    assert repair(weights, lambda text: None) == ()
    description = json.loads((weights / DESCRIPTION).read_text())
    assert [description[name] for name in names] == ["FLOAT", "FLOAT"]


def test_a_missing_entry_of_an_int8_weight_cannot_be_guessed(weights: Path) -> None:
    describe(weights, lambda values: values.pop(f"{EXPERT}.weight"))
    (finding,) = repair(weights, lambda text: None)
    assert finding.id == "entry-missing"
    assert finding.mend != REPAIR


def test_float32_scales_are_repaired_by_bits(weights: Path) -> None:
    for member in ("q_proj", "k_proj", "v_proj"):
        to_static(weights, f"{LAYER}.self_attn.{member}", "F32")
    (path,) = weights.glob("*.safetensors")
    before = {name: one.dtype for name, one in read_header(path).tensors.items()}
    data = path.read_bytes()
    weight = read_header(path).tensors[f"{EXPERT}.weight"]
    assert repair(weights, lambda text: None) == ()
    after = read_header(path).tensors
    assert {name for name in before if before[name] != after[name].dtype} == {
        f"{LAYER}.self_attn.{m}_proj.deq_scale" for m in "qkv"
    }
    rewritten, scale = path.read_bytes(), after[f"{QUERY}.deq_scale"]
    values = np.frombuffer(rewritten[scale.begin : scale.end], "<i8")
    assert (values == struct.unpack("<i", struct.pack("<f", 0.25))[0]).all()
    place = after[f"{EXPERT}.weight"]
    assert rewritten[place.begin : place.end] == data[weight.begin : weight.end]
    # The index agrees again, and a second repair has nothing to do.
    assert repair(weights, lambda text: pytest.fail(text)) == ()


def test_a_repair_that_was_killed_before_the_index(weights: Path) -> None:
    (index,) = weights.glob("*.index.json")
    values = json.loads(index.read_text())
    values["metadata"]["total_size"] += 4
    index.write_text(json.dumps(values))
    assert ids(weights) == ["index-total"]
    assert repair(weights, lambda text: None) == ()


def test_modes_are_found_and_repaired(weights: Path) -> None:
    (path,) = weights.glob("*.safetensors")
    path.chmod(0o600)
    (weights / "config.json").chmod(0o400)
    assert ids(weights) == ["file-mode", "file-mode"]
    assert repair(weights, lambda text: None) == ()
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("inside", [True, False])
def test_a_quantization_config_is_found_and_removed(inside: bool, weights: Path) -> None:
    config = json.loads((weights / "config.json").read_text())
    (config["text_config"] if inside else config)["quantization_config"] = {
        "quant_method": "compressed-tensors"
    }
    (weights / "config.json").write_text(json.dumps(config))
    assert ids(weights) == ["quantization-config"]
    assert repair(weights, lambda text: None) == ()
    assert "quantization_config" not in (weights / "config.json").read_text()


def test_a_bias_under_dynamic(weights: Path) -> None:
    edit(weights, lambda content: content.update({f"{QUERY}.bias": ("BF16", (4,), bytes(8))}))
    (finding,) = check_quantized(weights)
    assert finding.id == "dynamic-bias"
    assert "Bias dtype should be INT32" in finding.effect


def test_tensors_that_belong_to_a_quantized_linear(weights: Path) -> None:
    edit(weights, lambda content: content.pop(f"{QUERY}.weight_scale"))
    assert ids(weights) == ["tensor-missing"]


def test_a_quantized_linear_with_float_values(weights: Path) -> None:
    def change(content: Content) -> None:
        _, shape, data = content[f"{QUERY}.weight"]
        content[f"{QUERY}.weight"] = ("BF16", shape, data * 2)

    edit(weights, change)
    assert ids(weights) == ["weight-dtype"]


def test_int8_without_a_description(weights: Path) -> None:
    (weights / DESCRIPTION).unlink()
    assert "description-missing" in ids(weights)


def test_float_weights_are_another_matter(tmp_path: Path) -> None:
    make_model(tmp_path / "source")
    with pytest.raises(DuopackError, match="not quantized"):
        check_quantized(tmp_path / "source")


def test_command_line(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--weights", str(weights), "--quiet"]) == 0
    describe(weights, lambda values: values.pop("lm_head.weight"))
    assert main(["check", "--weights", str(weights), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert (found["id"], found["severity"]) == ("entry-missing", "error")
    assert found["mend"]
    assert main(["check", "--weights", str(weights), "--repair"]) == 0
    assert main(["check", "--weights", str(weights / "none")]) == 2
    assert main(["check", "--repair"]) == 2


LINEARS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


@pytest.fixture
def compressed(tmp_path: Path) -> Path:
    """What upstream's script leaves for two ranks of a one-layer model, as far as headers tell."""
    content: Content = {}
    for linear in LINEARS:
        module = f"model.layers.0.{linear}"
        content[f"{module}.weight"] = ("I8", (96,), bytes(96))
        content[f"{module}.index"] = ("I8", (8,), bytes(8))
        content[f"{module}.info"] = ("I64", (5,), bytes(40))
        content[f"{module}.quant_bias"] = ("I32", (4,), bytes(16))
        content[f"{module}.deq_scale"] = ("I64", (4,), bytes(32))
    for rank in range(2):
        write(tmp_path / f"model-rank-{rank}-part-0.safetensors", content)
    (tmp_path / DESCRIPTION).write_text(json.dumps({"model_quant_type": "W8A8SC"}))
    return tmp_path


def change_rank(directory: Path, change: Callable[[Content], object]) -> None:
    path = directory / "model-rank-1-part-0.safetensors"
    data = path.read_bytes()
    content: Content = {
        name: (one.dtype, one.shape, data[one.begin : one.end])
        for name, one in read_header(path).tensors.items()
    }
    change(content)
    write(path, content)


def test_compressed_ranks_that_are_whole(compressed: Path) -> None:
    check_ranks(compressed, 2, 1)


DOWN = "model.layers.0.mlp.down_proj"


def put(suffix: str, dtype: str, shape: tuple[int, ...], size: int) -> Callable[[Path], None]:
    """Gives a tensor of rank 1's down_proj another form."""
    return lambda place: change_rank(
        place, lambda c: c.update({f"{DOWN}.{suffix}": (dtype, shape, bytes(size))})
    )


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda d: (d / "model-rank-1-part-0.safetensors").unlink(), "rank 1 has 0 files"),
        (lambda d: (d / "model-rank-1-part-1.safetensors").write_bytes(b""), "rank 1 has 2 files"),
        (lambda d: (d / "model-rank-1-part-0.safetensors").write_bytes(b"\x10"), "whole safetensors"),
        (
            put("weight", "I8", (8, 12), 96),
            "not compressed",
        ),
        (lambda d: change_rank(d, lambda c: c.pop(f"{DOWN}.index")), "has no index"),
        (
            put("deq_scale", "F32", (4,), 16),
            "F32, not I64",
        ),
        (
            put("info", "I64", (4,), 32),
            r"\[4\], not \[5\]",
        ),
        (
            lambda d: change_rank(d, lambda c: [c.pop(n) for n in list(c) if n.startswith(DOWN)]),
            "3 linears, not 4",
        ),
        (
            lambda d: change_rank(d, lambda c: c.update({"more": ("F16", (1,), bytes(2))})),
            "same tensors: more",
        ),
        (lambda d: (d / DESCRIPTION).unlink(), "no quant_model_description"),
        (lambda d: (d / DESCRIPTION).write_text('{"model_quant_type": "W8A8S"}'), "W8A8S"),
        (lambda d: (d / "model-rank-2-part-0.safetensors").write_bytes(b""), "beyond the last"),
    ],
)
def test_what_upstream_does_not_notice(spoil: Callable[[Path], object], why: str, compressed: Path) -> None:
    spoil(compressed)
    with pytest.raises(DuopackError, match=why):
        check_ranks(compressed, 2, 1)
