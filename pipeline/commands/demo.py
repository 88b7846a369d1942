"""`duopack demo`: the whole job on a tiny model, and what to type next."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict

from pipeline.commands.common import settings_of, showing
from pipeline.demo.run import Demo, demo
from pipeline.files import human_size
from pipeline.reports.output import print_json, print_text


def run(options: argparse.Namespace) -> int:
    with showing(options) as progress:
        done = demo(settings_of(options), os.environ, progress)
    if options.json:
        print_json({"built": asdict(done.built), "read_back": asdict(done.read)})
    else:
        print_text(_summary(done))
    return 0


def _summary(done: Demo) -> str:
    read = done.read
    scripts = "\n".join(f"              /{path}" for path in read.other_files if path.startswith("models/"))
    return f"""
Done: {done.destination}
  digest      {read.digest}
  read back   {read.layers} layers, {human_size(read.size)}; all {read.model_files} model files have the lock's sha256
  command     {" ".join(read.command)}
  beside them
{scripts}
  the lock    {done.directory / "models.lock"}

What happened: a hub on this machine served a tiny random model; models.lock pinned each file and the base
by digest; the files were downloaded and checked; start scripts were made; everything became layers on a
(stand-in) base image; and the result was read back. The real thing is the same with real names:

  duopack list                                  what can be built
  nox -s build-9b                               Qwen3.5-9B from ModelScope, into oci:build/9b
  DUOPACK_REGISTRY=registry.example/llm nox -s build-9b      … or straight into your registry
  duopack scripts 9b --to /tmp/9b               only the start scripts, to read

(no duopack on your PATH? it is .venv/bin/duopack, and nox is .venv/bin/nox)"""
