"""`duopack check --script` and `--command`: shell text read without running it, the guide's commands judged."""

from __future__ import annotations

import io
import json
import shlex
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.ascend.docker_line import read_docker_line
from pipeline.ascend.options import check_options
from pipeline.ascend.serve_line import read_line
from pipeline.ascend.shell import find_commands, plain
from pipeline.catalog.load import load_catalog
from pipeline.catalog.schema import Architecture, Catalog, Quantization
from pipeline.cli import main
from pipeline.errors import UsageError
from pipeline.stages.review import Reviewed, identify, review

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog(ROOT / "models.yaml")


def words(text: str) -> list[tuple[str, ...]]:
    return [(one.kind, *one.words) for one in find_commands(text, where="t")]


# --- Shell text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("vllm serve /m -tp 2", [("serve", "/m", "-tp", "2")]),
        ("vllm serve /m \\\n  --port 1 # note\n", [("serve", "/m", "--port", "1")]),
        ("vllm serve '/m#1' --x 'a  b' --y \"c\\\"d\"", [("serve", "/m#1", "--x", "a  b", "--y", 'c"d')]),
        ("cd /x && exec nohup vllm serve /m >log 2>&1 &", [("serve", "/m")]),
        ("python3 -m vllm.entrypoints.openai.api_server --model /m", [("serve", "--model", "/m")]),
        ("TP=2\nvllm serve /m -tp $TP --port ${PORT:-8}", [("serve", "/m", "-tp", "2", "--port", "8")]),
        ("TP=2; vllm serve /m -tp '$TP'", [("serve", "/m", "-tp", "$TP")]),
        ('vllm serve /m --name "$NAME" `id`', [("serve", "/m", "--name", "$NAME", "`id`")]),
        ("vllm serve $(cat model; echo x) --a", [("serve", "$(cat model; echo x)", "--a")]),
        ("bash -c 'export A=1; vllm serve /m'", [("serve", "/m")]),
        ("docker exec -it -e X=1 c vllm serve /m", [("serve", "/m")]),
        (
            "docker run -d i bash -c 'vllm serve /m'",
            [("docker", "-d", "i", "bash", "-c", "vllm serve /m"), ("serve", "/m")],
        ),
        ("cat > n.sh <<'EOF'\nvllm serve /m\nEOF\nls", [("serve", "/m")]),
        ("if true; then vllm serve /m; fi", [("serve", "/m")]),
        ("vllm serve /m --a \\\r\n --b\r\n", [("serve", "/m", "--a", "--b")]),
        ("vllm serve /m --json '{\n \"a\": 1}'", [("serve", "/m", "--json", '{\n "a": 1}')]),
        ("echo vllm serve /m\n# vllm serve /m\nvllm bench serve", []),
        ("", []),
    ],
)
def test_commands_are_found_as_a_shell_would_see_them(text: str, found: list[tuple[str, ...]]) -> None:
    assert words(text) == found


def test_the_variables_of_a_command_are_those_that_reach_it() -> None:
    text = "A=1\nexport B=2\nexport A\nC=3 D=$B vllm serve /m\nvllm serve /n"
    first, second = find_commands(text, where="t")
    assert first.env == {"A": "1", "B": "2", "C": "3", "D": "2"}
    assert second.env == {"A": "1", "B": "2"}
    assert (first.line, second.line) == (4, 5)


def test_a_container_s_server_gets_the_container_s_variables() -> None:
    text = "export B=2\ndocker run -e A=1 image vllm serve /m"
    assert find_commands(text, where="t")[1].env == {"A": "1"}


@pytest.mark.parametrize("text", ["vllm serve '/m", 'echo "x\nvllm serve', "a\0b", "x" * (2 << 20)])
def test_what_is_no_shell_text_is_refused_in_words(text: str) -> None:
    with pytest.raises(UsageError):
        find_commands(text, where="t")


