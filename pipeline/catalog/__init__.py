"""The catalog: models.yaml as checked values. `schema` is its shape, `load` reads it, `target` picks what to build."""
