"""models.lock: what the catalog resolved to. `values` holds its values and its file form, `resolve` asks the
hubs and registries, `compare` shows what moved."""
