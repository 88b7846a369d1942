"""Image names: what is understood, what is refused, and that the canonical text says the same again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import DuopackError, UsageError
from pipeline.oci.digest import Digest
from pipeline.oci.reference import Reference, parse_reference, parse_typed

HEX = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "registry", "repository", "tag", "digest"),
    [
        ("busybox", "docker.io", "library/busybox", "latest", None),
        ("docker:dind", "docker.io", "library/docker", "dind", None),
        ("ascend/cann:8.5", "docker.io", "ascend/cann", "8.5", None),
        ("index.docker.io/library/busybox:1", "docker.io", "library/busybox", "1", None),
        (
            "docker://quay.io/ascend/vllm-ascend:v0.20.2rc1",
            "quay.io",
            "ascend/vllm-ascend",
            "v0.20.2rc1",
            None,
        ),
        ("localhost/qwen", "localhost", "qwen", "latest", None),
        ("127.0.0.1:5000/a/b__c/d-e:T_1", "127.0.0.1:5000", "a/b__c/d-e", "T_1", None),
        ("docker://[::1]:5000/a/b:c", "[::1]:5000", "a/b", "c", None),
        (f"reg.example/a@{HEX}", "reg.example", "a", None, HEX),
        (f"reg.example:443/a:b@{HEX}", "reg.example:443", "a", "b", HEX),
        ("REG.Example/a", "reg.example", "a", "latest", None),
    ],
)
def test_docker_names_follow_dockers_familiar_rules(
    text: str, registry: str, repository: str, tag: str | None, digest: str | None
) -> None:
    reference = parse_reference(text)
    assert (reference.transport, reference.registry, reference.repository) == ("docker", registry, repository)
    assert (reference.tag, reference.digest) == (tag, digest)


@pytest.mark.parametrize("text", ["9b", "9b.tar", "build/9b", "9b:v1"])
def test_a_name_that_only_docker_would_take_for_its_hub_is_not_taken_from_a_person(text: str) -> None:
    with pytest.raises(UsageError, match="names no registry") as raised:
        parse_typed(text)
    assert f"for Docker Hub {parse_reference(text)}" in raised.value.mend
    for full in (f"docker://{text}", f"docker.io/{text}", f"r.example/{text}", f"oci:{text}"):
        assert parse_typed(full) == parse_reference(full)


@pytest.mark.parametrize(
    "text",
    [
        "https://user:hidden@r.example",
        "https://user:hid/den@r.example/x",
        "docker://hidden@r.example/x:1",
        "docker://us:hid@den@r.example/x",
        "user:hidden@r.example",
        "user:hidden@r.example:5000/X",
        "http://r.example/x?token=hidden",
        "http://r.example/x?a=b&access_token=hidden&c",
    ],
)
def test_a_login_or_token_in_a_name_is_never_shown(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_reference(text)
    for said in (
        str(raised.value),
        raised.value.what,
        raised.value.where,
        raised.value.mend,
        *raised.value.args,
    ):
        assert "hid" not in said
        assert "den@" not in said


def test_the_digest_decides_over_the_tag() -> None:
    assert parse_reference(f"reg.example/a:b@{HEX}").wanted == HEX
    assert parse_reference("reg.example/a:b").wanted == "b"
    assert parse_reference("oci:build/9b").wanted == ""


@pytest.mark.parametrize(
    ("text", "path", "tag", "digest"),
    [
        ("oci:build/9b", "build/9b", None, None),
        ("oci:/srv/a b:v1", "/srv/a b", "v1", None),
        (f"oci:build@{HEX}", "build", None, HEX),
        (f"oci:build:v1@{HEX}", "build", "v1", HEX),
        ("oci:user@host", "user@host", None, None),
        ("oci:/srv/a:b/9b", "/srv/a:b/9b", None, None),
        ("oci:/srv/a:b/9b:v1", "/srv/a:b/9b", "v1", None),
    ],
)
def test_layouts_are_a_directory_with_an_optional_tag_or_digest(
    text: str, path: str, tag: str | None, digest: str | None
) -> None:
    reference = parse_reference(text)
    assert (reference.transport, reference.path, reference.tag, reference.digest) == (
        "oci",
        Path(path),
        tag,
        digest,
    )


def test_archives_and_engines_keep_the_familiar_name() -> None:
    assert parse_reference("docker-archive:out.tar").name_tag == ""
    assert parse_reference("docker-archive:out.tar:qwen:1").name_tag == "qwen:1"
    assert (
        parse_reference("docker-archive:out.tar:reg.example:5000/qwen:1").name_tag
        == "reg.example:5000/qwen:1"
    )
    assert parse_reference("docker-daemon:qwen").name_tag == "qwen:latest"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("a\nb", "control"),
        (" a", "spaces"),
        ("a" * 5000, "too long"),
        ("https://reg.example/a:b", "write docker://reg.example/a:b"),
        ("docker://", "repository is missing"),
        ("reg.example/", "repository is missing"),
        ("reg.example/Qwen", "use 'qwen'"),
        ("Foo/bar", "capital letters"),
        ("a..b/c..d", "not a host"),
        ("a/b..c", "not a repository"),
        ("a/" + "b" * 300, "longer than"),
        ("a:b:c", "not a tag"),
        ("a:" + "b" * 129, "not a tag"),
        ("a:-b", "not a tag"),
        ("reg.example:99999/a", "not a host"),
        ("reg.example:0/a", "not a host"),
        ("a@sha256:12", "64 lower-case hex"),
        (f"a@{HEX.upper()}", "64 lower-case hex"),
        ("a@md5:d41d8cd98f00b204e9800998ecf8427e", "64 lower-case hex"),
        ("oci:", "directory is missing"),
        ("oci:a:b:c", "not a tag"),
        ("docker-archive:", "file is missing"),
        ("docker-archive:f:", "repository is missing"),
        (f"docker-daemon:a@{HEX}", "name and tag"),
        ("oci-archive:f.tar", "transport"),
        ("ftp://host/a", "transport"),
    ],
)
def test_malformed_names_are_wrong_use_and_say_why(text: str, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_reference(text)
    assert says in str(raised.value)
    assert "To mend" in str(raised.value)


@pytest.mark.parametrize(
    "text", ["u:secret@reg.example/a", "docker://u:secret@h:5000/a", "https://u:secret@h/a"]
)
def test_a_password_in_a_name_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_reference(text)
    assert "docker login" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_another_tag_or_a_digest_gives_a_new_value() -> None:
    reference = parse_reference(f"reg.example/a:b@{HEX}")
    assert str(reference.with_tag("c")) == "docker://reg.example/a:c"
    assert str(parse_reference("a/b:c").with_digest(Digest(HEX))) == f"docker://docker.io/a/b:c@{HEX}"
    with pytest.raises(UsageError):
        reference.with_tag("no tag")


_part = st.from_regex(r"[a-z0-9]{1,6}([._-][a-z0-9]{1,6})?", fullmatch=True)
_references = st.one_of(
    st.builds(
        Reference,
        transport=st.sampled_from(["docker", "docker-daemon"]),
        registry=st.sampled_from(["reg.example", "reg.example:5000", "localhost", "[::1]:80"]),
        repository=st.lists(_part, min_size=1, max_size=3).map("/".join),
        tag=st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True),
    ),
    st.builds(
        Reference,
        transport=st.just("oci"),
        path=st.from_regex(r"/?[A-Za-z0-9_.-]{1,8}(/[A-Za-z0-9_-]{1,8})?", fullmatch=True).map(Path),
        tag=st.none() | st.just("v1"),
        digest=st.none() | st.just(Digest(HEX)),
    ),
)


@given(_references)
def test_the_canonical_text_parses_to_the_same_value(reference: Reference) -> None:
    assert parse_reference(str(reference)) == reference


@given(st.text(max_size=60) | st.text("abA0:/@._-[] \t", max_size=40))
def test_any_text_is_either_a_name_that_survives_a_round_trip_or_a_plain_error(text: str) -> None:
    try:
        reference = parse_reference(text)
    except DuopackError:
        return
    assert parse_reference(str(reference)) == reference
