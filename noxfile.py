"""What people and CI call. `nox -l` lists it; the sessions for models are made from models.yaml.

Every session works in one environment, .venv, which scripts/bootstrap.py keeps up to date; a nox from
elsewhere hands over to the one in there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))

import bootstrap  # noqa: E402

if Path(sys.prefix).resolve() != bootstrap.VENV.resolve():
    if problem := bootstrap.ensure("nox"):
        sys.exit(problem)
    os.environ["DUOPACK_VENV"] = str(bootstrap.VENV)
    os.execv(bootstrap.PYTHON, [str(bootstrap.PYTHON), "-m", "nox", *sys.argv[1:]])

import nox  # noqa: E402

sys.path.insert(0, str(ROOT))

from pipeline.catalog.load import load_catalog  # noqa: E402
from pipeline.catalog.target import build_keys  # noqa: E402
from pipeline.errors import DuopackError  # noqa: E402

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["tests", "lint"]

try:
    CATALOG = load_catalog(ROOT / "models.yaml")
except DuopackError as error:
    sys.exit(str(error))

VLLM_TESTS = [f"tests/e2e/test_{name}.py" for name in ("shard_vllm", "serve_options", "diagnose_vllm")]
BIN = bootstrap.VENV / "bin"


def run(session: nox.Session, *command: str, groups: tuple[str, ...] = ("nox",)) -> None:
    """Runs a program of .venv with duopack's own environment first on PATH."""
    if problem := bootstrap.ensure(*groups):
        session.error(problem)
    path = f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    session.run(str(BIN / command[0]), *command[1:], external=True, env={"PATH": path})


@nox.session
def demo(session: nox.Session) -> None:
    """The whole job on a tiny model in about a minute: no docker, no registry, offline."""
    run(session, "duopack", "demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Unit tests: no root, no docker, no network."""
    run(session, "python", "-m", "pytest", *session.posargs, groups=("nox", "test"))


@nox.session
def e2e(session: nox.Session) -> None:
    """Tests against a real docker-registry, dockerd and skopeo (root; .ci/run installs them)."""
    run(session, "python", "-m", "pytest", "tests/e2e", *session.posargs, groups=("nox", "test"))


@nox.session
def e2e_vllm(session: nox.Session) -> None:
    """The same against a real vLLM 0.20.2 on this CPU: shards, options, logs (7 GB, made once; x86_64)."""
    directory = Path(os.environ.get("DUOPACK_VLLM", ROOT / ".nox" / "vllm"))
    run(session, "python", "scripts/make_vllm_cpu.py", str(directory), groups=("nox", "test"))
    os.environ["DUOPACK_VLLM"] = str(directory)
    run(session, "python", "-m", "pytest", *VLLM_TESTS, *session.posargs, groups=("nox", "test"))


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy --strict, shellcheck, shfmt, hadolint, zizmor."""
    groups = ("nox", "test", "lint")
    # The start scripts are made from templates: the unit tests give those to shellcheck.
    scripts = [".ci/run", *(str(path) for path in sorted(Path("pipeline").rglob("*.sh")))]
    dockerfiles = [str(path) for path in sorted(Path("dockerfiles").glob("Dockerfile*"))]
    run(session, "ruff", "check", ".", groups=groups)
    run(session, "ruff", "format", "--check", ".", groups=groups)
    run(session, "mypy", groups=groups)
    run(session, "shellcheck", *scripts, groups=groups)
    run(session, "shfmt", "-d", "-i", "2", "-ci", *scripts, groups=groups)
    run(session, "hadolint", *dockerfiles, groups=groups)
    run(session, "zizmor", "--offline", "--quiet", ".github/workflows", groups=groups)


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks against docker, buildah and the raw limit, in one run (root)."""
    run(session, "python", "benchmarks/push.py", *session.posargs, groups=("nox", "test"))


@nox.session
def lock(session: nox.Session) -> None:
    """Resolve models.yaml into models.lock; `nox -s lock -- --update` takes what moved."""
    run(session, "duopack", "lock", *session.posargs)


@nox.session
def matrix(session: nox.Session) -> None:
    """The keys to release and the chips each needs, as a GitHub Actions output; keys as arguments, or all."""
    keys = build_keys(CATALOG)
    unknown = set(session.posargs) - {row.key for row in keys}
    if unknown:
        session.error(f"no such key: {', '.join(sorted(unknown))}")
    rows = [
        {"key": row.key, "chips": row.chips}
        for row in keys
        if not session.posargs or row.key in session.posargs
    ]
    line = f"matrix={json.dumps({'include': rows})}\n"
    with Path(os.environ.get("GITHUB_OUTPUT", "/dev/stdout")).open("a") as output:
        output.write(line)


def model_session(verb: str, key: str, text: str) -> Callable[[nox.Session], None]:
    def body(session: nox.Session) -> None:
        run(session, "duopack", verb, key, *session.posargs)

    body.__doc__ = text
    return body


VERBS = ("build", "smoke", "publish")

for row in build_keys(CATALOG):
    for verb in VERBS:
        text = f"{verb.capitalize()} {row.description}"
        nox.session(model_session(verb, row.key, text), name=f"{verb}-{row.key}")

# A script's name is a key too (build-nn9 is build-9b-w8a8): made when asked for, so that `nox -l` stays short.
for name in {name for model in CATALOG.models.values() for name in model.profiles} - {
    row.key for row in build_keys(CATALOG)
}:
    for verb in VERBS:
        if f"{verb}-{name}" in sys.argv:
            nox.session(
                model_session(verb, name, f"{verb.capitalize()} {name}.sh's image"), name=f"{verb}-{name}"
            )
