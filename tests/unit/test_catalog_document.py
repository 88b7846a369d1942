"""YAML of any kind, sound or hostile, gives data with positions or an error with a line."""

from pathlib import Path

import pytest

from pipeline.catalog.document import MAX_BYTES, CatalogError, Position, parse_document, read_document
from pipeline.errors import UsageError

WHERE = Path("models.yaml")


def read(text: str | bytes):
    return parse_document(text.encode() if isinstance(text, str) else text, WHERE)


def problems(text: str | bytes):
    with pytest.raises(CatalogError) as caught:
        read(text)
    return caught.value.problems


def test_every_key_and_value_has_its_line_and_column():
    document = read("a:\n  b: [x, 'y']\n")
    assert document.data == {"a": {"b": ["x", "y"]}}
    assert document.entry(("a", "b")).key == Position(2, 3)
    assert document.entry(("a", "b", 1)).value == Position(2, 10)


def test_a_path_that_is_not_there_has_the_position_of_the_nearest_part_above():
    assert read("a:\n  b: 1\n").entry(("a", "b", "c", 3)).key == Position(2, 3)


def test_a_scalar_keeps_the_way_it_was_written():
    assert read("vllm: 0.20\n").entry(("vllm",)).written == "0.20"


def test_merge_keys_fill_in_what_the_map_does_not_say_itself():
    document = read("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3\nc: {<<: [{x: 7}, *a]}\n")
    assert document.data["b"] == {"y": 3, "x": 1}
    assert document.data["c"] == {"x": 7, "y": 2}
    assert document.entry(("b", "x")).key.line == 1
    assert list(document.data["b"]) == ["y", "x"], (
        "a map's own keys come first: the first profile is the command"
    )


@pytest.mark.parametrize(
    ("text", "line", "column", "said"),
    [
        ("a:\n\tb: 1", 2, 1, "a tab"),
        ("a:\n  b: 1\n \tc: 1", 3, 2, "a tab"),
        ("a: 1\na: 2", 2, 1, "'a' is given twice, first in line 1"),
        ("1: x", 1, 1, "reads the key 1 as a number"),
        ("yes: x", 1, 1, "reads the key yes as true or false"),
        ("? [a]\n: x", 1, 3, "must be plain text"),
        ("a: b: c", 1, 5, "a colon"),
        ("a: {x: 1\nb: 2", 2, 2, "a bracket is not closed"),
        ("a: 'x", 1, 6, "not closed"),
        ("a: 2024-01-01", 1, 4, "as a date"),
        ("a: 010", 1, 4, "not a plain number"),
        ("a: 1:30", 1, 4, "not a plain number"),
        ("a: .nan", 1, 4, "not a plain number"),
        ("a: 0x10", 1, 4, "not a plain number"),
        ("a: " + "9" * 5000, 1, 4, "not a plain number"),
        ("a: !!python/object/apply:os.system [id]", 1, 4, "the tag"),
        ("a: !!binary aGk=", 1, 4, "as binary data"),
        ("a: *nowhere", 1, 4, "an alias names an anchor"),
        ("a: &a [*a]", 1, 4, "contains it"),
        ("a: &a {<<: *a}", 1, 4, "contains it"),
        ("a: 1\n---\nb: 2", 2, 1, "a second document"),
        ("<<: 3", 1, 5, "takes a map"),
        ("a: x\nb: \u0007", 2, 4, "control character U+0007"),
        (b"ok: 1\nname: \xe9\n", 2, 7, "not UTF-8"),
    ],
)
def test_what_is_not_sound_is_told_with_its_place(text, line, column, said):
    (problem,) = problems(text)
    assert said in problem.what
    assert problem.position == Position(line, column)
    assert problem.mend


def test_several_bad_values_are_told_at_once():
    assert [problem.position.line for problem in problems("1: x\nb: 010\nb: 2")] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["list", "merge"])
def test_aliases_cannot_unfold_without_end(kind):
    first = "a0: &a0 {k: 1}\n" if kind == "merge" else "a0: &a0 [x, x]\n"
    form = "{{<<: [{}]}}" if kind == "merge" else "[{}]"
    lines = [f"a{n}: &a{n} " + form.format(", ".join([f"*a{n - 1}"] * 10)) for n in range(1, 12)]
    assert "more than" in problems(first + "\n".join(lines))[0].what


def test_deep_nesting_is_refused_without_a_crash():
    with pytest.raises(UsageError, match="nested deeper"):
        read("[" * 20_000)


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n"])
def test_an_empty_file_is_told(text):
    with pytest.raises(UsageError, match="it is empty"):
        read(text)


def test_a_byte_order_mark_is_taken_away():
    assert read(b"\xef\xbb\xbfa: 1").data == {"a": 1}


def test_a_missing_file_says_how_to_name_another(tmp_path):
    with pytest.raises(UsageError, match=r"no such file.*--catalog"):
        read_document(tmp_path / "models.yaml")


def test_a_directory_is_not_a_catalog(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_document(tmp_path)


def test_a_file_of_absurd_size_is_refused(tmp_path):
    path = tmp_path / "models.yaml"
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(UsageError, match="larger than 256 KiB"):
        read_document(path)
