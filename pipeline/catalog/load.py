"""Reads models.yaml: text, then types, then what holds between entries; all errors of a stage at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.catalog.checks import check_catalog
from pipeline.catalog.document import CatalogError, Document, KeyPath, Problem, read_document
from pipeline.catalog.schema import Catalog
from pipeline.catalog.words import problems_of, shown_path

_SECTIONS = ("bases", "models", "sets")


def load_catalog(path: Path) -> Catalog:
    """The checked catalog in `path`.

    Raises CatalogError, a UsageError with every problem's line, column, key, sentence and mend, when the file
    is not YAML, not of the catalog's shape, or contradicts itself; UsageError when it cannot be read at all.
    """
    return catalog_from(read_document(path))


def catalog_from(document: Document) -> Catalog:
    """As `load_catalog`, from a document that has been read."""
    try:
        catalog = _validated(document.data)
    except ValidationError as error:
        problems = [
            *problems_of(error.errors(include_url=False), document),
            *_problems_of_the_rest(error, document),
        ]
        raise CatalogError(document.path, problems) from None
    if problems := _cross_problems(catalog, document, frozenset()):
        raise CatalogError(document.path, problems)
    return catalog


def _validated(data: Any) -> Catalog:
    # Strict JSON mode: a list becomes a tuple and a text an enum, but no type is ever guessed from another.
    return Catalog.model_validate_json(json.dumps(data), strict=True)


def _problems_of_the_rest(error: ValidationError, document: Document) -> list[Problem]:
    """What contradicts among the entries whose shape is sound, so that one run shows as much as it can."""
    broken = {tuple(item["loc"][:2]) for item in error.errors(include_url=False)}
    if any(len(path) < 2 or path[0] not in _SECTIONS for path in broken):
        return []
    rest = {
        name: {key: item for key, item in value.items() if (name, key) not in broken}
        if name in _SECTIONS
        else value
        for name, value in document.data.items()
    }
    try:
        catalog = _validated(rest)
    except ValidationError:
        return []
    return _cross_problems(catalog, document, frozenset(str(key) for _, key in broken))


def _cross_problems(catalog: Catalog, document: Document, unsound: frozenset[str]) -> list[Problem]:
    return [
        Problem(
            _position(document, finding.path), f"{shown_path(finding.path)}: {finding.what}", finding.mend
        )
        for finding in check_catalog(catalog, unsound)
    ]


def _position(document: Document, path: KeyPath) -> Any:
    return document.entry(path).key
