"""Logins: where they are found, whom they are given to, and whom not."""

from __future__ import annotations

import base64
import json
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_registry import BASIC, PASSWORD, USER, FakeRegistry, Fault

from pipeline.errors import DuopackError
from pipeline.oci.registry import credentials
from pipeline.oci.registry.auth import Authenticator, parse_challenges
from pipeline.oci.registry.client import Client
from pipeline.oci.registry.credentials import Credentials, find_credentials
from pipeline.oci.registry.failures import Answer, RegistryError
from pipeline.oci.registry.patience import Patience
from pipeline.oci.registry.settings import Settings

AUTH = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


def config(tmp_path: Path, value: object, name: str = "config.json") -> Path:
    file = tmp_path / name
    file.write_text(value if isinstance(value, str) else json.dumps(value))
    return file


def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = tmp_path / "bin" / "docker-credential-tests"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


@pytest.mark.parametrize(
    "key",
    ["reg.example:5000", "https://reg.example:5000", "https://reg.example:5000/v1/", "reg.example:5000/v2/"],
)
def test_a_login_is_found_under_every_spelling_of_its_host(tmp_path: Path, key: str) -> None:
    file = config(tmp_path, {"auths": {"other": {"auth": "eDp5"}, key: {"auth": AUTH}}})
    assert find_credentials("reg.example:5000", "a/b", [file]) == Credentials(USER, PASSWORD)
    assert find_credentials("reg.example", "a/b", [file]) is None


def test_docker_hub_has_its_old_key(tmp_path: Path) -> None:
    file = config(tmp_path, {"auths": {"https://index.docker.io/v1/": {"auth": AUTH}}})
    assert find_credentials("docker.io", "library/busybox", [file]) == Credentials(USER, PASSWORD)


def test_podmans_closest_key_wins(tmp_path: Path) -> None:
    near, far = base64.b64encode(b"near:1").decode(), base64.b64encode(b"far:2").decode()
    file = config(tmp_path, {"auths": {"reg.example/team": {"auth": near}, "reg.example": {"auth": far}}})
    assert find_credentials("reg.example", "team/image", [file]) == Credentials("near", "1")
    assert find_credentials("reg.example", "teams/image", [file]) == Credentials("far", "2")


def test_the_first_file_with_a_login_wins_and_missing_files_are_no_error(tmp_path: Path) -> None:
    empty = config(tmp_path, "", "empty.json")
    plain = config(tmp_path, {"auths": {"h": {"username": "u", "password": "p"}}}, "plain.json")
    token = config(tmp_path, {"auths": {"h": {"identitytoken": "t"}}}, "token.json")
    assert find_credentials("h", "r", [tmp_path / "none.json", empty, plain, token]) == Credentials("u", "p")
    assert find_credentials("h", "r", [token]) == Credentials(identity_token="t")


@pytest.mark.parametrize(
    "value",
    [
        "{" + PASSWORD,
        "[]",
        '"text"',
        "[" * 100_000,
        {"auths": [PASSWORD]},
        {"auths": {"h": PASSWORD}},
        {"auths": {"h": {"auth": PASSWORD}}},
        {"auths": {"h": {"auth": base64.b64encode(PASSWORD.encode()).decode()}}},
        {"auths": {"h": {"auth": 5}}},
        {"auths": {"h": {"auth": base64.b64encode(b"\xff\xfe:" + PASSWORD.encode()).decode()}}},
        {"credHelpers": {"h": "../../bin/sh"}},
        {"credsStore": ["x"]},
        {"credsStore": "no-such-helper"},
    ],
)
def test_a_broken_login_file_is_named_and_its_content_is_not_shown(tmp_path: Path, value: object) -> None:
    file = config(tmp_path, value)
    with pytest.raises(DuopackError) as raised:
        find_credentials("h", "r", [file])
    assert str(file) in str(raised.value)
    assert PASSWORD not in str(raised.value)
    assert "To mend" in str(raised.value)


@pytest.mark.parametrize("key", ["credsStore", "credHelpers"])
def test_a_credential_helper_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    helper(tmp_path, monkeypatch, 'read host; echo "{\\"Username\\":\\"$host\\",\\"Secret\\":\\"s\\"}"')
    file = config(tmp_path, {key: "tests" if key == "credsStore" else {"reg.example": "tests"}})
    assert find_credentials("reg.example", "r", [file]) == Credentials("reg.example", "s")


def test_a_helpers_token_and_its_not_found_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        'read host; [ "$host" = a ] && echo \'{"Username":"<token>","Secret":"t"}\' && exit 0\n'
        "echo credentials not found in native keychain; exit 1"
    )
    helper(tmp_path, monkeypatch, script)
    file = config(tmp_path, {"credsStore": "tests", "auths": {"b": {"auth": AUTH}}})
    assert find_credentials("a", "r", [file]) == Credentials(identity_token="t")
    assert find_credentials("b", "r", [file]) == Credentials(USER, PASSWORD)


