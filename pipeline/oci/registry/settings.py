"""What the environment says about registries, read once and then a plain value."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.request import getproxies_environment

import pipeline
from pipeline.oci.reference import DOCKER_HUB

_HUB_HOST = "registry-1.docker.io"


@dataclass(frozen=True)
class Settings:
    """How registries are reached.

    `plain_hosts` are `host[:port]` that speak http without TLS; `proxies` maps http, https, all and no
    (hosts that need none); `certificates` is docker's directory of per-host CAs and client certificates;
    `auth_files` are looked through in order.
    """

    plain_hosts: frozenset[str] = frozenset()
    proxies: Mapping[str, str] = field(default_factory=dict, repr=False)
    certificates: Path = Path("/etc/docker/certs.d")
    auth_files: tuple[Path, ...] = ()
    user_agent: str = f"duopack/{pipeline.__version__}"

    @classmethod
    def from_environment(cls) -> Settings:
        return cls(
            plain_hosts=frozenset(_words(os.environ.get("DUOPACK_PLAIN_HTTP", "").lower())),
            proxies=getproxies_environment(),
            auth_files=_auth_files(os.environ),
        )

    def with_plain(self, registry: str) -> Settings:
        """The same, with one more registry that is spoken to without TLS."""
        return replace(self, plain_hosts=self.plain_hosts | {registry})

    def base_url(self, registry: str) -> str:
        """`scheme://host[:port]` of a registry: http for loopback and where asked, else https."""
        if registry == DOCKER_HUB:
            return f"https://{_HUB_HOST}"
        plain = is_loopback(host_name(registry)) or not self.plain_hosts.isdisjoint(
            {registry, host_name(registry)}
        )
        return f"{'http' if plain else 'https'}://{registry}"

    def proxy_for(self, scheme: str, host: str) -> str | None:
        """The proxy's URL for a host without port, or None: loopback never takes one."""
        if is_loopback(host) or any(_excludes(entry, host) for entry in _words(self.proxies.get("no", ""))):
            return None
        return self.proxies.get(scheme) or self.proxies.get("all")


def host_name(registry: str) -> str:
    """The host of `host[:port]`; an IPv6 address keeps its brackets."""
    head, colon, port = registry.rpartition(":")
    return head if colon and port.isdigit() and not (head.startswith("[") and "]" not in head) else registry


def is_loopback(host: str) -> bool:
    """Whether a host (without port) is this machine by its very name: no name is looked up."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _excludes(entry: str, host: str) -> bool:
    """Whether an entry of NO_PROXY (`*`, a domain, a host, with or without port, a CIDR) means `host`."""
    name, entry = host.strip("[]").lower(), host_name(entry.lower()).strip("[]").removeprefix("*").lstrip(".")
    try:
        return ipaddress.ip_address(name) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return not entry or name == entry or name.endswith("." + entry)


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _auth_files(environment: Mapping[str, str]) -> tuple[Path, ...]:
    files = []
    if explicit := environment.get("REGISTRY_AUTH_FILE"):
        files.append(Path(explicit))
    home = Path(environment.get("HOME") or "/nonexistent")
    files.append(Path(environment.get("DOCKER_CONFIG") or home / ".docker") / "config.json")
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        files.append(Path(runtime) / "containers" / "auth.json")
    config = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    files.append(config / "containers" / "auth.json")
    return tuple(files)
