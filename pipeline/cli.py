"""The command line: arguments in, exit code out; what the commands do is in `pipeline.commands`."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from pipeline import __version__
from pipeline.errors import DuopackError, UsageError, quoted

DESCRIPTION = "From a line in models.yaml to a verified, ready-to-serve Qwen image for Atlas 300I Duo (310P)."
INTERRUPTED = 130
PLATFORMS = ("linux/arm64", "linux/amd64")
EPILOG = """\
DEST and IMAGE are written as skopeo does:
  docker://HOST/REPOSITORY[:TAG]   a registry          oci:DIR[:TAG]              an OCI layout
  docker-archive:FILE[:NAME:TAG]   for 'docker load'   docker-daemon:NAME:TAG     the local engine
Exit codes: 0 done, 1 a check or a stage failed, 2 wrong use, 130 interrupted.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; errors go to stderr in one paragraph, results to stdout."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        # A file name that is no UTF-8, or a terminal that has no Chinese, must not end a build.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        options = make_parser().parse_args(words)
    except UsageError as error:
        return _fail(error, "", as_json="--json" in words)
    # A CI runner ends a job with SIGTERM: leave as cleanly as on Ctrl-C.
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run(options)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(options: argparse.Namespace) -> int:
    """The command's exit code; whatever it raises becomes a paragraph and a code."""
    try:
        command = importlib.import_module(f"pipeline.commands.{options.module}")
        code: int = command.run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        ended = DuopackError("interrupted: what is complete is kept, the same command goes on from there")
        _fail(ended, options.command, as_json=options.json)
        return INTERRUPTED
    except BrokenPipeError as error:
        if _drop_streams_without_reader():
            # Whoever read our output left (`duopack list | head`): nothing to say, and nowhere to say it.
            return 1
        fault: Exception = error
    except Exception as error:
        fault = error
    if options.debug:
        traceback.print_exception(fault)
    return _fail(_told(fault, options.command), options.command, as_json=options.json)


