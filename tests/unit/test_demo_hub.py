"""The demo's model is what the tools take it for, and the demo's hub answers as the real ones do."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from pipeline.demo.hub import LocalHub
from pipeline.demo.model import make_model, make_qwen3
from pipeline.files import sha256_file
from pipeline.weights.check import check_weights
from pipeline.weights.safetensors import read_header


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_model(tmp_path / "Qwen" / "demo")
    return tmp_path


def tensors(directory: Path) -> dict:
    return {
        name: tensor
        for path in directory.glob("*.safetensors")
        for name, tensor in read_header(path).tensors.items()
    }


def get(url: str, **headers: str):
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(root, tmp_path):
    make_model(tmp_path / "again")
    make_model(tmp_path / "other", seed=1)
    for path in (root / "Qwen" / "demo").iterdir():
        assert sha256_file(path) == sha256_file(tmp_path / "again" / path.name)
    name = "model.safetensors-00001-of-00002.safetensors"
    assert sha256_file(root / "Qwen/demo" / name) != sha256_file(tmp_path / "other" / name)


def test_the_tiny_model_has_the_layout_of_qwen3_5(root):
    found = tensors(root / "Qwen" / "demo")
    linear = "model.language_model.layers.0.linear_attn"
    assert found[f"{linear}.A_log"].dtype == found[f"{linear}.norm.weight"].dtype == "F32"
    assert found[f"{linear}.conv1d.weight"].shape == (2048, 1, 4)
    assert found["model.language_model.layers.3.self_attn.q_proj.weight"].shape == (1024, 128)
    assert "model.language_model.layers.3.linear_attn.A_log" not in found
    assert found["mtp.fc.weight"].shape == (128, 256)
    assert found["model.visual.patch_embed.proj.weight"].shape == (64, 3, 2, 16, 16)


def test_the_tiny_model_names_its_tensors_as_a_real_checkpoint_does(root):
    found = set(tensors(root / "Qwen" / "demo"))
    assert {
        "lm_head.weight",
        "model.language_model.embed_tokens.weight",
        "model.visual.pos_embed.weight",
    } <= found

    def below(prefix: str) -> set[str]:
        return {
            name.removeprefix(prefix).removesuffix(".weight") for name in found if name.startswith(prefix)
        }

    mlp = {"input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    full = {f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    parts = (
        "in_proj_qkv",
        "in_proj_z",
        "in_proj_a",
        "in_proj_b",
        "conv1d",
        "A_log",
        "dt_bias",
        "norm",
        "out_proj",
    )
    assert below("model.language_model.layers.0.") == mlp | {f"linear_attn.{name}" for name in parts}
    assert below("model.language_model.layers.3.") == mlp | full
    assert below("mtp.layers.0.") == mlp | full
    assert below("mtp.") - {f"layers.0.{name}" for name in mlp | full} == {
        "fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden",
    }  # fmt: skip
    block = {"norm1", "norm2", "attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"}
    assert {name.removesuffix(".bias") for name in below("model.visual.blocks.1.")} == block
    assert {name.removesuffix(".bias") for name in below("model.visual.merger.")} == {
        "norm", "linear_fc1", "linear_fc2",
    }  # fmt: skip


def test_the_tokenizer_has_one_token_per_byte_and_the_special_ones_behind(root):
    value = json.loads((root / "Qwen/demo/tokenizer.json").read_text())
    assert sorted(value["model"]["vocab"].values()) == list(range(256))
    assert [token["id"] for token in value["added_tokens"]] == list(range(256, 269))
    config = json.loads((root / "Qwen/demo/config.json").read_text())
    ids = {token["content"]: token["id"] for token in value["added_tokens"]}
    assert config["image_token_id"] == ids["<|image_pad|>"]
    assert config["text_config"]["eos_token_id"] == ids["<|im_end|>"]
    assert config["text_config"]["vocab_size"] >= 269


def test_both_tiny_models_are_whole(root, tmp_path):
    make_qwen3(tmp_path / "qwen3")
    for directory in (root / "Qwen" / "demo", tmp_path / "qwen3"):
        assert check_weights(directory, load_format="auto", tensor_parallel=2).tensors > 40
        assert sum(path.stat().st_size for path in directory.iterdir()) < 8 << 20


def test_a_range_is_answered_with_the_rest_of_the_file(root):
    content = (root / "Qwen/demo/tokenizer.json").read_bytes()
    with LocalHub(root) as hub:
        url = f"{hub.url}/api/v1/models/Qwen/demo/repo?Revision=master&FilePath=tokenizer.json"
        answer = get(url, Range="bytes=100-")
        assert answer.status == 206
        assert answer.headers["Content-Range"] == f"bytes 100-{len(content) - 1}/{len(content)}"
        assert answer.read() == content[100:]
        assert get(url, Range="bytes=0-7").read() == content[:8]
        with pytest.raises(urllib.error.HTTPError, match="416"):
            get(url, Range=f"bytes={len(content)}-")


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/models/Qwen/demo/repo?FilePath=../../../etc/passwd",
        "/api/v1/models/Qwen/demo/repo?FilePath=%2Fetc%2Fpasswd",
        "/api/v1/models/../etc/repo/files",
        "/api/v1/models/Qwen/none/repo/files",
        "/api/v1/models/Qwen/demo/repo/files?Revision=v9",
        "/Qwen/demo/resolve/main/..%2F..%2Fsecret",
        "/Qwen/demo/resolve/v9/config.json",
        "/api/models/Qwen/demo/revision/v9",
        "/etc/passwd",
    ],
)
def test_only_the_files_of_a_model_are_served(root, path):
    (root / "secret").write_text("x")
    with LocalHub(root) as hub, pytest.raises(urllib.error.HTTPError, match="404"):
        get(hub.url + path)


def test_a_file_that_changes_gets_another_sha256_and_commit(root):
    with LocalHub(root) as hub:
        before = json.load(get(f"{hub.url}/api/models/Qwen/demo/revision/main"))["sha"]
        (root / "Qwen/demo/config.json").write_text('{"changed": true}')
        after = json.load(get(f"{hub.url}/api/models/Qwen/demo/revision/main"))["sha"]
        assert before != after
        assert len(after) == 40
