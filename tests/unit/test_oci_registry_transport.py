"""Connections: which scheme, which proxy, which certificates; and each silence in its own words."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_registry import FakeRegistry, Fault

from pipeline.errors import DuopackError
from pipeline.oci.places import open_sink, open_source
from pipeline.oci.reference import parse_reference
from pipeline.oci.registry.client import Client
from pipeline.oci.registry.failures import Answer, RegistryError, refusal
from pipeline.oci.registry.patience import Patience, retry_after
from pipeline.oci.registry.settings import Settings, host_name
from pipeline.oci.registry.transport import Transport


@pytest.mark.parametrize(
    ("registry", "url"),
    [
        ("docker.io", "https://registry-1.docker.io"),
        ("quay.io", "https://quay.io"),
        ("127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("127.9.9.9", "http://127.9.9.9"),
        ("[::1]:5000", "http://[::1]:5000"),
        ("localhost", "http://localhost"),
        ("localhost.evil.example", "https://localhost.evil.example"),
        ("127.0.0.1.evil.example", "https://127.0.0.1.evil.example"),
        ("plain.example:5000", "http://plain.example:5000"),
        ("plain.example:5001", "https://plain.example:5001"),
        ("any.example:1234", "http://any.example:1234"),
        ("10.0.0.7:5000", "https://10.0.0.7:5000"),
    ],
)
def test_plain_http_is_for_loopback_and_where_it_is_asked_for(registry: str, url: str) -> None:
    settings = Settings(plain_hosts=frozenset({"plain.example:5000", "any.example"}))
    assert settings.base_url(registry) == url


def test_the_environment_names_plain_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUOPACK_PLAIN_HTTP", "a.example, B.example:80")
    settings = Settings.from_environment()
    assert settings.base_url("a.example:5000") == "http://a.example:5000"
    assert settings.base_url("b.example:80") == "http://b.example:80"
    assert Settings().with_plain("c.example").base_url("c.example") == "http://c.example"


@pytest.mark.parametrize(
    ("host", "is_direct"),
    [
        ("reg.internal", True),
        ("deep.reg.internal", True),
        ("reg.internal.evil.example", False),
        ("xreg.internal", False),
        ("10.1.2.3", True),
        ("11.1.2.3", False),
        ("dot.example", True),
        ("a.star.example", True),
        ("with.port", True),
        ("127.0.0.1", True),
        ("[::1]", True),
        ("quay.io", False),
    ],
)
def test_no_proxy_is_understood_as_docker_does(host: str, is_direct: bool) -> None:
    excluded = "reg.internal,10.0.0.0/8, .dot.example *.star.example,with.port:5000,bad/cidr/"
    settings = Settings(proxies={"https": "http://proxy:3128", "no": excluded})
    assert (settings.proxy_for("https", host) is None) == is_direct
    assert Settings(proxies={"all": "http://p", "no": "*"}).proxy_for("https", host) is None


def test_a_host_is_split_from_its_port() -> None:
    assert [host_name(text) for text in ("a:5", "a", "[::1]:5", "[::1]")] == ["a", "a", "[::1]", "[::1]"]


def request(settings: Settings, url: str) -> int:
    transport = Transport(settings)
    response = transport.send("GET", url, {})
    response.drain_conn()
    transport.close()
    return response.status


def test_a_proxy_is_used_with_its_login_and_not_for_loopback() -> None:
    with FakeRegistry() as proxy:
        settings = Settings(proxies={"http": f"http://u:p%40@{proxy.host}"})
        assert request(settings, "http://reg.example/v2/a/b/tags/list") == 200
        assert proxy.seen[0].path == "http://reg.example/v2/a/b/tags/list"
        assert proxy.seen[0].headers["Proxy-Authorization"] == "Basic dTpwQA=="
        with FakeRegistry() as direct:
            request(settings, f"{direct.url}/v2/a/b/tags/list")
        assert len(proxy.seen) == 1


@pytest.mark.parametrize(
    "proxy", ["socks5://u:topsecret@h:1", "http://", "http://u:topsecret@[bad", "http://h:x"]
)
def test_a_proxy_that_is_no_address_is_an_error_without_its_password(proxy: str) -> None:
    with pytest.raises(DuopackError, match="HTTPS_PROXY") as raised:
        Transport(Settings(proxies={"http": proxy})).send("GET", "http://reg.example/", {})
    assert "topsecret" not in str(raised.value)


def test_the_user_agent_names_duopack() -> None:
    with FakeRegistry() as fake:
        request(Settings(), f"{fake.url}/v2/a/b/tags/list")
    assert fake.seen[0].headers["User-Agent"].startswith("duopack/")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, and its key."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "localhost")])
    begin = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=36500))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    directory = tmp_path_factory.mktemp("tls")
    crt, pem = directory / "ca.pem", directory / "key.pem"
    crt.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    pem.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return crt, pem


@pytest.fixture
def secure(certificate: tuple[Path, Path]) -> Iterator[FakeRegistry]:
    with FakeRegistry() as fake:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        fake._server.socket = context.wrap_socket(fake._server.socket, server_side=True)
        yield fake


def test_dockers_certificate_directory_makes_a_registry_trusted(
    secure: FakeRegistry, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    port = secure.host.rpartition(":")[2]
    directory = tmp_path / f"localhost:{port}"
    directory.mkdir()
    (directory / "ca.crt").write_bytes(certificate[0].read_bytes())
    url = f"https://localhost:{port}/v2/a/b/tags/list"
    assert request(Settings(certificates=tmp_path), url) == 200
    with pytest.raises(RegistryError, match="certificate is not trusted") as raised:
        request(Settings(certificates=tmp_path / "none"), url)
    assert "SSL_CERT_FILE" in str(raised.value)
    assert not raised.value.transient


def test_ssl_cert_file_makes_a_registry_trusted(
    secure: FakeRegistry, certificate: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    port = secure.host.rpartition(":")[2]
    assert request(Settings(certificates=tmp_path), f"https://localhost:{port}/v2/a/b/tags/list") == 200


def test_a_refusal_over_tls_is_heard_while_the_body_is_being_sent(
    secure: FakeRegistry, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    secure.faults.append(Fault("PATCH", "x", status=403, early=True))
    url = f"https://localhost:{secure.host.rpartition(':')[2]}/x"
    body = [bytes(1 << 20)] * 64
    headers = {"Content-Length": str(64 << 20)}
    assert Transport(Settings(certificates=tmp_path)).send("PATCH", url, headers, iter(body)).status == 403


def test_a_broken_certificate_file_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "reg.example"
    directory.mkdir()
    (directory / "ca.crt").write_text("no certificate")
    with pytest.raises(DuopackError, match="cannot be read") as raised:
        request(Settings(certificates=tmp_path), "https://reg.example/v2/")
    assert str(directory) in str(raised.value)


def test_plain_http_behind_https_says_which_variable_to_set() -> None:
    with FakeRegistry() as fake, pytest.raises(RegistryError) as raised:
        request(Settings(), f"https://{fake.host}/v2/")
    assert f"DUOPACK_PLAIN_HTTP={fake.host}" in str(raised.value)


def test_nothing_there_an_unknown_name_and_a_mute_server_differ() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with pytest.raises(RegistryError, match="nothing answers at this address") as refused:
            request(Settings(), f"http://127.0.0.1:{port}/v2/")
        probe.listen()
        with pytest.raises(RegistryError, match="no answer came in time"):
            Transport(Settings()).send("GET", f"http://127.0.0.1:{port}/v2/", {}, read_seconds=0.2)
    with pytest.raises(RegistryError, match="name is not known") as unknown:
        request(Settings(), "http://no-such-host.invalid/v2/")
    assert refused.value.transient
    assert unknown.value.transient


def test_garbage_instead_of_http_is_survived() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RegistryError, match="cut"):
            request(Settings(), f"http://127.0.0.1:{server.getsockname()[1]}/v2/")
        thread.join()


def test_a_connection_whose_body_was_left_half_sent_is_not_used_again() -> None:
    fault = Fault("PATCH", "x", status=403, early=True)
    with FakeRegistry(faults=[fault]) as fake:
        transport = Transport(Settings())
        body = iter([bytes(1 << 20)] * 64)
        answer = transport.send("PATCH", f"{fake.url}/x", {"Content-Length": str(64 << 20)}, body)
        assert answer.status == 403
        answer.drain_conn()
        assert transport.send("GET", f"{fake.url}/v2/a/b/tags/list", {}).status == 200


def client(base: str) -> Client:
    return Client(base, "a/b", Settings(), patience=Patience(sleep=lambda _: None))


@pytest.mark.parametrize(
    ("registry", "location", "expected"),
    [
        ("reg.example", "/v2/u/1?_state=x", "https://reg.example/v2/u/1?_state=x"),
        ("reg.example", "http://reg.example/v2/u/1", "https://reg.example/v2/u/1"),
        ("reg.example", "http://reg.example:80/v2/u/1", "https://reg.example/v2/u/1"),
        ("reg.example:8443", "http://reg.example/v2/u/1", "https://reg.example:8443/v2/u/1"),
        ("reg.example", "https://u:p@store.example/v2/u/1#x", "https://store.example/v2/u/1"),
    ],
)
def test_an_upload_location_is_made_absolute_and_kept_safe(
    registry: str, location: str, expected: str
) -> None:
    one = client(registry)
    assert one.locate(Answer(202, {"Location": location}, b"", ""), one.url("blobs/uploads/")) == expected


@pytest.mark.parametrize(
    "location", ["", "http://store.example/u", "ftp://reg.example/u", "https://[bad", "https://h:0/"]
)
def test_an_upload_location_that_is_not_safe_is_refused(location: str) -> None:
    one = client("reg.example")
    with pytest.raises(RegistryError):
        one.locate(Answer(202, {"Location": location}, b"", ""), one.url("blobs/uploads/"))


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, b"", "docker login h"),
        (403, b"", "does not allow"),
        (404, b'{"errors":[{"code":"NAME_UNKNOWN"}]}', "knows no such thing"),
        (404, b"<html>nginx", "web site, not a registry"),
        (200, b"<html>login", "web page, not a registry"),
        (413, b"<html>", "client_max_body_size"),
        (413, b'{"errors":[{"code":"SIZE_INVALID"}]}', "limit for one layer"),
        (429, b"", "rate"),
        (405, b"", "does not support"),
        (500, b"oops", "fault of its own"),
        (507, b"", "disk is full"),
        (500, b'{"errors":[{"code":"UNKNOWN","detail":"write: no space left on device"}]}', "disk is full"),
        (400, b'{"errors":[{"code":"DIGEST_INVALID"}]}', "other bytes than were sent"),
        (400, b'{"errors":[{"code":"MANIFEST_BLOB_UNKNOWN"}]}', "is not in the registry"),
        (400, b'{"errors":[{"code":"MANIFEST_INVALID"}]}', "invalid"),
        (418, b'{"errors":"not a list"}', "HTTP 418"),
        (418, b'{"errors":[5]}', "HTTP 418"),
    ],
)
def test_each_refusal_has_its_own_sentence_and_mend(status: int, body: bytes, says: str) -> None:
    error = refusal(Answer(status, {}, body, ""), "sending a layer", "h")
    assert says in str(error)
    assert "To mend" in str(error)
    assert "sending a layer" in str(error) or "web site" in str(error)


@pytest.mark.parametrize(
    ("value", "seconds"), [("7", 7.0), ("", None), ("soon", None), ("-1", None), ("9" * 99, None)]
)
def test_retry_after_is_seconds(value: str, seconds: float | None) -> None:
    assert retry_after(value) == seconds


def test_retry_after_may_be_a_date() -> None:
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert (retry_after("Wed, 21 Oct 2099 07:28:00 GMT") or 0) > 1e9


def test_waiting_grows_and_is_bounded() -> None:
    waits: list[float] = []
    patience = Patience(attempts=9, sleep=waits.append)

    def fail() -> None:
        raise RegistryError("no", transient=True)

    with pytest.raises(RegistryError):
        patience.run(fail)
    assert len(waits) == 8
    assert waits[0] <= 0.5
    assert 15 <= waits[-1] <= 30


def test_what_is_not_transient_is_not_tried_again() -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise RegistryError("no")

    with pytest.raises(RegistryError):
        Patience(sleep=lambda _: None).run(fail)
    assert calls == [1]


def test_places_are_opened_without_asking_anybody(tmp_path: Path) -> None:
    assert open_source(parse_reference("reg.invalid/a:b"))
    assert open_sink(parse_reference("reg.invalid/a:b"), mount_from=("c",), journal=tmp_path).parallel == 4
    assert open_source(parse_reference(f"oci:{tmp_path}"))
    assert open_source(parse_reference("docker-archive:x.tar"))
    assert open_source(parse_reference("docker-daemon:qwen:1"))