def _told(fault: Exception, command: str) -> DuopackError:
    """Any failure as the paragraph that a person reads."""
    if isinstance(fault, DuopackError):
        return fault
    hint = "run it again with --debug to see where it happened"
    if isinstance(fault, OSError):
        name = str(fault.filename) if fault.filename else ""
        return DuopackError(quoted(fault.strerror or str(fault)), where=quoted(name), mend=hint)
    what = f"a fault of duopack itself: {type(fault).__name__}: {quoted(str(fault), 400)}"
    return DuopackError(what, where=command, mend=f"{hint}, and report that")


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="duopack",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"duopack {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")

    def add(
        name: str, text: str, *, module: str | None = None, json_output: bool = True
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(module=module or name)
        command.add_argument(
            "--catalog", type=Path, metavar="FILE", help="the catalog (default: models.yaml)"
        )
        command.add_argument(
            "--work", type=Path, metavar="DIR", help="where downloads and images go (default: build)"
        )
        command.add_argument("--quiet", action="store_true", help="only warnings and the result")
        command.add_argument("--debug", action="store_true", help="show a traceback on errors")
        if json_output:
            command.add_argument("--json", action="store_true", help="the result as JSON on stdout")
        else:
            command.set_defaults(json=False)
        return command

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

    doctor = add("doctor", "look whether this host can run an image: chips, driver, docker, disk, network")
    doctor.add_argument("key", nargs="?", metavar="KEY", help="the model that it shall run (default: any)")
    doctor.add_argument("--base", metavar="NAME", help="a base of the catalog (default: its default_base)")
    doctor.add_argument(
        "--from", dest="captures", type=Path, metavar="DIR", help="judge another host by its captures"
    )
    doctor.add_argument("--collect", type=Path, metavar="DIR", help="write the captures too, secrets removed")
    doctor.add_argument("--offline", action="store_true", help="reach for no registry and no hub")

    start = add("run", "start an image on chosen chips, or print what would start it")
    start.add_argument(
        "image", metavar="IMAGE|KEY", help="an image of duopack's, or a key (where it is published)"
    )
    start.add_argument(
        "--chips",
        metavar="N,N",
        help="host ids: 2,3 or 0-3; auto takes free ones, of one card if it can (default)",
    )
    start.add_argument(
        "--profile", metavar="NAME", help="another start script of the image (default: its own)"
    )
    start.add_argument("--port", type=int, metavar="N", help="the port on this host (default: the profile's)")
    start.add_argument("--name", metavar="S", help="the container's name (default: vllm-ascend-SERVED_NAME)")
    start.add_argument("--memory", metavar="G", help="limit of host memory in GiB, or with a unit: 250g")
    start.add_argument(
        "--restart", metavar="POLICY", default="unless-stopped", help="default: unless-stopped"
    )
    start.add_argument(
        "--env",
        action="append",
        metavar="NAME=VALUE",
        help="a setting of the start script, e.g. MAX_MODEL_LEN=16384",
    )
    start.add_argument("--print", action="store_true", help="print the docker command, and start nothing")
    start.add_argument(
        "--compose", metavar="FILE", help="write a compose file, and start nothing; - is stdout"
    )
    start.add_argument(
        "--k8s", metavar="FILE", help="write Kubernetes objects, and start nothing; - is stdout"
    )
    start.add_argument(
        "--no-runtime",
        action="store_true",
        help="with --print or --compose: map devices and driver, not by the runtime",
    )
    start.add_argument(
        "--platform",
        metavar="OS/ARCH",
        choices=PLATFORMS,
        default=PLATFORMS[0],
        help="with --print, --compose or --k8s: where it will run (default: linux/arm64)",
    )

    add("ps", "show which container serves what on which chips, and what is wrong about it")

    add("rules", "print what is known of versions and the chip: every rule with its source")

    scripts = add(
        "scripts", "write the start scripts and launch.json of a model, as they will be in the image"
    )
    scripts.add_argument("key", metavar="KEY")
    scripts.add_argument("--base", metavar="NAME", help="a base of the catalog")
    scripts.add_argument("--to", metavar="DIR", type=Path, required=True)

    build = add("build", "build images: download, check, layer, and send in one pass")
    build.add_argument(
        "keys", nargs="*", metavar="KEY", help="a model, a profile (nn27) or a set of the catalog"
    )
    build.add_argument("--all", action="store_true", help="every model of the catalog in one image")
    build.add_argument(
        "--profile",
        metavar="NAME",
        help="the start script that is the image's command (default: the first; a set lists its models)",
    )
    build.add_argument(
        "--to",
        metavar="DEST",
        help="where the image goes (default: the catalog's registry, or oci:build/KEY)",
    )
    build.add_argument(
        "--source",
        metavar="SRC",
        help="take the weights from here instead: modelscope:ID, huggingface:ID, dir:PATH",
    )
    build.add_argument(
        "--base", metavar="REF", help="a base of the catalog by name, or any image: docker://…, oci:DIR"
    )
    build.add_argument(
        "--platform",
        metavar="OS/ARCH[,…]",
        help="linux/arm64, linux/amd64, both with a comma, or all (default: the catalog's)",
    )
    build.add_argument(
        "--builder",
        choices=("duopack", "docker", "docker-classic"),
        default="duopack",
        help="docker: 'docker build' in the local engine, by BuildKit (or the classic builder)",
    )
    build.add_argument(
        "--locked", action="store_true", help="refuse what models.lock does not hold already (for CI)"
    )
    build.add_argument("--dry-run", action="store_true", help="show what would be in the image, and stop")

    quantize = add("quantize", "quantize a directory of float weights for 310P into another directory")
    quantize.add_argument("src", metavar="SRC", type=Path, help="float weights, as from the hub; only read")
    quantize.add_argument("dst", metavar="DST", type=Path, help="where the quantized weights go")
    quantize.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        default="w8a8-dynamic",
        help="w8a8-dynamic (default), w8a8-static, w8a8sc, or a YAML file for msmodelslim",
    )
    quantize.add_argument(
        "--engine",
        choices=("auto", "streaming", "msmodelslim", "w8a8sc"),
        default="auto",
        help="auto (default): streaming where it covers the recipe, else msmodelslim",
    )
    quantize.add_argument(
        "--device",
        choices=("auto", "cpu", "npu"),
        default="auto",
        help="for msmodelslim: npu is the base image with the chips; auto: npu where docker and chips are",
    )
    quantize.add_argument("--tp", metavar="N", type=int, default=2, help="for w8a8sc: the ranks (default: 2)")
    quantize.add_argument(
        "--allow-nonfinite", action="store_true", help="take weights with infinite values or NaN all the same"
    )

    shard = add("shard", "split a directory of weights, one file set per tensor-parallel rank")
    shard.add_argument("src", metavar="SRC", type=Path, help="float or quantized weights; only read")
    shard.add_argument("dst", metavar="DST", type=Path, help="where the ranks' files and the side files go")
    shard.add_argument("--tp", metavar="N", type=int, required=True, help="the number of ranks: 1, 2, 4 or 8")
    shard.add_argument(
        "--platform",
        choices=("310p", "cpu"),
        default="310p",
        help="whose key set: vllm-ascend's on 310P (default), or plain vLLM's",
    )
    shard.add_argument("--vllm", metavar="VERSION", default="0.20.2", help="the server's version (0.20.2)")

    publish = add("publish", "copy a built image to a registry, byte for byte")
    publish.add_argument("image", metavar="KEY|IMAGE", help="a key (its image in oci:build/KEY), or an image")
    publish.add_argument("--to", metavar="DEST", help="default: where the catalog or DUOPACK_REGISTRY says")
    publish.add_argument(
        "--from-registry", metavar="HOST/NAMESPACE", help="take the key's image from here, not from build/"
    )
    publish.add_argument("--base", metavar="NAME", help="the base that the image was built on")
    publish.add_argument("--platform", metavar="OS/ARCH", choices=PLATFORMS, help="its platform")

    verify = add("verify", "judge an image where it lies: what it is, and whether it will serve")
    verify.add_argument(
        "image", metavar="KEY|IMAGE", help="an image, or a key (where its image is published)"
    )
    _add_looking(verify)
    verify.add_argument(
        "--locked", action="store_true", help="every difference from models.lock is an error (for CI)"
    )

    inspect = add("inspect", "show what is in an image and what it weighs; with two, what differs")
    inspect.add_argument(
        "image", metavar="KEY|IMAGE", help="an image, or a key (where its image is published)"
    )
    inspect.add_argument(
        "other", nargs="?", metavar="IMAGE2", help="compare with this one, as an update to it"
    )
    _add_looking(inspect)

    smoke = add(
        "smoke", "ask a running server, or an image started on Ascend chips, to prove that it answers"
    )
    smoke.add_argument("key", metavar="KEY", help="what should be served")
    smoke.add_argument(
        "--url",
        metavar="URL",
        help="a running server (default: DUOPACK_SMOKE_URL; else a container is started)",
    )
    smoke.add_argument(
        "--image",
        metavar="NAME:TAG",
        help="the image to start, as the engine knows it (default: where the key is published)",
    )
    smoke.add_argument(
        "--chips", metavar="N,N", help="host ids of the chips (default: DUOPACK_CHIPS, else the first ones)"
    )
    smoke.add_argument("--start-limit", metavar="MINUTES", type=float, default=60.0, help="default: 60")

    _diagnosing(add)
    _bases(add)
    _carrying(add)
    add("demo", "the whole job on a tiny model, offline, in about a minute")
    return parser


