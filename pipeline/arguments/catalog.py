"""What reads models.yaml: show it, lock it, judge it."""

from __future__ import annotations

from pathlib import Path

from pipeline.arguments.common import PLATFORMS, Add


def add_commands(add: Add) -> None:
    add("list", "show the models, sets and profiles of the catalog", module="list_models")

    add("schema", "print the JSON schema of models.yaml, for editors", json_output=False)

    lock = add("lock", "resolve files and base digests into models.lock, and show what has moved")
    lock.add_argument("keys", nargs="*", metavar="KEY", help="models to lock (default: all, and all bases)")
    how = lock.add_mutually_exclusive_group()
    how.add_argument(
        "--update", action="store_true", help="take what has moved, and drop what left the catalog"
    )
    how.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when anything is stale or has moved"
    )
    lock.add_argument(
        "--source",
        metavar="SRC",
        help="take the file list from here: modelscope:ID[@REV], huggingface:ID[@REV], dir:PATH",
    )

    check = add("check", "judge models by the rules for 310P, without building")
    check.add_argument("keys", nargs="*", metavar="KEY", help="models to judge (default: all)")
    check.add_argument("--base", metavar="NAME", help="a base of the catalog (default: its default_base)")
    check.add_argument(
        "--script", metavar="FILE", help="judge the commands in this shell script instead; - is stdin"
    )
    check.add_argument(
        "--command", dest="line", metavar="'…'", help="judge this `vllm serve` or `docker run` instead"
    )
    check.add_argument(
        "--fix", action="store_true", help="with --script or --command: print the corrected commands"
    )
    check.add_argument(
        "--weights", metavar="DIR", type=Path, help="judge this directory of quantized weights instead"
    )
    check.add_argument(
        "--repair", action="store_true", help="with --weights: repair what can be repaired without the source"
    )

    check.add_argument(
        "--shards", metavar="DIR", type=Path, help="judge this directory of weights split per rank instead"
    )
    check.add_argument("--tp", type=int, metavar="N", help="with --shards: the ranks it will be served with")

    add("rules", "print what is known of versions and the chip: every rule with its source")

    budget = add(
        "budget", "say whether a model fits into the chips' memory, and what it leaves for the KV cache"
    )
    budget.add_argument("keys", nargs="*", metavar="KEY", help="models or profiles (default: all models)")
    budget.add_argument("--tp", type=int, choices=(1, 2, 4, 8), help="chips (default: the profile's)")
    budget.add_argument("--max-model-len", type=int, metavar="N", help="tokens (default: the profile's)")
    budget.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences (default: the profile's)")
    budget.add_argument(
        "--utilization", type=float, metavar="X", help="share of the memory (default: the profile's)"
    )
    budget.add_argument("--base", metavar="NAME", help="a base of the catalog (default: its default_base)")
    budget.add_argument(
        "--source", metavar="SRC", help="read the headers from here: modelscope:ID, huggingface:ID, dir:PATH"
    )
    budget.add_argument(
        "--offline", action="store_true", help="ask no hub: files here, or the published dimensions"
    )
    budget.add_argument(
        "--compare", action="store_true", help="1, 2 and 4 chips, float and W8A8, side by side"
    )
    budget.add_argument("--svg", type=Path, metavar="FILE", help="draw it too")

    bases = add("bases", "show the bases of the catalog and what they can do, or build one from a checkout")
    bases.add_argument("action", nargs="?", choices=("build",), help="make a base with docker, and lock it")
    bases.add_argument("--tags", action="store_true", help="the tags of the bases' repositories too")
    bases.add_argument(
        "--source", type=Path, metavar="DIR", help="build: a checkout of vllm-ascend with its Dockerfile"
    )
    bases.add_argument("--name", metavar="KEY", help="build: the base's key (default: local)")
    bases.add_argument("--file", metavar="NAME", help="build: default: Dockerfile.310p.openEuler")
    bases.add_argument(
        "--platform", metavar="OS/ARCH", choices=PLATFORMS, help="build: default: the catalog's"
    )
    bases.add_argument(
        "--build-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="build: an ARG of the Dockerfile",
    )
    bases.add_argument("--network", choices=("host", "none"), help="build: what its RUN steps reach")
    bases.add_argument(
        "--builder",
        choices=("docker", "docker-classic"),
        default="docker",
        help="build: BuildKit (default), or the classic builder",
    )

    scripts = add(
        "scripts", "write the start scripts and launch.json of a model, as they will be in the image"
    )
    scripts.add_argument("key", metavar="KEY")
    scripts.add_argument("--base", metavar="NAME", help="a base of the catalog")
    scripts.add_argument("--to", metavar="DIR", type=Path, required=True)
