"""Who brings the weights to a registry: duopack, docker, buildah, and curl, which only sends bytes.

Each contender gets the address of an empty registry and a directory of its own, which is removed after the run.
What it needs beforehand (an engine that runs, a lock) is made outside of the measured time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol
from urllib.parse import urlencode, urlsplit

from material import KEY, Material
from measure import BenchError, CountingProxy, Sample, disk_usage, peak_memory, run

REPOSITORY = "bench/bench"


class Contender(Protocol):
    """Someone who can bring the material to the registry at `host`."""

    @property
    def name(self) -> str: ...

    def missing(self) -> str | None:
        """What this machine lacks for it, or None."""
        ...

    def push(self, host: str, directory: Path) -> dict[str, Sample]:
        """Brings everything to the registry; samples by what they are of."""
        ...


def lacks(*programs: str) -> str | None:
    absent = [program for program in programs if not shutil.which(program)]
    return f"{', '.join(absent)} is not installed" if absent else None


def clean_environment() -> dict[str, str]:
    """Ours without what points at registries or proxies, or keeps Python from using compiled modules."""
    ignored = ("DUOPACK_", "DOCKER_", "REGISTRY_", "BUILDAH_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ignored)}
    return {**kept, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


@dataclass(frozen=True)
class Duopack:
    """`duopack build KEY --to docker://…`, as a user runs it; the model is locked.

    Cold, it knows nothing and hashes the files against the lock first. Otherwise an earlier build has done that;
    after it the start script changes, and the image is built once more.
    """

    material: Material
    work: Path
    cold: bool

    @property
    def name(self) -> str:
        return "duopack, cold" if self.cold else "duopack"

    def missing(self) -> str | None:
        return None

    def lock(self) -> None:
        self._run("lock", KEY)

    def push(self, host: str, directory: Path) -> dict[str, Sample]:  # noqa: ARG002
        self._forget()
        self.material.write_catalog(4096)
        sample = self._build(host)
        samples = {self.name: replace(sample, left=disk_usage(self.work))}
        if self.cold:
            return samples
        self.material.write_catalog(8192)
        with CountingProxy(host) as proxy:
            again = self._build(proxy.host)
            return {**samples, "duopack, new start script": replace(again, sent=proxy.sent)}

    def _forget(self) -> None:
        shutil.rmtree(self.work if self.cold else self.work / "_work" / "uploads", ignore_errors=True)

    def _build(self, host: str) -> Sample:
        return self._run("build", KEY, "--locked", "--to", f"docker://{host}/{REPOSITORY}:v1")

    def _run(self, *words: str) -> Sample:
        program = Path(sys.executable).with_name("duopack")
        places = ("--catalog", str(self.material.catalog), "--work", str(self.work))
        env = {**clean_environment(), "DOCKER_CONFIG": str(self.material.directory / "no-logins")}
        return run([str(program), *words, "--quiet", *places], env=env)


@dataclass(frozen=True)
class Docker:
    """`docker build` and `docker push` with an engine of its own: the classic builder, or BuildKit."""

    material: Material
    engine: Callable[[Path], AbstractContextManager[str]]
    buildkit: bool

    @property
    def name(self) -> str:
        return "docker (BuildKit)" if self.buildkit else "docker"

    def missing(self) -> str | None:
        return lacks("docker", "dockerd")

    def push(self, host: str, directory: Path) -> dict[str, Sample]:
        tag = f"{host}/{REPOSITORY}:v1"
        with self.engine(directory) as address:
            env = {
                **clean_environment(),
                "DOCKER_HOST": address,
                "DOCKER_CONFIG": str(self.material.directory / "no-logins"),
                "DOCKER_BUILDKIT": str(int(self.buildkit)),
            }
            client = docker_client()
            steps = {
                "build": [client, "build", "--quiet", "--tag", tag, str(self.material.context)],
                "push": [client, "push", "--quiet", tag],
            }
            sample = in_steps(steps, env)
            memory = peak_memory(int((directory / "pid").read_text()))
            return {self.name: replace(sample, memory=memory, left=disk_usage(directory / "data"))}


@dataclass(frozen=True)
class Buildah:
    """`buildah bud` and `buildah push`, as it comes, or told not to compress."""

    material: Material
    unmount: Callable[[Path], None]
    compress: bool

    @property
    def name(self) -> str:
        return "buildah" if self.compress else "buildah, uncompressed"

    def missing(self) -> str | None:
        return lacks("buildah")

    def push(self, host: str, directory: Path) -> dict[str, Sample]:
        policy = directory / "policy.json"
        policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        buildah = ["buildah", "--root", str(directory / "root"), "--runroot", str(directory / "run")]
        buildah += ["--storage-driver", "overlay"]
        build = ["bud", "--quiet", "--isolation", "chroot", "--layers", "--signature-policy", str(policy)]
        push = ["push", "--quiet", "--tls-verify=false", "--signature-policy", str(policy)]
        push += [] if self.compress else ["--disable-compression"]
        steps = {
            "build": [*buildah, *build, "--tag", "bench", str(self.material.context)],
            "push": [*buildah, *push, "bench", f"docker://{host}/{REPOSITORY}:v1"],
        }
        try:
            sample = in_steps(steps, clean_environment())
        finally:
            self.unmount(directory)
        return {self.name: replace(sample, left=disk_usage(directory / "root"))}


@dataclass(frozen=True)
class Curl:
    """The raw limit: curl sends the files, with digests that were computed before, and no image is made."""

    material: Material
    method: str
    parallel: int

    @property
    def name(self) -> str:
        return f"curl {self.method}, {self.parallel} at once"

    def missing(self) -> str | None:
        return lacks("curl")

    def push(self, host: str, directory: Path) -> dict[str, Sample]:  # noqa: ARG002
        digests = self._digests
        started = time.monotonic()
        with ThreadPoolExecutor(self.parallel) as pool:
            list(pool.map(lambda path: self._send(host, path, digests[path]), self.material.weights))
        return {self.name: Sample(time.monotonic() - started)}

    @cached_property
    def _digests(self) -> Mapping[Path, str]:
        found = {}
        for path in self.material.weights:
            with path.open("rb") as file:
                found[path] = hashlib.file_digest(file, "sha256").hexdigest()
        return found

    def _send(self, host: str, path: Path, digest: str) -> None:
        url = f"http://{host}"
        location = ask("POST", f"{url}/v2/{REPOSITORY}/blobs/uploads/", 202)
        if self.method == "PATCH":
            location = self._curl(location, path, 202)
            ask("PUT", with_digest(location, digest), 201)
        else:
            self._curl(with_digest(location, digest), path, 201)

    def _curl(self, url: str, path: Path, expected: int) -> str:
        command = [
            "curl",
            "--silent",
            "--show-error",
            "--noproxy",
            "*",
            "--request",
            self.method,
            "--upload-file",
            str(path),
        ]
        command += ["--header", "Content-Type: application/octet-stream", "--header", "Expect:"]
        command += ["--output", os.devnull, "--write-out", "%{http_code} %header{location}", url]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        code, _, location = done.stdout.partition(" ")
        if int(code) != expected:
            raise BenchError(f"the registry answered {code} to curl's {self.method}, not {expected}")
        return location


def in_steps(steps: Mapping[str, Sequence[str]], env: Mapping[str, str]) -> Sample:
    """Runs commands one after the other: the sum of seconds, the largest memory."""
    samples = {name: run(command, env=env) for name, command in steps.items()}
    return Sample(
        sum(sample.seconds for sample in samples.values()),
        memory=max(sample.memory or 0 for sample in samples.values()),
        steps={name: sample.seconds for name, sample in samples.items()},
    )


def docker_client() -> str:
    """The docker client on PATH that came with dockerd: a newer one has no BuildKit without a plug-in."""
    wanted = version_of("dockerd")
    found = [Path(folder) / "docker" for folder in os.get_exec_path()]
    clients = [str(path) for path in found if os.access(path, os.X_OK)]
    return next((client for client in clients if version_of(client) == wanted), clients[0])


def version_of(program: str) -> str:
    done = subprocess.run([program, "--version"], check=True, capture_output=True, text=True)
    return done.stdout.split("version ")[-1].split(",")[0].strip()


def ask(method: str, url: str, expected: int) -> str:
    """One request without a body; the Location of the answer."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(urllib.request.Request(url, method=method, data=b"")) as answer:
        if answer.status != expected:
            raise BenchError(f"the registry answered {answer.status} to {method}, not {expected}")
        return str(answer.headers.get("Location", ""))


def with_digest(location: str, digest: str) -> str:
    joint = "&" if urlsplit(location).query else "?"
    return location + joint + urlencode({"digest": f"sha256:{digest}"})
