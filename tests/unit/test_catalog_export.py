"""Editors get a schema that agrees with the loader and explains every key."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from pipeline.catalog.export import catalog_schema, schema_text

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(catalog_schema())
    return jsonschema.Draft202012Validator(catalog_schema())


@pytest.fixture
def models() -> dict:
    return yaml.safe_load((ROOT / "models.yaml").read_text())


def objects(value):
    if isinstance(value, dict):
        if value.get("type") == "object":
            yield value
        for item in value.values():
            yield from objects(item)
    elif isinstance(value, list):
        for item in value:
            yield from objects(item)


def test_the_committed_schema_is_the_one_of_the_code():
    assert (ROOT / "models.schema.json").read_text() == schema_text(), (
        "run: duopack schema > models.schema.json"
    )


def test_the_repositorys_catalog_is_valid(validator, models):
    assert [error.message for error in validator.iter_errors(models)] == []


def test_models_yaml_names_the_schema_for_editors():
    assert (
        (ROOT / "models.yaml").read_text().startswith("# yaml-language-server: $schema=models.schema.json\n")
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.update(modles={}),
        lambda value: value["models"].update({"Bad Key": value["models"]["9b"]}),
        lambda value: value["models"]["9b"].pop("title"),
        lambda value: value["models"]["9b"].update(quantization="w4a4"),
        lambda value: value["models"]["9b"].update(sources=[]),
        lambda value: value["models"]["9b"].update(sources=[{"dir": "x", "modelscope": "a/b"}]),
        lambda value: value["models"]["9b"].update(sources=[{"modelscope": "no-owner"}]),
        lambda value: value["models"]["9b"]["profiles"]["n9"].update(tensor_parallel=3),
        lambda value: value["models"]["9b"]["profiles"]["n9"].update(port="12320"),
        lambda value: value["models"]["9b"]["profiles"]["n9"].update(env={"lower": "x"}),
        lambda value: value["bases"]["v0.20.2rc1"].update(vllm=0.20),
    ],
)
def test_a_wrong_catalog_is_red_in_the_editor(validator, models, change):
    change(models)
    assert not validator.is_valid(models)


def test_every_key_has_a_text_for_hovering():
    schema = catalog_schema()
    silent = [
        name
        for part in objects(schema)
        for name, value in part.get("properties", {}).items()
        if len(value.get("description", "")) < 10
    ]
    assert silent == []


def test_no_object_takes_unknown_keys():
    assert all(part.get("additionalProperties") is False for part in objects(catalog_schema()))


def test_the_schema_offers_no_null_defaults():
    assert '"default": null' not in json.dumps(catalog_schema()["$defs"])