@pytest.mark.parametrize(
    "script",
    [f"echo {PASSWORD}; exit 3", f"echo {PASSWORD}", f'echo \'{{"Secret":"{PASSWORD}"}}\'', "printf '\\377'"],
)
def test_a_helper_that_fails_is_named_without_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    helper(tmp_path, monkeypatch, script)
    with pytest.raises(DuopackError, match="docker-credential-tests") as raised:
        find_credentials("h", "r", [config(tmp_path, {"credsStore": "tests"})])
    assert PASSWORD not in str(raised.value)


def test_a_helper_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper(tmp_path, monkeypatch, "exec sleep 30")
    monkeypatch.setattr(credentials, "_HELPER_SECONDS", 0.2)
    began = time.monotonic()
    with pytest.raises(DuopackError, match="no answer"):
        find_credentials("h", "r", [config(tmp_path, {"credsStore": "tests"})])
    assert time.monotonic() - began < 10


def test_secrets_are_not_in_a_repr() -> None:
    shown = repr(Credentials(USER, PASSWORD, "identity")) + repr(
        Settings(proxies={"https": f"http://u:{PASSWORD}@p"})
    )
    assert PASSWORD not in shown
    assert "identity-" not in shown.replace("identity_token", "")


def test_the_environment_says_where_logins_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/u")
    assert Settings.from_environment().auth_files[0] == Path("/home/u/.docker/config.json")
    monkeypatch.setenv("DOCKER_CONFIG", "/d")
    monkeypatch.setenv("REGISTRY_AUTH_FILE", "/f.json")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/u")
    files = Settings.from_environment().auth_files
    assert files[:3] == (Path("/f.json"), Path("/d/config.json"), Path("/run/u/containers/auth.json"))


@pytest.mark.parametrize(
    ("header", "schemes"),
    [
        ('Bearer realm="https://a/t",service="s",scope="repository:a/b:pull,push"', ["bearer"]),
        ('Basic realm="x", Bearer realm="https://a/t", service=s', ["basic", "bearer"]),
        ("Negotiate, Basic realm=x", ["negotiate", "basic"]),
        ("Negotiate", ["negotiate"]),
        ("", []),
        ("=,=,=", []),
    ],
)
def test_challenges_are_taken_apart(header: str, schemes: list[str]) -> None:
    assert [one.scheme for one in parse_challenges(header)] == schemes


def test_quoted_values_keep_their_commas_and_escapes() -> None:
    found = parse_challenges(r'Bearer realm="https://a/t",scope="repository:a/b:pull,push",x="q\"q"')[0]
    assert found.parameters == {"realm": "https://a/t", "scope": "repository:a/b:pull,push", "x": 'q"q'}


@given(st.text(max_size=200) | st.text('Bearer basic realm="=,\\ ', max_size=100))
def test_any_header_is_survived(header: str) -> None:
    parse_challenges(header)


def challenge(realm: str) -> Answer:
    return Answer(401, {"WWW-Authenticate": f'Bearer realm="{realm}",service="s"'}, b"", "")


@pytest.mark.parametrize(
    ("registry", "realm", "is_safe"),
    [
        ("reg.example", "https://auth.example/token", True),
        ("reg.example", "http://reg.example/token", False),
        ("reg.example", "http://127.0.0.1/token", False),
        ("reg.example", "ftp://auth.example/token", False),
        ("reg.example", "https://user:pw@auth.example/token", False),
        ("reg.example", "//auth.example/token", False),
        ("reg.example", "https:///token", False),
        ("reg.example", "https://[::1/token", False),
        ("reg.example", "", False),
        ("127.0.0.1:5000", "http://127.0.0.1:5001/token", True),
        ("127.0.0.1:5000", "https://auth.example/token", True),
        ("127.0.0.1:5000", "http://auth.example/token", False),
        ("plain.example:5000", "http://plain.example/token", True),
        ("plain.example:5000", "http://other.example/token", False),
    ],
)
def test_a_login_goes_only_to_a_safe_token_server(registry: str, realm: str, is_safe: bool) -> None:
    asked: list[str] = []

    def ask(method: str, url: str, headers: dict[str, str], body: bytes | None) -> Answer:
        asked.append(url)
        return Answer(200, {}, b'{"token":"t"}', url)

    settings = Settings(plain_hosts=frozenset({"plain.example:5000"}))
    auth = Authenticator(registry, settings, ("repository:a:pull",), lambda: Credentials("u", "p"), ask)
    if is_safe:
        assert auth.learn(challenge(realm), None)
        assert auth.header() == "Bearer t"
        return
    with pytest.raises(RegistryError, match="not a safe address"):
        auth.learn(challenge(realm), None)
    assert asked == []


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"token":5}', b'{"token":"a b"}', b'{"token":"a\\r\\nX: y"}']
)
def test_a_token_that_is_none_is_an_error(body: bytes) -> None:
    auth = Authenticator("h.example", Settings(), ("s",), lambda: None, lambda *_: Answer(200, {}, body, ""))
    with pytest.raises(RegistryError, match="without a usable token"):
        auth.learn(challenge("https://h.example/t"), None)