@pytest.mark.parametrize(
    "text", ["$(", "${", "`", "<<", ">", "\\", "((((", "vllm", "docker run", "bash -c", "docker exec"]
)
def test_pieces_of_shell_text_harm_nobody(text: str) -> None:
    with suppress(UsageError):
        find_commands(text, where="t")


@pytest.mark.parametrize(
    "piece", ["$", "$(", "<<a\na\n", "'a'", "a=b ", "\\\n", "(", "${x", "docker tag -a ", "pip install "]
)
def test_a_long_text_of_anything_is_read_in_a_moment(piece: str, catalog: Catalog) -> None:
    started = time.monotonic()
    with suppress(UsageError):
        review(piece * (300_000 // len(piece)), catalog, catalog.bases["v0.20.2rc1"], where="t")
    assert time.monotonic() - started < 10


def test_a_command_in_itself_ends() -> None:
    nested = "vllm serve /m"
    for _ in range(6):
        nested = f"bash -c {shlex.quote(nested)}"
    assert find_commands(nested, where="t") == ()


def test_typographic_characters_are_made_plain() -> None:
    assert plain("a\u00a0“b” \u2013\u2013c") == ('a "b" --c', "\u00a0“”\u2013")


# --- Lines as values ---------------------------------------------------------------------------------------


def test_a_line_knows_options_in_any_spelling() -> None:
    line = read_line(
        ["/m", "-tp=2", "--max_num_seqs", "8", "--max-num-seqs=16", "--max-model-len", "16K"], {}, "0.20.2"
    )
    assert line.number("--tensor-parallel-size") == 2
    assert line.number("--max-num-seqs") == 16
    assert line.number("--max-model-len") == 16384
    assert line.words()[:3] == ["/m", "--tensor-parallel-size", "2"]


def test_a_json_option_and_its_dotted_forms_are_one() -> None:
    line = read_line(["/m", "-cc", '{"a": {"b": 1}}', "--compilation-config.a.c", "[2]"], {}, "0.20.2")
    assert line.config("--compilation-config") == {"a": {"b": 1, "c": [2]}}


def test_the_text_of_a_line_is_what_a_shell_reads_back() -> None:
    given = [
        "/models/a b",
        "--served-model-name",
        "it's",
        "--compilation-config",
        '{"x": "$HOME"}',
        "--port",
        "$PORT",
    ]
    line = read_line(given, {"A": "x y"}, "0.20.2")
    (again,) = find_commands(line.text(), where="t")
    assert list(again.words) == given
    assert again.env == {"A": "x y"}


def test_docker_s_own_spellings_are_read() -> None:
    docker = read_docker_line(
        [
            "-itd",
            "-p8:9",
            "--name=x",
            "-e",
            "A=1",
            "--env=B=2",
            "--device",
            "/dev/davinci3:/dev/davinci0",
            "i",
            "-d",
        ]
    )
    assert docker.env == {"A": "1", "B": "2"}
    assert docker.chips == (3,)
    assert docker.ports == (("8", "9"),)
    assert docker.has("--detach")
    assert docker.image == "i"
    assert docker.command == ("-d",)


# --- The guide's commands ----------------------------------------------------------------------------------

EXPORTS = """export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True
export HCCL_BUFFSIZE=512
export OMP_PROC_BIND=false
export OMP_NUM_THREADS=1
export TASK_QUEUE_ENABLE=1
export HCCL_OP_EXPANSION_MODE="AIV"
"""
DOCKER = """docker run -itd --runtime=ascend --name {name} --device /dev/davinci{a} --device /dev/davinci{b} \\
  --device /dev/davinci_manager --device /dev/hisi_hdc --device /dev/devmm_svm \\
  -e ASCEND_RT_VISIBLE_DEVICES={ids} -p {port}:12320 -v /root/hxp/models:/models/scripts:ro --memory=250g \\
  quay.io/ascend/vllm-ascend:v0.20.2rc1-310p-openeuler bash
"""
GUIDE = {
    "run-9b": DOCKER.format(name="vllm-ascend-qwen3.5-9b", a=0, b=1, ids="2,3", port=12322),
    "run-27b": DOCKER.format(name="vllm-ascend-qwen3.5-27b", a=0, b=1, ids="0,1", port=12320),
    "run-appendix": DOCKER.format(name="vllm-ascend-qwen3.5-9b", a=2, b=3, ids="2,3", port=12322),
    "serve-9b": EXPORTS
    + """ASCEND_RT_VISIBLE_DEVICES=2,3 \\
  vllm serve /models/Qwen3.5-9B --host 0.0.0.0 --port 12320 -tp 2 --served-model-name qwen3.5-9b \\
  --trust-remote-code --max_num_seqs 8 --gpu_memory_utilization 0.6 \\
  --additional-config '{"ascend_compilation_config": {"fuse_norm_quant": false}}' --dtype float16 \\
  --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1,4]}' \\
  --allowed-local-media-path / --mamba-ssm-cache-dtype float16 --reasoning-parser qwen3 \\
  --enable-auto-tool-choice --tool-call-parser qwen3_coder --enable-chunked-prefill --max-model-len 53248 \\
  --enable-prefix-caching --mamba-cache-mode align
""",
    "serve-27b": EXPORTS
    + """ASCEND_RT_VISIBLE_DEVICES=0,1 \\
  vllm serve /models/qwen3.5-27B-w8a8 --host 0.0.0.0 --port 12320 -tp 2 --served-model-name qwen3.5-27b \\
  --trust-remote-code --max_num_seqs 8 --gpu_memory_utilization 0.8 --dtype float16 \\
  --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1,4]}' \\
  --allowed-local-media-path / --mamba-ssm-cache-dtype float16 --reasoning-parser qwen3 \\
  --enable-auto-tool-choice --tool-call-parser qwen3_coder --max-model-len 40960 --enable-chunked-prefill \\
  --enable-prefix-caching
""",
    "serve-8b": "export VLLM_ALLOW_LONG_MAX_MODEL_LEN=1\n"
    + EXPORTS
    + """ASCEND_RT_VISIBLE_DEVICES=0,1 \\
  vllm serve /models/Qwen3-8B-w8a8sc-310-vllm/TP2/Qwen3-8B-w8a8sc-310-vllm-tp2 --host 0.0.0.0 --port 12320 \\
  --tensor-parallel-size 2 --gpu_memory_utilization 0.90 --served_model_name qwen3-8b --dtype float16 \\
  --additional-config '{"ascend_compilation_config": {"fuse_norm_quant": false}}' \\
  --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1,2,4,8]}' \\
  --quantization ascend --max-model-len 53248 --enable-chunked-prefill --max-num-batched-tokens 4096 \\
  --max-num-seqs 40 --enable-prefix-caching --load_format="sharded_state"
""",
    "serve-2b": """vllm serve /share/weight/Qwen3.5-2B-W8A8/ --host 127.0.0.1 --port 1025 --dtype float16 \\
  --served-model-name qwen3.5 --trust-remote-code --max-model-len 10240 --gpu_memory_utilization 0.80 \\
  --additional-config '{"ascend_compilation_config": {"fuse_norm_quant": false}}' \\
  --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1,2,4,8,16]}' \\
  --mamba-ssm-cache-dtype float16 --allowed-local-media-path /
""",
}
OF_THE_BASE = {"graph-precision", "qwen3.5-base"}
CONTAINER = {
    "container-runtime-choice",
    "container-shell",
    "container-shm",
    "container-base-alone",
    "container-restart",
}
COMMON = OF_THE_BASE | {"npugraph-ex", "trust-remote-code", "media-path-root"}
# What is wrong with each of the guide's seven commands, and what of it is left when all is mended that one can.
WRONG = {
    "run-9b": CONTAINER | {"container-logical-ids"},
    "run-27b": CONTAINER,
    "run-appendix": CONTAINER | {"container-logical-ids"},
    "serve-9b": COMMON
    | {"visible-devices-logical", "attention-mask", "hccl-expansion", "capture-sizes-eager"},
    "serve-27b": COMMON
    | {"attention-mask", "hccl-expansion", "capture-sizes-eager", "fuse-norm-quant", "mamba-cache-mode-open"},
    "serve-8b": (COMMON - {"qwen3.5-base", "trust-remote-code", "media-path-root"})
    | {"capture-sizes-tp", "attention-mask", "hccl-expansion", "capture-sizes-eager", "model-len-limit"},
    "serve-2b": COMMON | {"seqs-default", "capture-sizes-eager", "host-loopback", "environment"},
}
LEFT = {
    "run-9b": {"container-shell", "container-base-alone"},
    "run-27b": {"container-shell", "container-base-alone"},
    "run-appendix": {"container-shell", "container-base-alone"},
    "serve-9b": OF_THE_BASE | {"attention-mask"},
    "serve-27b": OF_THE_BASE | {"attention-mask"},
    "serve-8b": {"graph-precision", "attention-mask", "model-len-limit"},
    "serve-2b": OF_THE_BASE,
}


def only(reviewed: tuple[Reviewed, ...]) -> Reviewed:
    (one,) = reviewed
    return one


@pytest.mark.parametrize("name", GUIDE)
def test_the_guide_s_commands_get_told_what_is_wrong(name: str, catalog: Catalog) -> None:
    one = only(review(GUIDE[name], catalog, catalog.bases["v0.20.2rc1"], where=name))
    assert {finding.id for finding in one.findings} == WRONG[name]
    assert {finding.id for finding in one.remaining} == LEFT[name]


@pytest.mark.parametrize("name", [name for name in GUIDE if name.startswith("serve")])
def test_the_corrected_command_is_one_that_vllm_takes_and_stays_corrected(
    name: str, catalog: Catalog
) -> None:
    base = catalog.bases["v0.20.2rc1"]
    one = only(review(GUIDE[name], catalog, base, where=name))
    (command,) = find_commands(one.fixed, where=name)
    assert check_options(command.words, base.vllm) == []
    again = only(review(one.fixed, catalog, base, where=name))
    assert again.fixed == one.fixed


def test_two_containers_that_want_one_chip_are_told_of_each_other(catalog: Catalog) -> None:
    both = review(GUIDE["run-9b"] + GUIDE["run-27b"], catalog, catalog.bases["v0.20.2rc1"], where="s")
    assert all("container-chip-shared" in {finding.id for finding in one.findings} for one in both)


def test_a_container_that_lies_about_its_model_is_told(catalog: Catalog) -> None:
    text = GUIDE["run-27b"].replace("vllm-ascend-qwen3.5-27b", "vllm-ascend-qwen3") + GUIDE["serve-27b"]
    docker, serve = review(text, catalog, catalog.bases["v0.20.2rc1"], where="s")
    assert "container-name" in {finding.id for finding in docker.findings}
    assert "--name vllm-ascend-qwen3.5-27b" in docker.fixed
    assert serve.kind == "serve"


# --- Which model it is -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "title", "architecture", "quantization"),
    [
        ("/models/qwen3.5-9b", "Qwen3.5-9B", Architecture.QWEN3_5, Quantization.FLOAT),
        ("Qwen/Qwen3.5-9B", "Qwen3.5-9B", Architecture.QWEN3_5, Quantization.FLOAT),
        ("/data/Qwen3.6-35B-A3B-W8A8", "Qwen3.6-35B-A3B-W8A8", Architecture.QWEN3_5_MOE, Quantization.W8A8),
        ("/data/Qwen3-14B-W8A8SC/", "Qwen3-14B-W8A8SC", Architecture.QWEN3, Quantization.W8A8SC),
        (
            "Qwen3-30B-A3B-w8a8_dynamic",
            "Qwen3-30B-A3B-w8a8_dynamic",
            Architecture.QWEN3_MOE,
            Quantization.W8A8_DYNAMIC,
        ),
    ],
)
def test_a_model_is_known_by_its_directory_its_source_or_its_name(
    path: str, title: str, architecture: Architecture, quantization: Quantization, catalog: Catalog
) -> None:
    found = identify(path, catalog, where="t")
    assert (found.title, found.architecture, found.quantization) == (title, architecture, quantization)


def test_a_model_on_this_disk_says_itself_what_it_is(tmp_path: Path, catalog: Catalog) -> None:
    config = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 1234}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quant_model_description.json").write_text(json.dumps({"model_quant_type": "W8A8_DYNAMIC"}))
    found = identify(str(tmp_path), catalog, where="t")
    assert (found.architecture, found.max_positions) == (Architecture.QWEN3, 1234)
    assert found.quantization is Quantization.W8A8_DYNAMIC


