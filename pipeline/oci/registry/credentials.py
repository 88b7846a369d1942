"""Who we are at a registry: docker's and podman's login files and credential helpers.

The file format is docker's `config.json`: `auths`, `credHelpers`, `credsStore`. A helper is the program
`docker-credential-NAME`, called with `get` and the registry on its standard input. No secret is ever part of
a message or a repr.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import DuopackError, quoted
from pipeline.oci.reference import DOCKER_HUB

_HUB_KEY = "https://index.docker.io/v1/"
_HUB_NAMES = frozenset({DOCKER_HUB, "index.docker.io", "registry-1.docker.io"})
_HELPER_SECONDS = 20.0
_MAX_FILE = 4 << 20


@dataclass(frozen=True)
class Credentials:
    """A user with a password, or an identity token for a token server."""

    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)

    @property
    def basic(self) -> str:
        """The value of an Authorization header (RFC 7617)."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()


def find_credentials(registry: str, repository: str, files: Iterable[Path]) -> Credentials | None:
    """The first login for a registry in `files`, or None.

    Podman's keys may name a repository or a namespace: the closest one wins. Raises DuopackError when a file
    is broken or its helper fails: going on without a login would only end in a confusing refusal.
    """
    for file in files:
        config = _load(file)
        helper = _helper(config, registry, file)
        found = _from_helper(helper, registry, file) if helper else None
        if found := found or _from_auths(config, registry, repository, file):
            return found
    return None


def _load(file: Path) -> Mapping[str, Any]:
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_FILE + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise _broken(file, f"cannot be read ({error.strerror})") from error
    if len(data) > _MAX_FILE:
        raise _broken(file, "is too large for a login file")
    try:
        config = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        # The parser's message may show a piece of the file, and that may be a secret.
        raise _broken(file, "is not valid JSON") from None
    if not isinstance(config, dict):
        raise _broken(file, "is not a JSON object")
    return config


def _helper(config: Mapping[str, Any], registry: str, file: Path) -> str:
    helpers = _table(config, "credHelpers", file)
    named = next(
        (helpers[key] for key in _keys(registry, "") if key in helpers), config.get("credsStore") or ""
    )
    if not isinstance(named, str) or (named and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", named)):
        raise _broken(file, "names a credential helper that is not a program's name")
    return named


def _from_helper(helper: str, registry: str, file: Path) -> Credentials | None:
    program = shutil.which(f"docker-credential-{helper}")
    if not program:
        raise DuopackError(
            f"it wants the credential helper docker-credential-{helper}, which is not installed",
            where=str(file),
            mend="install it, or take credsStore/credHelpers out of the file and log in again",
        )
    server = _HUB_KEY if registry in _HUB_NAMES else registry
    failed = f"the credential helper docker-credential-{helper} failed"
    mend = f"try it by hand: echo {server} | docker-credential-{helper} get"
    try:
        result = subprocess.run(
            [program, "get"],
            input=server,
            capture_output=True,
            text=True,
            timeout=_HELPER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        # No `from`: the exception would carry the output.
        raise DuopackError(
            f"{failed}: no answer in {_HELPER_SECONDS:.0f} s", where=registry, mend=mend
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DuopackError(f"{failed}: {type(error).__name__}", where=registry, mend=mend) from None
    if result.returncode:
        if "credentials not found" in (result.stdout + result.stderr).lower():
            return None
        raise DuopackError(f"{failed} with exit code {result.returncode}", where=registry, mend=mend)
    return _from_answer(result.stdout, failed, registry, mend)


def _from_answer(output: str, failed: str, registry: str, mend: str) -> Credentials:
    try:
        answer = json.loads(output)
        user, secret = answer["Username"], answer["Secret"]
    except (ValueError, KeyError, TypeError, RecursionError):
        user = secret = None
    if not isinstance(user, str) or not isinstance(secret, str):
        raise DuopackError(f"{failed}: its answer has no Username and Secret", where=registry, mend=mend)
    return Credentials(identity_token=secret) if user == "<token>" else Credentials(user, secret)


def _from_auths(config: Mapping[str, Any], registry: str, repository: str, file: Path) -> Credentials | None:
    auths = _table(config, "auths", file)
    known = {_plain_key(key): value for key, value in auths.items()} | dict(auths)
    for key in _keys(registry, repository):
        if key in known and (found := _from_entry(known[key], key, file)):
            return found
    return None


def _from_entry(entry: object, key: str, file: Path) -> Credentials | None:
    if not isinstance(entry, dict):
        raise _broken(file, f"has an entry for {quoted(key)} that is not an object")
    texts = {name: entry.get(name) or "" for name in ("auth", "username", "password", "identitytoken")}
    if any(not isinstance(text, str) for text in texts.values()):
        raise _broken(file, f"has an entry for {quoted(key)} with a value that is not a text")
    if texts["identitytoken"]:
        return Credentials(identity_token=texts["identitytoken"])
    if texts["auth"]:
        return _decoded(texts["auth"], key, file)
    return Credentials(texts["username"], texts["password"]) if texts["username"] else None


def _decoded(auth: str, key: str, file: Path) -> Credentials:
    try:
        user, colon, password = base64.b64decode(auth, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        user, colon, password = "", "", ""
    if not colon or not user:
        raise _broken(file, f"has an 'auth' for {quoted(key)} that is not base64 of user:password")
    return Credentials(user, password.rstrip("\0"))


def _keys(registry: str, repository: str) -> list[str]:
    """The names under which a login may be kept, the closest first."""
    parts = repository.split("/") if repository else []
    keys = ["/".join([registry, *parts[:count]]) for count in range(len(parts), -1, -1)]
    return [*keys, _HUB_KEY, *sorted(_HUB_NAMES - {registry})] if registry in _HUB_NAMES else keys


def _plain_key(key: str) -> str:
    """`https://host/v1/` → `host`; a podman key with a namespace stays whole."""
    has_scheme = "://" in key
    bare = key.partition("://")[2] if has_scheme else key
    return bare.partition("/")[0] if has_scheme or bare.rstrip("/").endswith(("/v1", "/v2")) else bare


def _table(config: Mapping[str, Any], name: str, file: Path) -> Mapping[str, Any]:
    table = config.get(name) or {}
    if not isinstance(table, dict):
        raise _broken(file, f"has a '{name}' that is not an object")
    return table


def _broken(file: Path, what: str) -> DuopackError:
    return DuopackError(
        f"this login file {what}", where=str(file), mend="mend or remove it, then `docker login`"
    )
