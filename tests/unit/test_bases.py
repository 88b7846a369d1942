"""`duopack bases`: what is known, what is locked, what the repository has."""

from __future__ import annotations

import json
from itertools import groupby

import pytest
from support.project import refused

from pipeline.ascend.abilities import ABILITIES, abilities
from pipeline.catalog.schema import Catalog
from pipeline.errors import DuopackError
from pipeline.stages import bases as bases_stage
from pipeline.stages.bases import find_tags, report_bases

VERSIONS = ("0.20.2rc1", "0.20.2", "0.21.0rc1", "0.22.0", "0.23.0rc1", "0.23.0", "1.0.0")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_has_one_verdict_on_each_subject(version):
    found = [one.id for one in abilities(version)]
    assert len(found) == len(set(found))


def test_what_is_known_has_a_source_and_the_subjects_stand_together():
    assert all(one.source and one.sentence and one.sentence[-1] != "." for one in ABILITIES)
    subjects = [subject for subject, _ in groupby(ABILITIES, key=lambda one: one.id)]
    assert len(subjects) == len(set(subjects))
    assert [one.verdict for one in abilities("0.20.2rc1") if one.id == "mtp"] == ["no"]
    with pytest.raises(DuopackError, match="not a version"):
        abilities("latest")


def test_the_list_says_what_is_locked_and_why_something_is_not(project):
    ran = project.run("bases")
    assert ran.code == 0
    assert "stand-in (default)" in ran.out
    assert "CANN not known" in ran.out
    assert "not locked: base 'stand-in' is not in models.lock" in ran.out
    assert project.run("lock").code == 0
    [base] = project.run("bases", "--json").json
    assert base["locked"]
    assert set(base["digests"]) == {"linux/arm64", "linux/amd64"}
    assert {one["verdict"] for one in base["abilities"]} <= {"yes", "limited", "no"}
    project.content["bases"]["stand-in"]["images"].append("oci:elsewhere:1")
    project.write()
    [base] = project.run("bases", "--json").json
    assert (base["locked"], base["digests"]) == (False, {})
    assert "other images" in base["why_not_locked"]


class Answers:
    """Registries by name: tags, or an error."""

    def __init__(self, monkeypatch, **tags) -> None:
        from pipeline.oci.registry.source import RegistrySource

        self.asked: list[str] = []
        answers = self

        class Source(RegistrySource):
            def __init__(self, registry: str) -> None:
                self.registry = registry

            def tags(self) -> tuple[str, ...]:
                answers.asked.append(self.registry)
                found = tags[self.registry.partition(".")[0]]
                if found is None:
                    raise DuopackError("it is down", where=self.registry)
                return found

        monkeypatch.setattr(bases_stage, "open_source", lambda one, **_: Source(one.registry))


class Quiet:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def catalog(project, images):
    base = {**project.content["bases"]["stand-in"], "images": images}
    other = {**base, "images": [image.replace(":1", ":2") for image in images]}
    return Catalog.model_validate_json(
        json.dumps({**project.content, "bases": {"stand-in": base, "newer": other}})
    )


def test_tags_come_from_the_first_mirror_that_answers_and_each_repository_is_asked_once(project, monkeypatch):
    answers = Answers(monkeypatch, one=None, two=("v1", "v1-310p-openeuler"))
    quiet = Quiet()
    found = catalog(project, ["one.example/a/b:1", "two.example/m/a/b:1"])
    [tags] = find_tags(found, project.directory, quiet)
    assert (tags.image, tags.tags) == ("two.example/m/a/b", ("v1", "v1-310p-openeuler"))
    assert answers.asked == ["one.example", "two.example"]
    assert "it is down" in quiet.warnings[0]


def test_no_mirror_at_all_is_an_error_with_what_each_said(project, monkeypatch):
    Answers(monkeypatch, one=None, two=None)
    with pytest.raises(DuopackError, match=r"one\.example.*down.*two\.example"):
        list(find_tags(catalog(project, ["one.example/a:1", "two.example/a:1"]), project.directory, Quiet()))


def test_a_base_in_a_layout_has_no_tags_to_ask_for(project):
    ran = project.run("bases", "--tags")
    assert (ran.code, ran.err) == (0, "")


def test_every_base_of_the_repository_s_own_catalog_is_reported(project):
    found = report_bases(Catalog.model_validate_json(json.dumps(project.content)), bases_stage.Lock())
    assert [one.key for one in found] == ["stand-in"]


DOCKERFILE = """\
FROM quay.io/ascend/cann:9.1.0-beta.1-310p-openeuler24.03-py3.11
ARG VLLM_REPO=https://github.com/vllm-project/vllm.git
ARG VLLM_TAG=v0.20.2
RUN true
"""


def test_versions_are_read_from_the_checkout_s_dockerfile(tmp_path):
    known = bases_stage._known(DOCKERFILE, tmp_path)
    assert known == {"vllm": "0.20.2", "cann": "9.1.0-beta.1", "python": "3.11"}
    assert bases_stage._known("FROM busybox\nARG VLLM_TAG=$(evil)\n", tmp_path) == {}


def test_wrong_use_of_build_is_told(project, tmp_path):
    refused(project.run("bases", "build"), 2, "built from a checkout")
    refused(project.run("bases", "--source", tmp_path), 2, "bases build")
    refused(
        project.run("bases", "build", "--source", tmp_path), 2, "no Dockerfile.310p.openEuler", "git clone"
    )
    (tmp_path / "Dockerfile.310p.openEuler").write_text("FROM scratch\n")
    refused(
        project.run("bases", "build", "--source", tmp_path, "--name", "A/../b"), 2, "cannot be a base's key"
    )
    refused(project.run("bases", "build", "--source", tmp_path, "--build-arg", "X"), 2, "not NAME=VALUE")
