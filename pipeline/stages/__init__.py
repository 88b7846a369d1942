"""The stages, in the order in which `build` runs them.

    lock      models.yaml → models.lock: every file's sha256, every base's digest     (pipeline.lock)
    download  the lock's files on disk, each checked                                  download.py
    making    what the catalog asks to be made of it: quantized, split per rank       making.py, quantize/, shard.py
    launch    start scripts, launch.json, labels                                      launch.py
    image     base + one layer per large file + launch layer, as a value              image.py
    send      that value into a registry, layout, archive or engine, in one pass      build.py, pipeline.oci
    publish   a finished image copied byte for byte to where people pull it           publish.py
    export    images in an archive, parts or a layout, and back in on another host    export.py, importing.py
    verify    an image judged where it lies, and inspect what is in it                verify/, inspect/, inside/

Variants of a build: platforms.py (an index over several), docker_builder.py (the same by `docker build`). sisters.py
finds layers beside the destination that need not be sent; bases.py tells of bases and makes them.

Around servers: running.py, containers.py (ps), smoke.py, diagnose.py, bench.py; around hosts and memory: doctor.py,
survey.py, budget.py.

A stage is a function of its inputs and returns a frozen result. `download` keeps a record on disk of what it has
verified, by sha256 and file identity, so that a second run reads nothing again; what is made carries a record of its
inputs, so that it is made once. The layer memo (`LayerMemo`) remembers the digest of a layer that was packed before.
"""
