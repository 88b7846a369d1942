"""The catalog: models.yaml as checked values.

`schema` is its shape, `document` reads YAML with positions, `load` makes values of it, `checks` looks across
them, `target` picks what to build, `export` writes the JSON schema for editors.
"""
