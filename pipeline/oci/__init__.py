"""Images as values: digests, layers, manifests, and the places they are read from and written to.

Knows nothing of models or chips. Facts are from the OCI image-spec 1.1 and distribution-spec 1.1.
"""