def _diagnosing(add: Callable[..., argparse.ArgumentParser]) -> None:
    """The commands that look at a server as it runs, or as it ran."""
    diagnose = add("diagnose", "say from a server's log what went wrong first, and how to mend it")
    what = diagnose.add_mutually_exclusive_group(required=True)
    what.add_argument("log", nargs="?", metavar="LOG|CONTAINER|-", help="a file, a container, or stdin")
    what.add_argument("--table", action="store_true", help="print the table of known failures instead")

    bench = add("bench", "measure how fast a running server answers, at several requests at a time")
    bench.add_argument("url", metavar="URL", help="a running server, http://HOST:PORT")
    bench.add_argument("--concurrency", default="1,2,4,8", metavar="N,N", help="default: 1,2,4,8")
    bench.add_argument("--input-tokens", type=int, default=512, metavar="N", help="default: 512")
    bench.add_argument("--output-tokens", type=int, default=128, metavar="N", help="default: 128")
    bench.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="at each concurrency (default: 4 for each place, at least 8)",
    )
    bench.add_argument("--model", metavar="NAME", help="a served name (default: the first)")
    bench.add_argument(
        "--with",
        dest="tool",
        choices=("auto", "own", "vllm"),
        default="auto",
        help="what makes the requests: 'vllm bench serve' where it is on PATH, or duopack itself",
    )
    bench.add_argument("--container", metavar="NAME", help="run 'vllm bench serve' in the server's container")
    bench.add_argument(
        "--seed", type=int, metavar="N", help="of the prompts (default: another one each time)"
    )
    bench.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")
    bench.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    bench.add_argument(
        "--baseline",
        type=Path,
        metavar="FILE",
        help="an earlier result; exit 1 when output is slower than it",
    )
    bench.add_argument(
        "--tolerance", type=float, default=0.05, metavar="X", help="share that may be lost (default: 0.05)"
    )


