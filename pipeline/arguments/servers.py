"""What concerns a host, a container or a running server."""

from __future__ import annotations

from pathlib import Path

from pipeline.arguments.common import PLATFORMS, Add


def add_commands(add: Add) -> None:
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

    add("demo", "the whole job on a tiny model, offline, in about a minute")
