"""The client of OCI registries (distribution-spec 1.1): reading images from one and writing them to one.

From the bottom: `settings` (the environment, read once), `failures` (what can go wrong, in sentences),
`transport` (connections), `credentials` and `auth` (who we are), `client` (one repository), then `source`,
`upload` with `journal`, and `sink`.
"""
