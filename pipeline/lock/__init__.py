"""models.lock: what the catalog resolved to.

`values` holds its values and its file form, `resolve` asks the hubs and registries about one entry, `refresh`
brings the whole lock up to date, `compare` shows what moved.
"""
