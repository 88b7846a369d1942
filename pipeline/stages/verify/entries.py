"""The files of an image: modes, links, leftovers, copies, secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pipeline.errors import quoted
from pipeline.files import human_size
from pipeline.oci.tree import leaves_root
from pipeline.stages.inside.image import Inside
from pipeline.stages.inside.leftovers import leftovers
from pipeline.stages.inside.models import ModelDirectory, below
from pipeline.stages.verify.finding import Finding, some

HIDDEN = 1 << 20
"""Bytes from which a copy that nobody sees is worth a word."""
_SECRET = re.compile(r"(?i)(?:^|_)(?:token|password|passwd|secret|api_?key|credentials?|access_?key)(?:$|_)")
_NO_SECRET = re.compile(r"(?i)^(?:|true|false|none|0|1)$")


def check_entries(inside: Inside, models: Sequence[ModelDirectory]) -> Iterator[Finding]:
    """Everything about files that is not about what is in them."""
    yield from _modes(inside, models)
    yield from _links(inside, models)
    yield from _hidden(inside)
    yield from _leftovers(inside, models)
    yield from _secrets(inside)


def _modes(inside: Inside, models: Sequence[ModelDirectory]) -> Iterator[Finding]:
    for model in models:
        closed, open_ = [], []
        for path, entry in below(inside, model):
            mode, kind = entry.member.mode, entry.member.kind
            needed = {"file": 0o004, "directory": 0o005}.get(kind, 0)
            if mode & needed != needed:
                closed.append(path)
            if kind in {"file", "directory"} and mode & 0o6002 and not mode & 0o1000:
                open_.append(path)
        if closed:
            sentence = (
                f"only its owner can read {some(closed)}: a server that does not run as root cannot start"
            )
            yield Finding(
                "mode-closed", "warning", sentence, "give files 0644 and directories 0755", str(model.name)
            )
        if open_:
            sentence = f"anybody may write to, or it runs as its owner: {some(open_)}"
            yield Finding(
                "mode-open", "warning", sentence, "give files 0644 and directories 0755", str(model.name)
            )


def _links(inside: Inside, models: Sequence[ModelDirectory]) -> Iterator[Finding]:
    for path, entry in inside.tree.entries.items():
        if entry.layer < inside.base.count or entry.member.kind not in {"symlink", "hardlink"}:
            continue
        folder, link = path.rpartition("/")[0], entry.member.link
        if entry.member.kind == "symlink" and leaves_root(folder, link):
            sentence = f"the link leads out of the image's root, to '{quoted(link)}'"
            yield Finding(
                "link-outside", "error", sentence, "copy what it leads to in its place", f"/{quoted(path)}"
            )
        model = next((one for one in models if one.path and path.startswith(f"{one.path}/")), None)
        if model is None:
            continue
        target = inside.tree.resolve(path)
        if target is None and not inside.unread:
            sentence = f"the link leads to '{quoted(link)}', which is not in the image"
            yield Finding(
                "link-broken", "error", sentence, "copy the file itself, not a link", f"/{quoted(path)}"
            )
        elif target is not None and not target.member.path.startswith(f"{model.path}/"):
            sentence = f"the link leads out of the model's directory, to '{quoted(link)}'"
            mend = "copy the file itself: the directory cannot be mounted or copied alone"
            yield Finding("link-leaves", "warning", sentence, mend, f"/{quoted(path)}")


def _hidden(inside: Inside) -> Iterator[Finding]:
    for one in inside.tree.hidden:
        if one.size < HIDDEN or one.by < inside.base.count:
            continue
        what = f"{human_size(one.size)} of it lie in layer {one.layer}, and layer {one.by} "
        if one.how == "replaced":
            what += "has the whole file again: a chmod, chown, touch or change after the copy does that"
            id_, mend = "copy-up", "copy the file once, with its final mode and owner (COPY --chmod, --chown)"
        else:
            what += "removes it: it is still pulled and stored"
            id_, mend = "removed", "remove files in the layer that would add them, or do not copy them"
        yield Finding(id_, "warning", what, mend, f"/{quoted(one.path)}")


def _leftovers(inside: Inside, models: Sequence[ModelDirectory]) -> Iterator[Finding]:
    for one in leftovers(inside, models):
        files = f"{one.files} files, " if one.files > 1 else ""
        sentence = f"a download or a tool left it behind ({files}{human_size(one.size)}); no server reads it"
        yield Finding("leftover", "warning", sentence, "leave it out of the copy", f"/{quoted(one.path)}")


def _secrets(inside: Inside) -> Iterator[Finding]:
    for kind, values in (("variable", inside.env), ("label", inside.labels)):
        for name, value in values.items():
            if _SECRET.search(name.replace(".", "_").replace("-", "_")) and not _NO_SECRET.match(value):
                sentence = (
                    f"the {kind} {quoted(name, 80)} looks like a secret: whoever pulls the image has it"
                )
                mend = "give it to the container (docker run -e), change it at its issuer, and build the image again"
                yield Finding("secret", "error", sentence, mend, "config")
