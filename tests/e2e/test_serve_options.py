"""The commands of the catalog, parsed by vLLM's own parser.

DUOPACK_VLLM is the directory of a virtual environment with vLLM 0.20.2 (`nox -s e2e_vllm` makes one).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from pipeline.ascend.options import load_table
from pipeline.ascend.serve import arguments, command, defaults, settings
from pipeline.catalog.load import load_catalog

pytestmark = pytest.mark.e2e

VLLM = os.environ.get("DUOPACK_VLLM")
PYTHON = f"{VLLM}/bin/python"
PARSE = """
import json, sys
from vllm import __version__
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
serve = ServeSubcommand()
serve.subparser_init(parser.add_subparsers(dest="subparser"))
parsed = {}
for name, words in json.load(sys.stdin).items():
    try:
        namespace = parser.parse_args(["serve", *words])
        serve.validate(namespace)
        seen = (namespace.model_tag, namespace.tensor_parallel_size, namespace.port, namespace.max_model_len)
        parsed[name] = seen
    except SystemExit:
        parsed[name] = None
print(json.dumps({
    "version": __version__,
    "parsed": parsed,
    "--reasoning-parser": ReasoningParserManager.list_registered(),
    "--tool-call-parser": ToolParserManager.list_registered(),
}))
"""


@pytest.mark.skipif(not VLLM, reason="DUOPACK_VLLM is not set")
def test_vllm_s_own_parser_takes_every_command_and_refuses_a_wrong_one() -> None:
    catalog = load_catalog(Path(__file__).parents[2] / "models.yaml")
    base = next(base for base in catalog.bases.values() if base.vllm == "0.20.2")
    commands = {"wrong": ["/models/m", "--wrong", "1"]}
    expected: dict[str, list[object] | None] = {"wrong": None}
    variants = {
        "": {},
        "-eager": {
            "CUDAGRAPH_MODE": "NONE",
            "PREFIX_CACHING": "0",
            "MEDIA_PATH": "/m",
            "TRUST_REMOTE_CODE": "1",
        },
    }
    for one in catalog.models.values():
        for name, profile in one.profiles.items():
            for suffix, changes in variants.items():
                values = defaults(settings(one, profile)) | changes
                commands[name + suffix] = arguments(command(one, profile, base), values)
                expected[name + suffix] = [
                    values["MODEL_PATH"],
                    profile.tensor_parallel,
                    profile.port,
                    profile.max_model_len,
                ]
    done = subprocess.run(
        [PYTHON, "-c", PARSE],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["version"].startswith("0.20.2")
    assert seen["parsed"] == expected
    table = load_table("0.20.2").by_flag
    for flag in ("--reasoning-parser", "--tool-call-parser"):
        assert set(table[flag].choices or ()) == set(seen[flag])
