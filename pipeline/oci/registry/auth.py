"""Logging in at a registry: anonymous, basic, and bearer tokens that are renewed before they end.

Facts: distribution's "Token Authentication" documents and RFC 7235. A password goes to the registry itself,
or to the token server it names; never over plain http when the registry is spoken to with TLS, and never
along a redirect.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

from pipeline.errors import quoted
from pipeline.oci.registry.credentials import Credentials
from pipeline.oci.registry.failures import Answer, RegistryError, refusal
from pipeline.oci.registry.settings import Settings

_DEFAULT_LIFE = 60.0
_MARGIN = 30.0
_PAIR = re.compile(r'\s*([A-Za-z0-9_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]*))\s*(?:,|$)')
_SCHEME = re.compile(r"[\s,]*([A-Za-z][A-Za-z0-9-]*)(?:\s+|$|,)")

Ask = Callable[[str, str, dict[str, str], bytes | None], Answer]
"""Sends (method, url, headers, body) and reads the answer, whatever its status; retries what is transient."""


@dataclass(frozen=True)
class Challenge:
    """One entry of a WWW-Authenticate header: the scheme in lower case, and its parameters."""

    scheme: str
    parameters: dict[str, str]


def parse_challenges(header: str) -> list[Challenge]:
    """Every challenge in a WWW-Authenticate header; what is not understood is left out."""
    found: list[Challenge] = []
    header = header[:8192]
    position = 0
    while position < len(header):
        pair = _PAIR.match(header, position)
        if pair and found:
            value = pair[2] if pair[2] is not None else pair[3]
            found[-1].parameters.setdefault(pair[1].lower(), re.sub(r"\\(.)", r"\1", value))
            position = pair.end()
            continue
        scheme = _SCHEME.match(header, position)
        if not scheme:
            break
        found.append(Challenge(scheme[1].lower(), {}))
        position = scheme.end()
    return found


class Authenticator:
    """The Authorization header for one repository of a registry. Safe to use from several threads."""

    def __init__(
        self,
        registry: str,
        settings: Settings,
        scopes: tuple[str, ...],
        credentials: Callable[[], Credentials | None],
        ask: Ask,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._settings = settings
        self._base = urlsplit(settings.base_url(registry))
        self._scopes = scopes
        self._find = credentials
        self._ask = ask
        self._clock = clock
        self._lock = threading.Lock()
        self._header: str | None = None
        self._bearer: Challenge | None = None
        self._renew_at = float("inf")

    def header(self) -> str | None:
        """What to send now; fetches a fresh token when the last one is about to end."""
        with self._lock:
            if self._bearer and self._clock() >= self._renew_at:
                self._fetch(self._bearer)
            return self._header

    def learn(self, answer: Answer, used: str | None) -> bool:
        """Reads a 401 to a request that carried `used`; says whether another try has a chance.

        Raises RegistryError when the token server refuses or must not be trusted with the login.
        """
        challenges = {
            one.scheme: one for one in reversed(parse_challenges(answer.header("WWW-Authenticate")))
        }
        with self._lock:
            if self._header != used:
                return True  # another thread has renewed it meanwhile
            if bearer := challenges.get("bearer"):
                self._bearer = bearer
                self._fetch(bearer)
                return self._header != used
            if "basic" in challenges and (found := self._find()) and not found.identity_token:
                self._header = found.basic
                return self._header != used
            return False

    def _fetch(self, bearer: Challenge) -> None:
        realm = self._trusted_realm(bearer.parameters.get("realm", ""))
        found = self._find()
        answer = self._request(realm, bearer, found, self._all_scopes(bearer))
        if answer.status in {400, 403} and len(self._scopes) > 1:
            # Some servers refuse all when one scope (a repository to mount from) is not allowed.
            answer = self._request(realm, bearer, found, self._scopes[:1])
        if answer.status != 200:
            raise self._refused(answer, found)
        token, life = _read_token(answer, self._registry)
        self._header = f"Bearer {token}"
        self._renew_at = self._clock() + max(life - _MARGIN, life / 2)

    def _refused(self, answer: Answer, found: Credentials | None) -> RegistryError:
        if answer.status not in {401, 403}:
            return refusal(answer, "asking its token server for access", self._registry)
        return RegistryError(
            "the login is not accepted" if found else "this needs a login, and there is none",
            where=self._registry,
            mend=f"run `docker login {self._registry}`",
            status=answer.status,
        )

    def _request(
        self, realm: str, bearer: Challenge, found: Credentials | None, scopes: tuple[str, ...]
    ) -> Answer:
        service = bearer.parameters.get("service", "")
        headers = {"Accept": "application/json"}
        if found and found.identity_token:
            form = {
                "grant_type": "refresh_token",
                "service": service,
                "client_id": "duopack",
                "scope": " ".join(scopes),
                "refresh_token": found.identity_token,
            }
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            return self._ask("POST", realm, headers, urlencode(form).encode())
        if found:
            headers["Authorization"] = found.basic
        query = ([("service", service)] if service else []) + [("scope", scope) for scope in scopes]
        joint = "&" if urlsplit(realm).query else "?"
        return self._ask("GET", f"{realm}{joint}{urlencode(query)}", headers, None)

    def _all_scopes(self, bearer: Challenge) -> tuple[str, ...]:
        asked = bearer.parameters.get("scope", "").split()
        covered = {scope.rpartition(":")[0] for scope in self._scopes}
        return self._scopes + tuple(scope for scope in asked if scope.rpartition(":")[0] not in covered)

    def _trusted_realm(self, realm: str) -> str:
        try:
            parts = urlsplit(realm if realm.isprintable() else "")
        except ValueError:
            parts = urlsplit("")
        clear = self._base.scheme == "http" and (
            parts.hostname == self._base.hostname or self._settings.base_url(parts.netloc).startswith("http:")
        )
        is_safe = parts.scheme == "https" or (parts.scheme == "http" and clear)
        if is_safe and parts.hostname and "@" not in parts.netloc:
            return realm.partition("#")[0]
        raise RegistryError(
            f"it wants the login sent to '{quoted(realm, 100)}', which is not a safe address for it",
            where=self._registry,
            mend="the registry's token realm must be an https address: ask who runs it",
            status=401,
        )


def _read_token(answer: Answer, registry: str) -> tuple[str, float]:
    """The token, and its life in seconds (60 when the server does not say, as the documents have it)."""
    try:
        found = json.loads(answer.body)
        token = found.get("token") or found.get("access_token")
        life = found.get("expires_in") or _DEFAULT_LIFE
    except (ValueError, AttributeError, RecursionError):
        token, life = None, _DEFAULT_LIFE
    # ASCII without spaces: nothing from a token server may add a header of its own.
    if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]{1,65536}", token):
        raise RegistryError(
            "its token server answered without a usable token",
            where=registry,
            mend="ask who runs the registry",
        )
    usable = isinstance(life, int | float) and not isinstance(life, bool) and 0 < life < 1e9
    return token, float(life) if usable else _DEFAULT_LIFE
