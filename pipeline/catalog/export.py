"""The JSON schema of models.yaml, for editors: completion, hover help and red lines while typing."""

from __future__ import annotations

import json
from typing import Any

from pipeline.catalog.schema import Catalog


def catalog_schema() -> dict[str, Any]:
    """The schema (JSON Schema 2020-12): what `load_catalog` checks of each value, not across values."""
    schema = Catalog.model_json_schema()
    titled = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "duopack catalog (models.yaml)",
        **{name: value for name, value in schema.items() if name != "title"},
    }
    plain: dict[str, Any] = _plain(titled)
    return plain


def schema_text() -> str:
    """The schema as `models.schema.json` holds it: the same bytes each time."""
    return json.dumps(catalog_schema(), indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def _plain(value: Any) -> Any:
    """Drops what only repeats the key or shows an absent value as `null`: editors would offer both."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {name: _plain(item) for name, item in value.items() if not _noise(name, item)}
    arms = [arm for arm in kept.get("anyOf", []) if arm != {"type": "null"}]
    if len(arms) == 1 and "$ref" not in arms[0]:
        # A key without a value ("note:") is still allowed, as the loader takes it for an absent one.
        (arm,) = arms
        kinds = arm.get("type", "string")
        del kept["anyOf"]
        return {**kept, **arm, "type": [kinds, "null"]}
    if "patternProperties" in kept:
        kept["additionalProperties"] = False
    return kept


def _noise(name: str, item: Any) -> bool:
    return (name == "title" and isinstance(item, str) and not item.startswith("duopack")) or (
        name == "default" and item is None
    )
