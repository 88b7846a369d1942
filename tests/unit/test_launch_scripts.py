"""The start scripts, run by the real bash with a fake vllm, fake chips and fake weights."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.launching import NEW_BASE, OLD_BASE, Machine, model, profile, sharded_model

from pipeline.ascend.options import check_options
from pipeline.ascend.scripts import list_script, serve_script
from pipeline.ascend.serve import arguments, command, defaults, settings
from pipeline.catalog.load import load_catalog
from pipeline.catalog.schema import Architecture, Base, Model, Quantization

CATALOG = load_catalog(Path(__file__).parents[2] / "models.yaml")
PROFILES = [
    pytest.param(one, name, base, id=f"{name}-{base_key}")
    for base_key, base in CATALOG.bases.items()
    for one in CATALOG.models.values()
    for name in one.profiles
]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def only(one: Model, name: str) -> Model:
    return one.model_copy(update={"profiles": {name: one.profiles[name]}})


# --- Every profile of the catalog -------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "name", "base"), PROFILES)
def test_a_script_gives_vllm_the_words_that_were_checked(
    machine: Machine, one: Model, name: str, base: Base
) -> None:
    chosen = one.profiles[name]
    if chosen.load_format == "sharded_state":
        machine.shards(range(chosen.tensor_parallel))
    machine.chips(chosen.tensor_parallel)
    machine.write("weights/quant_model_description.json", "{}")
    ran = machine.run(machine.script(only(one, name), base), "--seed", "7")
    values = defaults(settings(one, chosen)) | {"MODEL_PATH": str(machine.weights), "PORT": str(machine.port)}
    expected = arguments(command(one, chosen, base), values)
    assert (ran.code, ran.err) == (0, "")
    assert ran.argv == ["serve", *expected, "--seed", "7"]
    assert [problem for problem in check_options(expected, base.vllm) if problem.severity == "error"] == []


@pytest.mark.parametrize(("one", "name", "base"), PROFILES)
def test_a_dry_run_prints_the_command_without_chips_or_weights(
    machine: Machine, one: Model, name: str, base: Base
) -> None:
    machine.chips(0)
    script = machine.script(only(one, name), base)
    ran = machine.run(script, "a b", "$(touch x)", MODEL_PATH=None, PORT=None, DUOPACK_DRY_RUN="1")
    chosen = one.profiles[name]
    expected = arguments(command(one, chosen, base), defaults(settings(one, chosen)))
    printed = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {ran.out}"], capture_output=True, text=True, check=True
    ).stdout.split("\0")[:-1]
    assert ran.argv == []
    assert printed == ["vllm", "serve", *expected, "a b", "$(touch x)"]


@pytest.mark.parametrize(
    "tool", [["shellcheck"], ["shfmt", "-i", "2", "-ci", "-d"]], ids=lambda tool: tool[0]
)
def test_scripts_are_clean(machine: Machine, tool: list[str]) -> None:
    binary = Path(os.sys.executable).with_name(tool[0])  # type: ignore[attr-defined]
    if not binary.exists():
        pytest.skip(f"{tool[0]} is not installed")
    scripts = [
        machine.write(f"{base.vllm}-{name}.sh", serve_script(name, one, chosen, base))
        for base in CATALOG.bases.values()
        for one in CATALOG.models.values()
        for name, chosen in one.profiles.items()
    ]
    scripts += [machine.healthcheck(12320), machine.write("list.sh", list_script(["it's", "", "a"]))]
    done = subprocess.run([binary, *tool[1:], *scripts], capture_output=True, text=True)
    assert done.stdout + done.stderr == ""


# --- Settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("HOST", "127.0.0.1", ["--host", "127.0.0.1"]),
        ("TP", "1", ["--tensor-parallel-size", "1"]),
        ("SERVED_MODEL_NAME", "my model", ["--served-model-name", "my model"]),
        ("DTYPE", "half", ["--dtype", "half"]),
        ("MAX_MODEL_LEN", "4096", ["--max-model-len", "4096"]),
        ("MAX_NUM_SEQS", "3", ["--max-num-seqs", "3"]),
        ("MAX_NUM_BATCHED_TOKENS", "2048", ["--max-num-batched-tokens", "2048"]),
        ("GPU_MEMORY_UTILIZATION", "0.85", ["--gpu-memory-utilization", "0.85"]),
        (
            "CUDAGRAPH_MODE",
            "PIECEWISE",
            ["--compilation-config", '{"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1,4]}'],
        ),
        ("CUDAGRAPH_MODE", "NONE", ["--enforce-eager"]),
        (
            "CAPTURE_SIZES",
            "2,8",
            [
                "--compilation-config",
                '{"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [2,8]}',
            ],
        ),
        ("PREFIX_CACHING", "off", ["--no-enable-prefix-caching"]),
        ("REASONING_PARSER", "deepseek_r1", ["--reasoning-parser", "deepseek_r1"]),
        ("TOOL_CALL_PARSER", "hermes", ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]),
        ("MEDIA_PATH", "/data/my media", ["--allowed-local-media-path", "/data/my media"]),
        ("LOAD_FORMAT", "safetensors", ["--load-format", "safetensors"]),
        ("TRUST_REMOTE_CODE", "true", ["--trust-remote-code"]),
    ],
)
def test_every_setting_can_be_overridden(machine: Machine, name: str, value: str, words: list[str]) -> None:
    ran = machine.run(machine.script(model()), **{name: value})
    start = ran.argv.index(words[0])
    assert ran.code == 0
    assert ran.argv[start : start + len(words)] == words


def test_every_setting_is_documented_at_the_head_and_in_the_documentation(machine: Machine) -> None:
    text = machine.script(model()).read_text()
    head = text[: text.index("set -euo pipefail")]
    page = (Path(__file__).parents[2] / "docs/launch.md").read_text()
    for setting in settings(model(), profile()):
        assert f"# {setting.name} " in head
        assert f"`{setting.name}`" in page


def test_the_port_is_passed_and_left_for_the_health_check(machine: Machine) -> None:
    ran = machine.run(machine.script(model()))
    assert ran.argv[ran.argv.index("--port") + 1] == str(machine.port)
    assert (machine.root / "tmp/duopack-serve").read_text() == f"0.0.0.0 {machine.port}\n"


def test_an_optional_setting_is_left_out_when_it_is_set_to_nothing(machine: Machine) -> None:
    ran = machine.run(machine.script(model()), REASONING_PARSER="", TOOL_CALL_PARSER="")
    assert ran.code == 0
    assert not {"--reasoning-parser", "--tool-call-parser", "--enable-auto-tool-choice"} & set(ran.argv)


def test_a_needed_setting_that_is_empty_keeps_its_default(machine: Machine) -> None:
    ran = machine.run(machine.script(model()), MAX_MODEL_LEN="", TP="")
    assert ran.argv[ran.argv.index("--max-model-len") + 1] == "16384"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "80a"),
        ("PORT", "0"),
        ("PORT", "65536"),
        ("PORT", "-1"),
        ("PORT", "080"),
        ("PORT", " 8000"),
        ("PORT", "99999999999999999999"),
        ("PORT", "a[$(touch owned)]"),
        ("TP", "3"),
        ("TP", "two"),
        ("TP", "16"),
        ("DTYPE", "bfloat16"),
        ("MAX_MODEL_LEN", "16k"),
        ("MAX_MODEL_LEN", "x[$(touch owned)0]"),
        ("MAX_NUM_SEQS", "0"),
        ("MAX_NUM_BATCHED_TOKENS", "many"),
        ("GPU_MEMORY_UTILIZATION", "90%"),
        ("GPU_MEMORY_UTILIZATION", "0"),
        ("GPU_MEMORY_UTILIZATION", "0.0"),
        ("GPU_MEMORY_UTILIZATION", "1.5"),
        ("CUDAGRAPH_MODE", "FULL_AND_PIECEWISE"),
        ("CUDAGRAPH_MODE", 'NONE", "x": "'),
        ("CAPTURE_SIZES", "1;4"),
        ("CAPTURE_SIZES", "1,4]}"),
        ("CAPTURE_SIZES", ""),
        ("PREFIX_CACHING", "maybe"),
        ("CHUNKED_PREFILL", "2"),
        ("REASONING_PARSER", "--uds"),
        ("TOOL_CALL_PARSER", "a b"),
        ("LOAD_FORMAT", "sharded"),
        ("HOST", "0.0.0.0 --uds"),
        ("TRUST_REMOTE_CODE", "ja"),
        ("QUANTIZATION", "-q"),
        ("ASCEND_RT_VISIBLE_DEVICES", "0, 1"),
        ("ASCEND_RT_VISIBLE_DEVICES", "a[$(touch owned)]"),
    ],
)
def test_a_setting_of_the_wrong_form_is_wrong_use(machine: Machine, name: str, value: str) -> None:
    ran = machine.run(machine.script(model()), **{name: value})
    assert (ran.code, ran.argv) == (2, [])
    assert ran.err.startswith(f"n9.sh: {name}")
    assert ran.err.count("\n") == 1
    assert not (machine.root / "owned").exists()


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("--port", "PORT"),
        ("--port=9", "PORT"),
        ("-tp", "TP"),
        ("--tensor_parallel_size=4", "TP"),
        ("--load-format", "LOAD_FORMAT"),
        ("--host", "HOST"),
        ("--model", "MODEL_PATH"),
    ],
)
def test_an_argument_that_the_checks_would_not_see_is_refused(
    machine: Machine, argument: str, name: str
) -> None:
    ran = machine.run(machine.script(model()), argument, "8")
    assert (ran.code, ran.argv) == (2, [])
    assert f"{name}=" in ran.err


# --- Checks of the machine --------------------------------------------------------------------------------


def refusal(ran: object) -> str:
    assert (ran.code, ran.argv) == (1, [])  # type: ignore[attr-defined]
    text: str = ran.err  # type: ignore[attr-defined]
    assert text.startswith("n9.sh: ")
    assert text.count("\n") == 1
    return text


def test_too_few_chips_are_refused(machine: Machine) -> None:
    machine.chips(1)
    text = refusal(machine.run(machine.script(model())))
    assert "TP=2 needs 2 chips, and 1 are visible" in text
    assert "--runtime=ascend" in text


def test_only_numbered_nodes_are_chips(machine: Machine) -> None:
    machine.chips(1)
    machine.write("dev/davinci1_backup", "")
    machine.write("dev/davincix", "")
    assert "1 are visible" in refusal(machine.run(machine.script(model())))


def test_chips_with_high_host_numbers_are_counted(machine: Machine) -> None:
    machine.chips(0)
    machine.write("dev/davinci6", "")
    machine.write("dev/davinci12", "")
    assert machine.run(machine.script(model())).code == 0


def test_host_ids_in_visible_devices_are_refused_with_the_reason(machine: Machine) -> None:
    text = refusal(machine.run(machine.script(model()), ASCEND_RT_VISIBLE_DEVICES="2,3"))
    assert "inside a container ids start at 0" in text


@pytest.mark.parametrize(("value", "words"), [("0", "names 1 chips"), ("1,1", "twice"), ("0,00", "twice")])
def test_visible_devices_must_name_enough_different_chips(machine: Machine, value: str, words: str) -> None:
    assert words in refusal(machine.run(machine.script(model()), ASCEND_RT_VISIBLE_DEVICES=value))


def test_visible_devices_may_choose_among_the_chips(machine: Machine) -> None:
    machine.chips(4)
    ran = machine.run(machine.script(model()), ASCEND_RT_VISIBLE_DEVICES="1,08"[:3])
    assert ran.code == 0
    assert ran.env["ASCEND_RT_VISIBLE_DEVICES"] == "1,0"


def test_empty_visible_devices_count_as_not_set(machine: Machine) -> None:
    ran = machine.run(machine.script(model()), ASCEND_RT_VISIBLE_DEVICES="")
    assert ran.code == 0
    assert "ASCEND_RT_VISIBLE_DEVICES" not in ran.env


def test_missing_weights_are_refused(machine: Machine) -> None:
    script = machine.script(model())
    assert "no directory /nowhere" in refusal(machine.run(script, MODEL_PATH="/nowhere"))
    empty = machine.root / "empty"
    empty.mkdir()
    assert "no config.json" in refusal(machine.run(script, MODEL_PATH=str(empty)))
    (empty / "config.json").write_text("{}")
    assert "no weights" in refusal(machine.run(script, MODEL_PATH=str(empty)))
    (empty / "model.safetensors").write_text("")
    assert "no weights" in refusal(machine.run(script, MODEL_PATH=str(empty)))
    (empty / "model.safetensors").write_text("weights")
    assert machine.run(script, MODEL_PATH=str(empty)).code == 0


def test_a_file_that_the_index_names_must_be_there(machine: Machine) -> None:
    (machine.weights / "model.safetensors-00002-of-00002.safetensors").unlink()
    text = refusal(machine.run(machine.script(model())))
    assert "model.safetensors.index.json names model.safetensors-00002-of-00002.safetensors" in text


def test_an_index_left_from_other_weights_is_refused(machine: Machine) -> None:
    machine.write(
        "weights/quant_model_weights.safetensors.index.json", '{"weight_map": {"a": "quant.safetensors"}}'
    )
    assert "names quant.safetensors" in refusal(machine.run(machine.script(model())))


def test_a_damaged_index_is_refused(machine: Machine) -> None:
    machine.write("weights/model.safetensors.index.json", "<html>")
    assert "damaged" in refusal(machine.run(machine.script(model())))


def test_quantized_weights_need_their_description(machine: Machine) -> None:
    script = machine.script(model(quantization=Quantization.W8A8))
    assert "no quant_model_description.json" in refusal(machine.run(script))
    ran = machine.run(script, QUANTIZATION="")
    assert ran.code == 0
    assert "--quantization" not in ran.argv
    machine.write("weights/quant_model_description.json", "{}")
    ran = machine.run(script)
    assert ran.argv[ran.argv.index("--quantization") + 1] == "ascend"


@pytest.mark.parametrize(
    ("ranks", "tp", "words"),
    [
        ((0, 1), "4", "split for 2 ranks (missing: 2 3, beyond: none)"),
        ((0, 1), "1", "split for 2 ranks (missing: none, beyond: 1)"),
        ((0, 1, 2, 3), "2", "split for 4 ranks (missing: none, beyond: 2 3)"),
        ((0,), "2", "split for 1 ranks (missing: 1, beyond: none)"),
        ((1, 2), "2", "missing: 0, beyond: 2"),
        ((), "2", "has no model-rank-"),
    ],
)
def test_weights_split_for_another_tp_are_refused(
    machine: Machine, ranks: tuple[int, ...], tp: str, words: str
) -> None:
    machine.chips(4)
    machine.shards(ranks)
    assert words in refusal(machine.run(machine.script(sharded_model()), TP=tp))


def test_weights_split_for_this_tp_start(machine: Machine) -> None:
    machine.shards((0, 1))
    machine.write("weights/model-rank-1-part-1.safetensors", "more")
    ran = machine.run(machine.script(sharded_model()))
    assert ran.code == 0
    assert ran.argv[ran.argv.index("--load-format") + 1] == "sharded_state"


def test_a_rank_with_an_empty_file_is_missing(machine: Machine) -> None:
    machine.shards((0, 1))
    machine.write("weights/model-rank-1-part-0.safetensors", "")
    assert "missing: 1" in refusal(machine.run(machine.script(sharded_model())))


def test_split_weights_need_their_load_format(machine: Machine) -> None:
    machine.shards((0, 1))
    assert "LOAD_FORMAT=sharded_state" in refusal(machine.run(machine.script(model())))


def test_more_than_two_capture_sizes_are_refused_above_tp_1(machine: Machine) -> None:
    script = machine.script(model())
    assert "at most two" in refusal(machine.run(script, CAPTURE_SIZES="1,2,4,8"))
    assert machine.run(script, CAPTURE_SIZES="1,2,4,8", TP="1").code == 0
    assert machine.run(script, CAPTURE_SIZES="1,2,4,8", CUDAGRAPH_MODE="NONE").code == 0


def test_launch_blocking_and_graphs_are_refused_together(machine: Machine) -> None:
    script = machine.script(model())
    assert "ASCEND_LAUNCH_BLOCKING" in refusal(machine.run(script, ASCEND_LAUNCH_BLOCKING="1"))
    assert machine.run(script, ASCEND_LAUNCH_BLOCKING="1", CUDAGRAPH_MODE="NONE").code == 0


def test_allocator_options_that_exclude_each_other_are_refused(machine: Machine) -> None:
    value = "expandable_segments:True,max_split_size_mb:256"
    assert "exclude" in refusal(machine.run(machine.script(model()), PYTORCH_NPU_ALLOC_CONF=value))


def test_a_port_in_use_is_refused(machine: Machine) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", machine.port))
        listener.listen()
        assert "in use" in refusal(machine.run(machine.script(model())))


def test_a_missing_vllm_is_told(machine: Machine) -> None:
    (machine.root / "bin/vllm").unlink()
    ran = machine.run(machine.script(model()), PATH="/usr/bin:/bin")
    assert "no vllm on the PATH" in refusal(ran)


def test_checks_can_be_skipped(machine: Machine) -> None:
    machine.chips(0)
    script = machine.script(model())
    ran = machine.run(script, "--port", "9", MODEL_PATH="/nowhere", TP="3", DUOPACK_SKIP_CHECKS="1")
    assert ran.code == 0
    assert ran.argv[-2:] == ["--port", "9"]


# --- Hybrid models and plain Transformers -----------------------------------------------------------------


def test_a_hybrid_gets_the_mamba_options_and_align_only_with_prefix_caching(machine: Machine) -> None:
    script = machine.script(model())
    with_prefix = machine.run(script).argv
    assert with_prefix[with_prefix.index("--mamba-ssm-cache-dtype") + 1] == "float16"
    assert with_prefix[with_prefix.index("--mamba-cache-mode") + 1] == "align"
    without = machine.run(script, PREFIX_CACHING="0").argv
    assert "--mamba-ssm-cache-dtype" in without
    assert "--mamba-cache-mode" not in without


def test_a_hybrid_s_prefix_cache_needs_chunked_prefill(machine: Machine) -> None:
    script = machine.script(model())
    assert "CHUNKED_PREFILL" in refusal(machine.run(script, CHUNKED_PREFILL="0"))
    assert machine.run(script, CHUNKED_PREFILL="0", PREFIX_CACHING="0").code == 0


def test_a_plain_transformer_never_gets_mamba_options(machine: Machine) -> None:
    script = machine.script(model(architecture=Architecture.QWEN3))
    assert not [word for word in machine.run(script).argv if word.startswith("--mamba")]
    assert "dies at its first request" in script.read_text()


def test_fusions_are_switched_off_only_where_the_base_needs_it(machine: Machine) -> None:
    old = machine.run(machine.script(model(), OLD_BASE)).argv
    assert old[old.index("--additional-config") + 1] == (
        '{"ascend_compilation_config": {"fuse_norm_quant": false, "enable_npugraph_ex": false}}'
    )
    assert "--additional-config" not in machine.run(machine.script(model(), NEW_BASE)).argv


# --- The environment --------------------------------------------------------------------------------------


def test_the_server_gets_the_guide_s_variables_unless_they_are_set(machine: Machine) -> None:
    script = machine.script(model())
    env = machine.run(script).env
    assert env["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True"
    assert env["HCCL_BUFFSIZE"] == "512"
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["OMP_PROC_BIND"] == "false"
    assert env["TASK_QUEUE_ENABLE"] == "1"
    assert env["HCCL_OP_EXPANSION_MODE"] == "HOST"
    assert machine.run(script, HCCL_BUFFSIZE="200").env["HCCL_BUFFSIZE"] == "200"


def test_one_chip_needs_no_hccl_variables(machine: Machine) -> None:
    assert not [name for name in machine.run(machine.script(model()), TP="1").env if name.startswith("HCCL")]


def test_long_lengths_are_allowed_only_above_the_model_s_own_limit(machine: Machine) -> None:
    script = machine.script(model(max_positions=40960))
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN" not in machine.run(script, MAX_MODEL_LEN="40960").env
    assert machine.run(script, MAX_MODEL_LEN="40961").env["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] == "1"
    long = machine.script(model(profile(max_model_len=53248), max_positions=40960))
    assert machine.run(long).env["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] == "1"
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN" not in machine.run(long, MAX_MODEL_LEN="8192").env


def test_careless_environment_scripts_are_sourced_without_arguments(machine: Machine) -> None:
    careless = 'false\nx=$UNSET_THING\nexport {}="args:$#:$*"\ngrep -q nothing /dev/null | cat\nreturn 3\n'
    machine.write("ascend/ascend-toolkit/set_env.sh", careless.format("SEEN_CANN"))
    machine.write("ascend/nnal/atb/set_env.sh", careless.format("SEEN_ATB"))
    ran = machine.run(machine.script(model()), "--seed", "1")
    assert (ran.code, ran.err) == (0, "")
    assert (ran.env["SEEN_CANN"], ran.env["SEEN_ATB"]) == ("args:0:", "args:0:")


def test_jemalloc_is_preloaded_only_when_the_file_is_there(machine: Machine) -> None:
    script = machine.script(model())
    library = machine.write("libjemalloc.so.2", "")
    assert machine.run(script, DUOPACK_JEMALLOC=str(library)).env["LD_PRELOAD"] == str(library)
    assert "LD_PRELOAD" not in machine.run(script, DUOPACK_JEMALLOC="/nowhere/libjemalloc.so").env
    assert "LD_PRELOAD" not in machine.run(script, DUOPACK_JEMALLOC="").env


def test_what_is_preloaded_already_is_kept_and_jemalloc_is_not_loaded_twice(machine: Machine) -> None:
    script = machine.script(model())
    library, other = machine.write("libjemalloc.so.2", ""), machine.write("libother.so", "")
    env = machine.run(script, DUOPACK_JEMALLOC=str(library), LD_PRELOAD=str(other)).env
    assert env["LD_PRELOAD"] == f"{library}:{other}"
    env = machine.run(script, DUOPACK_JEMALLOC=str(library), LD_PRELOAD=str(library)).env
    assert env["LD_PRELOAD"] == str(library)


def test_a_profile_s_variables_can_be_overridden_and_win_over_the_guide_s(machine: Machine) -> None:
    script = machine.script(model(profile(env={"HCCL_BUFFSIZE": "1024", "MY_MODE": "a 'b' $(touch owned)"})))
    env = machine.run(script).env
    assert (env["HCCL_BUFFSIZE"], env["MY_MODE"]) == ("1024", "a 'b' $(touch owned)")
    assert machine.run(script, MY_MODE="").env["MY_MODE"] == ""
    assert not (machine.root / "owned").exists()


def test_a_read_only_temporary_directory_does_not_stop_the_start(machine: Machine) -> None:
    assert machine.run(machine.script(model()), TMPDIR="/proc/nowhere").code == 0


# --- Signals and exit codes -------------------------------------------------------------------------------


def test_the_exit_code_is_the_server_s(machine: Machine) -> None:
    assert machine.run(machine.script(model()), FAKE_EXIT="42").code == 42


def test_the_server_is_the_process_that_was_started_and_gets_its_signals(machine: Machine) -> None:
    script = machine.script(model())
    process = subprocess.Popen([script], env=machine.environ({"FAKE_WAIT": "1"}), cwd=machine.root)
    pid_file = machine.root / "out/pid"
    try:
        deadline = time.monotonic() + 10
        while not pid_file.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert int(pid_file.read_text()) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


# --- Values are data --------------------------------------------------------------------------------------

hostile = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=40)
nasty = hostile | st.sampled_from(
    [
        "$(touch owned)",
        "`touch owned`",
        "'; touch owned; '",
        '"; touch owned; "',
        "}; touch owned; {",
        "${HOME}",
        "\\",
    ]
)


@hypothesis_settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(title=nasty, note=nasty, value=nasty, argument=nasty)
def test_text_of_the_catalog_never_runs(
    machine: Machine, title: str, note: str, value: str, argument: str
) -> None:
    one = profile(
        note=note, env={"MY_VALUE": value}, args=(f"--tokenizer={argument}",), media_path=f"/m{value}"
    )
    ran = machine.run(machine.script(model(one, title=title)))
    assert (ran.code, ran.err) == (0, "")
    assert ran.env["MY_VALUE"] == value
    assert ran.argv[-1] == f"--tokenizer={argument}"
    assert ran.argv[ran.argv.index("--allowed-local-media-path") + 1] == f"/m{value}"
    assert not (machine.root / "owned").exists()


@pytest.mark.parametrize("value", ["a b", "$(touch owned)", "`touch owned`", "a\nb", "'\"", "*", "\\", "-x"])
def test_values_of_the_environment_are_passed_as_they_are(machine: Machine, value: str) -> None:
    ran = machine.run(machine.script(model()), value, SERVED_MODEL_NAME=value, MEDIA_PATH=value)
    assert ran.code == 0
    assert ran.argv[ran.argv.index("--served-model-name") + 1] == value
    assert ran.argv[ran.argv.index("--allowed-local-media-path") + 1] == value
    assert ran.argv[-1] == value
    assert not (machine.root / "owned").exists()


def test_what_a_refusal_shows_is_one_line_without_control_characters(machine: Machine) -> None:
    text = refusal(machine.run(machine.script(model()), MODEL_PATH="/no\n\x1b[2Jwhere"))
    assert "\x1b" not in text


def test_the_list_prints_its_lines_as_they_are(machine: Machine) -> None:
    script = machine.write("list.sh", list_script(["a 'b' $(touch owned)", "", "\x1b[31m"]), 0o755)
    assert machine.run(script).out == "a 'b' $(touch owned)\n\n\\x1b[31m\n"
    assert not (machine.root / "owned").exists()


# --- The health check -------------------------------------------------------------------------------------


HANG_UP = b"\r\n"  # answers nothing of use and closes at once, without reading the request


@pytest.fixture
def answering(machine: Machine) -> Iterator[list[bytes]]:
    """A server on the machine's port that gives the answer in the list's first place to each request."""
    answers = [b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"]
    with socket.create_server(("127.0.0.1", machine.port)) as listener:
        listener.settimeout(0.1)
        stop = threading.Event()
        requests: list[bytes] = []

        def serve() -> None:
            while not stop.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with connection:
                    request = b""
                    while answers[0] is not HANG_UP and not request.endswith(b"\r\n\r\n"):
                        received = connection.recv(4096)
                        if not received:
                            break
                        request += received
                    requests.append(request)
                    connection.sendall(answers[0])

        thread = threading.Thread(target=serve)
        thread.start()
        yield answers
        stop.set()
        thread.join()
    assert all(request.startswith(b"GET /health HTTP/1.1\r\nHost: ") for request in requests if request)


def test_the_health_check_finds_the_port_that_was_really_used(
    machine: Machine, answering: list[bytes]
) -> None:
    check = machine.healthcheck(1)
    machine.write("tmp/duopack-serve", f"0.0.0.0 {machine.port}\n")
    assert machine.run(check, PORT="2").code == 0


def test_the_health_check_takes_the_port_variable_or_the_default(
    machine: Machine, answering: list[bytes]
) -> None:
    assert machine.run(machine.healthcheck(machine.port), PORT=None).code == 0
    assert machine.run(machine.healthcheck(1)).code == 0


@pytest.mark.parametrize("answer", [b"HTTP/1.1 500 no\r\n\r\n", b"", b"\x00\xff\r\n", b"200\r\n", HANG_UP])
def test_any_other_answer_is_sick(machine: Machine, answering: list[bytes], answer: bytes) -> None:
    answering[0] = answer
    ran = machine.run(machine.healthcheck(machine.port))
    assert ran.code == 1
    assert ran.out.startswith("unhealthy: ")


def test_nothing_listening_is_sick(machine: Machine) -> None:
    ran = machine.run(machine.healthcheck(machine.port))
    assert (ran.code, ran.out) == (1, f"unhealthy: nothing listens on 127.0.0.1 port {machine.port}\n")


@pytest.mark.parametrize(
    "state", ["", "x", "127.0.0.1/../../etc 1", "a$(touch${IFS}owned) 80", "127.0.0.1 80x"]
)
def test_a_damaged_state_file_is_sick(machine: Machine, state: str) -> None:
    machine.write("tmp/duopack-serve", state)
    ran = machine.run(machine.healthcheck(machine.port))
    assert ran.code == 1
    assert "no address" in ran.out
    assert not (machine.root / "owned").exists()