def _bases(add: Callable[..., argparse.ArgumentParser]) -> None:
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


def _carrying(add: Callable[..., argparse.ArgumentParser]) -> None:
    """The commands that carry images to where there is no network."""
    export = add("export", "write images into one archive, parts or a layout, to be carried elsewhere")
    export.add_argument(
        "images",
        nargs="+",
        metavar="KEY|IMAGE",
        help="keys (their images where 'build' puts them), or images",
    )
    export.add_argument(
        "to", metavar="FILE.tar|DIR", help="an archive for 'docker load', or a directory: an OCI layout"
    )
    export.add_argument(
        "--split",
        metavar="SIZE",
        help="DIR gets the archive in parts of this size (4095M), with checksums and a script that loads them",
    )
    export.add_argument(
        "--since",
        action="append",
        default=[],
        metavar="IMAGE",
        help="leave out layers of this image, which the other side has",
    )
    export.add_argument("--as", dest="name", metavar="NAME:TAG", help="the image's name on the other side")
    export.add_argument("--platform", metavar="OS/ARCH", choices=PLATFORMS, help="which image of several")

    bring = add(
        "import", "bring what 'duopack export' made into a registry or an engine", module="import_images"
    )
    bring.add_argument("path", type=Path, metavar="FILE|DIR")
    bring.add_argument("--to", metavar="DEST", help="where one image goes (default: the engine, by its name)")
    bring.add_argument(
        "--under",
        metavar="HOST/NAMESPACE",
        help="the registry for all of them (default: DUOPACK_REGISTRY)",
    )
    bring.add_argument(
        "--image", action="append", default=[], metavar="NAME", help="only this one (can be given again)"
    )
    bring.add_argument(
        "--have",
        action="append",
        default=[],
        metavar="IMAGE",
        help="an image in the same registry whose layers may be taken (can be given again)",
    )
    bring.add_argument("--platform", metavar="OS/ARCH", choices=PLATFORMS, help="which image of several")


def _add_looking(command: argparse.ArgumentParser) -> None:
    """What the commands that look into an image have in common."""
    command.add_argument("--deep", action="store_true", help="read, hash and check every byte")
    command.add_argument(
        "--platform", metavar="OS/ARCH", help="one image of several platforms (default: each of them)"
    )
    command.add_argument("--base", metavar="IMAGE", help="the base image, to tell its layers from the others")
    command.add_argument(
        "--limit", metavar="NAME=N", action="append", help="raise a bound on time or memory: seconds=3600"
    )


def _fail(error: DuopackError, command: str, *, as_json: bool) -> int:
    kind = "wrong use" if isinstance(error, UsageError) else "error"
    with suppress(OSError):
        if as_json:
            from pipeline.reports.output import print_json

            print_json({"error": {"what": error.what, "where": error.where, "mend": error.mend}})
            sys.stdout.flush()
        sys.stderr.write(f"{f'duopack {command}'.rstrip()}: {kind}: {error}\n")
        sys.stderr.flush()
    return error.exit_code


def _drop_streams_without_reader() -> bool:
    """Points stdout and stderr, where nobody reads them any more, to nowhere; returns whether one was so."""
    dropped = False
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            poll = select.poll()
            poll.register(stream.fileno(), select.POLLOUT)
            if any(events & select.POLLERR for _, events in poll.poll(0)):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                dropped = True
    return dropped


class _Parser(argparse.ArgumentParser):
    """Wrong arguments are a UsageError like any other wrong use, so that --json holds for them too."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, mend=f"see '{self.prog} --help'")


def _interrupt(number: int, frame: object) -> NoReturn:
    del number, frame
    raise KeyboardInterrupt
