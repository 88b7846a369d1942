"""A container that serves one profile, as a value; as `docker run`, as a compose file, as Kubernetes objects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.ascend.docker_line import DockerLine

RESOURCE = "huawei.com/Ascend310P"
"""What the Ascend device plugin calls a chip of this kind; it chooses the chips, and the runtime maps them."""
NODE_LABELS = {"accelerator": "huawei-Ascend310P"}
START_SECONDS = 3600
STOP_SECONDS = 60


@dataclass(frozen=True)
class ContainerSpec:
    """Everything that `docker run` is told. `devices` are (host path, path inside), `mounts` host paths that keep
    their path and are read-only; `memory` is in bytes; an empty `command` is the image's own.
    """

    name: str
    image: str
    served: str
    model: str
    profile: str
    ranks: int
    architecture: str
    """The image's, in OCI's words: arm64 or amd64."""
    port: int
    host_port: int
    chips: tuple[int, ...] = ()
    runtime: str | None = None
    devices: tuple[tuple[str, str], ...] = ()
    mounts: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    shm_size: str = ""
    memory: int | None = None
    restart: str = "unless-stopped"
    command: tuple[str, ...] = ()


def container_name(served: str) -> str:
    """`vllm-ascend-` and the served name, in the letters that docker takes: a name that says what answers."""
    return "vllm-ascend-" + re.sub(r"[^a-zA-Z0-9_.-]+", "-", served)


def docker_line(spec: ContainerSpec) -> DockerLine:
    """The `docker run` that a person can copy."""
    options: list[tuple[str, str | None]] = [("--detach", None), ("--name", spec.name)]
    if spec.runtime:
        options.append(("--runtime", spec.runtime))
    options += [("--device", _mapped(host, inner)) for host, inner in spec.devices]
    # Unlike --volume, --mount makes no directory of a path that the host lacks.
    options += [("--mount", f"type=bind,source={path},target={path},readonly") for path in spec.mounts]
    options += [("--env", f"{name}={value}") for name, value in spec.env.items()]
    options.append(("--publish", f"{spec.host_port}:{spec.port}"))
    if spec.shm_size:
        options.append(("--shm-size", spec.shm_size))
    if spec.memory:
        options.append(("--memory", str(spec.memory)))
    options.append(("--restart", spec.restart))
    return DockerLine(tuple(options), spec.image, spec.command)


def engine_arguments(spec: ContainerSpec) -> dict[str, Any]:
    """The same for the docker package's `containers.create`."""
    name, _, retries = spec.restart.partition(":")
    return {
        "image": spec.image,
        "command": list(spec.command) or None,
        "name": spec.name,
        "runtime": spec.runtime,
        "devices": [f"{host}:{inner}" for host, inner in spec.devices],
        "mounts": [
            {"Type": "bind", "Source": path, "Target": path, "ReadOnly": True} for path in spec.mounts
        ],
        "environment": dict(spec.env),
        "ports": {f"{spec.port}/tcp": spec.host_port},
        "shm_size": spec.shm_size or None,
        "mem_limit": spec.memory,
        "restart_policy": {"Name": name, **({"MaximumRetryCount": int(retries)} if retries else {})},
    }


def compose_document(spec: ContainerSpec) -> dict[str, Any]:
    """A compose file with the one service."""
    service: dict[str, Any] = {
        "image": spec.image,
        "container_name": spec.name,
        "restart": spec.restart,
        "ports": [f"{spec.host_port}:{spec.port}"],
        "stop_grace_period": f"{STOP_SECONDS}s",
    }
    if spec.runtime:
        service["runtime"] = spec.runtime
    if spec.devices:
        service["devices"] = [f"{host}:{inner}" for host, inner in spec.devices]
    if spec.mounts:
        # The long form, of which old compose makes no directory on the host either.
        service["volumes"] = [
            {"type": "bind", "source": path, "target": path, "read_only": True} for path in spec.mounts
        ]
    if spec.env:
        # A `$` is the compose file's own unless it is doubled.
        service["environment"] = {name: value.replace("$", "$$") for name, value in spec.env.items()}
    if spec.shm_size:
        service["shm_size"] = spec.shm_size
    if spec.memory:
        service["mem_limit"] = spec.memory
    if spec.command:
        service["command"] = list(spec.command)
    return {"services": {_label(spec.served): service}}


def kubernetes_documents(spec: ContainerSpec) -> tuple[dict[str, Any], ...]:
    """A Deployment of one pod and its Service. Which chips it gets the cluster decides."""
    name = _label(spec.name)
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/component": "vllm"}
    chips = {RESOURCE: str(spec.ranks)}
    container: dict[str, Any] = {
        "name": "server",
        "image": spec.image,
        "ports": [{"name": "http", "containerPort": spec.port}],
        "resources": {
            "limits": {**chips, **({"memory": str(spec.memory)} if spec.memory else {})},
            "requests": chips,
        },
        # Tens of GB to load, and graphs to capture: the server has an hour to start.
        "startupProbe": _probe(period=30, failures=START_SECONDS // 30),
        "readinessProbe": _probe(period=10, failures=3),
        "livenessProbe": _probe(period=30, failures=3),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if spec.command:
        container["args"] = list(spec.command)
    if spec.env:
        container["env"] = [{"name": name_, "value": value} for name_, value in spec.env.items()]
    pod = {
        "nodeSelector": {"kubernetes.io/arch": spec.architecture, **NODE_LABELS},
        "terminationGracePeriodSeconds": STOP_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _binary(spec.shm_size or "1g")}}
        ],
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": 1,
            # A second pod would wait for the chips of the first.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "selector": labels,
            "ports": [{"name": "http", "port": spec.host_port, "targetPort": "http"}],
        },
    }
    return deployment, service


def _probe(*, period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": "/health", "port": "http"},
        "periodSeconds": period,
        "failureThreshold": failures,
        "timeoutSeconds": 10,
    }


def _mapped(host: str, inner: str) -> str:
    return host if host == inner else f"{host}:{inner}"


def _label(text: str) -> str:
    """A name that Kubernetes and compose take: lower case, digits, dashes, 63 at most."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].strip("-") or "model"


def _binary(size: str) -> str:
    """`10g` of docker as `10Gi` of Kubernetes."""
    return f"{size[:-1]}{size[-1].upper()}i" if size[-1:].isalpha() else size
