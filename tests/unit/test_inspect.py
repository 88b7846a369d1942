"""What is in an image and what it weighs; what differs between two; which tree a container sees."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.images import (
    DIRECTORY,
    TAG,
    gzipped,
    image_of,
    member,
    model_files,
    our_image,
    tar_of,
    tar_with,
    weights_of,
)
from support.oci_memory import MemorySource

from pipeline.cli import main
from pipeline.oci.layout import LayoutSink
from pipeline.oci.limits import DEFAULT
from pipeline.oci.transfer import copy_image
from pipeline.oci.tree import joined, leaves_root
from pipeline.stages.inside.image import Asking, Inside, platforms, see
from pipeline.stages.inspect.compare import compare
from pipeline.stages.inspect.parts import Inventory, take_inventory

BIG = 1 << 20


def inside(source: MemorySource, **asking) -> Inside:
    [found] = platforms(source, TAG, None)
    return see(source, TAG, found, Asking(**asking))


def inventory(source: MemorySource, **asking) -> Inventory:
    return take_inventory(inside(source, **asking))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return model_files(tmp_path_factory.mktemp("model") / "Tiny")


@pytest.mark.parametrize("deep", [False, True])
def test_every_stored_byte_belongs_to_one_part(tiny, deep):
    found = inventory(our_image(tiny), deep=deep)
    assert sum(part.stored for part in found.parts) == found.stored
    assert [part.kind for part in found.parts] == ["base", "model", "scripts"]
    base, model, scripts = found.parts
    assert base.layers == (0,)
    assert model.name == "Tiny"
    assert model.size == sum(map(len, tiny.values()))
    assert {file.path for file in scripts.files} == {
        "models/launch.json", "models/scripts/n9.sh", "models/scripts/list.sh", "models/scripts/healthcheck.sh",
    }  # fmt: skip
    assert found.waste == 0


NAMES = st.sampled_from(
    [
        "models/a/x.bin",
        "models/a/w.safetensors",
        "models/b/w.safetensors",
        "etc/x",
        "models/a/.wh.x.bin",
        "models/.wh.a",
        "models/launch.json",
    ]
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.dictionaries(NAMES, st.integers(0, 3000), max_size=5), st.booleans()),
        min_size=1,
        max_size=5,
    )
)
def test_no_byte_is_lost_or_counted_twice_whatever_the_layers(layers):
    tars = [tar_of({name: bytes(size) for name, size in files.items()}) for files, _ in layers]
    source = image_of(
        *(gzipped(tar) if packed else tar for tar, (_, packed) in zip(tars, layers, strict=True))
    )
    for deep in (False, True):
        found = inventory(source, deep=deep)
        assert sum(part.stored for part in found.parts) == found.stored


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(NAMES, st.integers(1, 9), max_size=4), min_size=1, max_size=4))
def test_the_tree_is_what_unpacking_the_layers_in_order_gives(layers):
    expected: dict[str, int] = {}
    for files in layers:
        for name in files:
            folder, _, last = name.rpartition("/")
            if last.startswith(".wh."):
                gone = f"{folder}/{last.removeprefix('.wh.')}".lstrip("/")
                expected = {p: s for p, s in expected.items() if p != gone and not p.startswith(f"{gone}/")}
        expected |= {name: size for name, size in files.items() if "/.wh." not in name}
    source = image_of(*(tar_of({name: bytes(size) for name, size in files.items()}) for files in layers))
    tree = inside(source).tree
    assert {path: entry.member.size for path, entry in tree.files()} == expected
    total = sum(size for files in layers for name, size in files.items() if "/.wh." not in name)
    assert sum(one.size for one in tree.hidden) + sum(expected.values()) == total


def test_an_opaque_directory_hides_what_is_below_but_not_its_own():
    below = tar_of({"d/a": b"1", "d/sub/b": b"22", "e": b"3"})
    above = tar_of({"d/.wh..wh..opq": b"", "d/c": b"4"})
    tree = inside(image_of(below, above)).tree
    assert [path for path, _ in tree.files()] == ["d/c", "e"]
    assert {(one.path, one.how, one.by) for one in tree.hidden} == {
        ("d/a", "removed", 1),
        ("d/sub/b", "removed", 1),
    }


def test_a_file_in_place_of_a_directory_hides_all_that_was_in_it():
    tree = inside(image_of(tar_of({"d/a": b"1"}), tar_of({"d": b"file"}))).tree
    assert [path for path, _ in tree.files()] == ["d"]


def test_links_lead_where_a_container_would_go():
    tar = tar_with(
        (member("usr/bin/tool"), b"t"),
        member("bin", b"2", linkname="usr/bin"),
        member("root/up", b"2", linkname="../../../../usr/bin/tool"),
        member("abs", b"2", linkname="/bin/tool"),
    )
    tree = inside(image_of(tar)).tree
    for path in ("bin/tool", "root/up", "abs"):
        entry = tree.resolve(path)
        assert entry
        assert entry.member.path == "usr/bin/tool"
    assert joined("a/b", "../c/./d") == "a/c/d"
    assert leaves_root("a", "../../x")
    assert not leaves_root("a", "../x")
    assert leaves_root("a", "../x/../../a")


@pytest.mark.parametrize("deep", [False, True])
def test_duplicates_are_named_with_their_waste(deep):
    same = weights_of(size=BIG)
    other = bytearray(same)
    other[len(other) // 2] ^= 1
    files = {"a/w.safetensors": same, "b/w.safetensors": same, "c/w.safetensors": bytes(other)}
    found = inventory(image_of(tar_of(files)), deep=deep)
    [twice] = found.duplicates
    assert twice.paths == ("a/w.safetensors", "b/w.safetensors")
    assert twice.proved is deep
    assert twice.waste == len(same)
    assert found.waste == len(same)


def test_a_difference_between_the_samples_is_found_only_by_reading_all():
    same = bytes(4 * BIG)
    other = bytearray(same)
    other[BIG] = 1
    source = image_of(tar_of({"a.bin": same, "b.bin": bytes(other)}))
    [guess] = inventory(source).duplicates
    assert not guess.proved
    assert inventory(source, deep=True).duplicates == ()


def test_hidden_copies_weigh_in_a_part_of_their_own():
    files = {"m/w.safetensors": weights_of(size=BIG)}
    again = tar_with((member("m/w.safetensors", mode=0o755), files["m/w.safetensors"]))
    found = inventory(image_of(tar_of(files), again))
    [hidden] = [part for part in found.parts if part.kind == "hidden"]
    assert hidden.stored > 2 * BIG
    assert [one.path for one in found.hidden] == ["m/w.safetensors"]


def test_a_layer_that_was_not_read_is_a_part_that_says_so():
    source = image_of(gzipped(tar_of({"x": bytes(range(256)) * 999})))
    found = inventory(source, limits=replace(DEFAULT, whole=10, peek=100))
    assert [part.kind for part in found.parts] == ["unread"]


def test_a_changed_script_transfers_one_small_layer(tiny):
    before = inside(our_image(tiny))
    after = inside(our_image(tiny, max_model_len=8192))
    found = compare(before, after)
    assert found.transfer.layers == found.transfer.docker_layers == 1
    assert found.transfer.size < 100_000
    assert found.shared_layers == 2
    assert {one.path for one in found.files} == {"models/launch.json", "models/scripts/n9.sh"}
    assert {one.change for one in found.files} == {"changed"}
    assert [one.name for one in found.settings] == ["Labels.io.duopack.launch"]
    assert compare(before, before).same


def test_files_added_removed_and_changed_are_told():
    before = image_of(tar_of({"same": b"1", "gone": b"2", "grown": b"3", "turned": b"44"}))
    after = image_of(
        tar_with(
            (member("same"), b"1"), (member("new"), b"5"), (member("grown"), b"66"), (member("turned"), b"55"),
            member("link", b"2", linkname="same"),
        ),
        settings={"Cmd": ["x"], "Env": ["A=1"], "Labels": {"l": "1"}},
    )  # fmt: skip
    for deep in (False, True):
        found = compare(inside(before, deep=deep), inside(after, deep=deep))
        assert {(one.path, one.change) for one in found.files} == {
            ("gone", "removed"), ("new", "added"), ("grown", "changed"), ("turned", "changed"), ("link", "added"),
        }  # fmt: skip
        assert {one.name for one in found.settings} == {"Cmd", "Env.A", "Labels.l"}


def test_docker_pulls_again_what_lies_on_a_changed_layer():
    one, two = tar_of({"a": bytes(3000)}), tar_of({"b": bytes(5000)})
    found = compare(inside(image_of(one, two)), inside(image_of(tar_of({"c": b"x"}), two)))
    assert found.transfer.layers == 1
    assert found.transfer.docker_layers == 2


def test_what_cannot_be_compared_without_reading_it_is_unknown():
    before, after = bytes(range(256)) * 900, bytes(reversed(range(256))) * 900
    found = compare(
        inside(image_of(gzipped(tar_of({"x": before})))), inside(image_of(gzipped(tar_of({"x": after}))))
    )
    assert [one.change for one in found.files] == ["unknown"]


# --- As a user types it -------------------------------------------------------------------------------------------


@pytest.fixture
def layout(tiny, tmp_path: Path) -> str:
    copy_image(our_image(tiny), TAG, None, LayoutSink(tmp_path / "one", "1"))
    copy_image(our_image(tiny, max_model_len=8192), TAG, None, LayoutSink(tmp_path / "one", "2"))
    return f"oci:{tmp_path / 'one'}"


def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> tuple[int, str, str]:
    code = main(
        [words[0], "--catalog", str(tmp_path / "none.yaml"), "--work", str(tmp_path / "w"), *words[1:]]
    )
    out, err = capsys.readouterr()
    return code, out, err


def test_inspect_draws_a_tree_and_gives_json(layout, tmp_path, capsys):
    code, out, _ = run(capsys, tmp_path, "inspect", f"{layout}:1")
    assert code == 0
    assert "├─" in out
    assert f"Tiny in /{DIRECTORY}: 10 files in 1 layer" in out
    code, out, _ = run(capsys, tmp_path, "inspect", f"{layout}:1", "--json")
    [image] = json.loads(out)["images"]
    assert {part["kind"] for part in image["parts"]} == {"base", "model", "scripts"}
    assert image["waste"] == 0


def test_inspect_compares_two(layout, tmp_path, capsys):
    code, out, _ = run(capsys, tmp_path, "inspect", f"{layout}:1", f"{layout}:2")
    assert code == 0
    assert "transfer  1 layers" in out
    assert "/models/scripts/n9.sh" in out
    code, out, _ = run(capsys, tmp_path, "inspect", f"{layout}:1", f"{layout}:2", "--json", "--deep")
    assert json.loads(out)["comparison"]["transfer"]["layers"] == 1
    _, out, _ = run(capsys, tmp_path, "inspect", f"{layout}:1", f"{layout}:1")
    assert "nothing differs" in out


def test_verify_ends_with_0_or_1_and_says_why(layout, tmp_path, capsys):
    code, out, _ = run(capsys, tmp_path, "verify", f"{layout}:1", "--deep", "--quiet")
    assert code == 0
    assert "Sound: no errors, 0 warnings (every byte was read)." in out
    code, out, _ = run(capsys, tmp_path, "verify", f"{layout}:1", "--json")
    assert json.loads(out)["images"][0]["sound"] is True
    index = json.loads((tmp_path / "one/index.json").read_text())
    manifest = index["manifests"][0]["digest"].removeprefix("sha256:")
    layer = json.loads((tmp_path / f"one/blobs/sha256/{manifest}").read_text())["layers"][1]["digest"]
    blob = tmp_path / "one/blobs/sha256" / layer.removeprefix("sha256:")
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(bytes(data))
    assert run(capsys, tmp_path, "verify", f"{layout}:1")[0] == 0
    code, out, _ = run(capsys, tmp_path, "verify", f"{layout}:1", "--deep", "--quiet")
    assert code == 1
    assert "NOT SOUND" in out
    blob.unlink()
    code, out, _ = run(capsys, tmp_path, "verify", f"{layout}:1")
    assert code == 1
    assert "the blob is missing" in out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["verify", "oci:/nowhere"], 1, "not an OCI image layout"),
        (["verify", "Foo"], 2, "capital letters"),
        (["verify", "{layout}:3"], 1, "no such image"),
        (["verify", "{layout}:1", "--locked"], 2, "no lock"),
        (["verify", "{layout}:1", "--limit", "members"], 2, "is no limit"),
        (["verify", "{layout}:1", "--limit", "seconds=0"], 2, "is no limit"),
        (["inspect", "{layout}:1", "oci:/nowhere"], 1, "not an OCI image layout"),
        (["verify", "docker-archive:/nowhere"], 1, "cannot be read"),
        (["verify", "{layout}:1", "--base", "{layout}:9"], 1, "no such image"),
    ],
)
def test_wrong_use_is_told_in_a_paragraph(layout, tmp_path, capsys, words, code, says):
    found, _, err = run(capsys, tmp_path, *(word.replace("{layout}", layout) for word in words))
    assert found == code
    assert says in err
    assert "Traceback" not in err


def test_limits_are_raised_and_lowered_by_option(layout, tmp_path, capsys):
    code, out, _ = run(capsys, tmp_path, "verify", f"{layout}:1", "--limit", "members=3")
    assert code == 1
    assert "--limit members=" in out
    assert (
        run(capsys, tmp_path, "verify", f"{layout}:1", "--limit", "members=1K", "--limit", "seconds=60")[0]
        == 0
    )