def test_a_model_that_cannot_be_told_is_asked_for(catalog: Catalog) -> None:
    with pytest.raises(UsageError, match="cannot be told") as caught:
        identify("/models/llama", catalog, where="t")
    assert "KEY" in caught.value.mend
    assert identify("/models/llama", catalog, where="t", key="9b").title == "Qwen3.5-9B"


# --- The command -------------------------------------------------------------------------------------------


def run(*arguments: str) -> int:
    return main(["check", "--catalog", str(ROOT / "models.yaml"), *arguments])


def test_check_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "n9.sh"
    script.write_text(GUIDE["serve-9b"])
    assert run("--script", str(script)) == 1
    out = capsys.readouterr().out
    assert f"{script}:7: vllm serve, Qwen3.5-9B" in out
    assert "visible-devices-logical" in out


def test_check_and_fix_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--fix", "--command", GUIDE["serve-8b"]) == 0
    out = capsys.readouterr().out
    assert '"cudagraph_capture_sizes": [1, 8]' in out
    assert "# warning: max_model_len 53248" in out
    assert run("--fix", "--json", "--command", GUIDE["serve-8b"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["model"] == "Qwen3-8B-W8A8SC"
    assert row["fixed"] in out


def test_a_dockerfile_is_judged_by_what_it_does_to_the_image(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text("FROM quay.io/ascend/vllm-ascend:v0.20.2rc1-310p-openeuler\nRUN pip install triton\n")
    assert run("--script", str(file)) == 1
    assert "derived-triton" in capsys.readouterr().out
    assert run("--fix", "--script", str(file)) == 1


def test_a_newer_base_judges_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    text = f"vllm serve /models/Qwen3.5-9B {GUIDE['serve-9b'].split('Qwen3.5-9B', 1)[1]}".replace(
        "path /", "path /media"
    ).rstrip()
    assert run("--base", "v0.23.0rc1", "--command", text + " --speculative-config '{}'") == 0
    assert "speculative-young" in capsys.readouterr().out
    assert run("--base", "v0.20.2rc1", "--command", text + " --speculative-config '{}'") == 1
    assert "speculative-unsupported" in capsys.readouterr().out


def test_a_script_from_stdin_and_what_the_shell_makes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.stdin", io.StringIO('vllm serve /models/Qwen3.5-9B --dtype "$DTYPE" "${more[@]}"')
    )
    run("--script", "-")
    out = capsys.readouterr().out
    assert "unread" in out
    assert "does not take" not in out


def test_words_with_typographic_quotes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    text = "vllm serve /models/Qwen3.5-9B \u2013-dtype float16 \u201c--port\u201d 1"
    assert run("--command", text) == 1
    assert "typographic" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--command", "ls -l"),
        ("--command", ""),
        ("--command", "vllm serve /models/x", "--script", "y"),
        ("--command", "vllm serve /models/Qwen3.5-9B", "--base", "v9"),
        ("9b", "27b", "--command", "vllm serve /models/x"),
        ("nokey", "--command", "vllm serve /models/x"),
        ("--fix",),
    ],
)
def test_wrong_use_is_told(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert "To mend" in capsys.readouterr().err


def test_a_missing_script_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("--script", str(tmp_path / "nothing")) == 1
    assert "cannot read" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert run("--script", str(tmp_path / "binary")) == 2