def test_a_token_server_that_refuses_one_scope_is_asked_for_our_own() -> None:
    asked: list[str] = []

    def ask(method: str, url: str, headers: dict[str, str], body: bytes | None) -> Answer:
        asked.append(url)
        return Answer(403 if "other" in url else 200, {}, b'{"access_token":"t","expires_in":"soon"}', url)

    scopes = ("repository:a:pull,push", "repository:other:pull")
    auth = Authenticator("h.example", Settings(), scopes, lambda: None, ask)
    assert auth.learn(challenge("https://h.example/t?account=x"), None)
    assert len(asked) == 2
    assert "?account=x&service=s" in asked[1]


def test_a_token_is_renewed_half_a_minute_before_it_ends() -> None:
    now, count = [0.0], [0]

    def ask(*_: object) -> Answer:
        count[0] += 1
        return Answer(200, {}, json.dumps({"token": f"t{count[0]}", "expires_in": 300}).encode(), "")

    auth = Authenticator("h.example", Settings(), ("s",), lambda: None, ask, clock=lambda: now[0])
    auth.learn(challenge("https://h.example/t"), None)
    now[0] = 269
    assert auth.header() == "Bearer t1"
    now[0] = 271
    assert auth.header() == "Bearer t2"


def client_for(fake: FakeRegistry, file: Path | None = None) -> Client:
    settings = Settings(auth_files=(file,) if file else ())
    return Client(fake.host, "a/b", settings, patience=Patience(sleep=lambda _: None))


def test_basic_and_bearer_and_identity_tokens_are_spoken(tmp_path: Path) -> None:
    for login, entry in [
        ("basic", {"auth": AUTH}),
        ("bearer", {"auth": AUTH}),
        ("bearer", {"identitytoken": PASSWORD}),
    ]:
        with FakeRegistry(login=login) as fake:
            file = config(tmp_path, {"auths": {fake.host: entry}})
            digest = fake.add_blob(b"data")
            answer = client_for(fake, file).ask(
                "GET", f"{fake.url}/v2/a/b/blobs/{digest}", "reading", expect=(200,)
            )
        assert answer.body == b"data"
        sent = [
            one.headers.get("Authorization", "") for one in fake.seen if not one.path.startswith("/token")
        ]
        assert sent[-1].startswith(BASIC if login == "basic" else "Bearer ")


def test_no_login_is_looked_for_unless_the_registry_asks(tmp_path: Path) -> None:
    with FakeRegistry() as fake:
        digest = fake.add_blob(b"data")
        broken = config(tmp_path, "{")
        client_for(fake, broken).ask("GET", f"{fake.url}/v2/a/b/blobs/{digest}", "reading", expect=(200,))


@pytest.mark.parametrize("login", ["basic", "bearer"])
def test_a_missing_login_says_what_to_run(login: str) -> None:
    with FakeRegistry(login=login) as fake, pytest.raises(RegistryError) as raised:
        client_for(fake).ask("GET", f"{fake.url}/v2/a/b/blobs/x", "reading", expect=(200,))
    assert f"docker login {fake.host}" in str(raised.value)
    assert raised.value.status == 401


def test_a_token_server_that_stumbles_is_asked_again(tmp_path: Path) -> None:
    with FakeRegistry(login="bearer", faults=[Fault("GET", "/token", times=2, status=503)]) as fake:
        file = config(tmp_path, {"auths": {fake.host: {"auth": AUTH}}})
        digest = fake.add_blob(b"data")
        client_for(fake, file).ask("GET", f"{fake.url}/v2/a/b/blobs/{digest}", "reading", expect=(200,))
    assert fake.count("GET", "/token") == 3


def test_a_token_servers_redirect_gets_no_password(tmp_path: Path) -> None:
    with FakeRegistry() as thief, FakeRegistry(login="bearer") as fake:
        fake.faults.append(Fault("GET", "/token", status=302, headers={"Location": f"{thief.url}/token"}))
        file = config(tmp_path, {"auths": {fake.host: {"auth": AUTH}}})
        with pytest.raises(RegistryError):
            client_for(fake, file).ask("GET", f"{fake.url}/v2/a/b/blobs/x", "reading", expect=(200,))
    assert not thief.seen
