"""A wrong models.yaml is answered with line, key, reason and mend; a right one becomes values."""

import copy
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeline.catalog.document import CatalogError, parse_document
from pipeline.catalog.load import catalog_from, load_catalog
from pipeline.catalog.schema import Architecture, Catalog

SMALLEST = """\
version: 1
default_base: b
bases:
  b:
    images: [registry.example/base:1]
    vllm: 0.20.2
    vllm_ascend: 0.20.2rc1
models:
  m:
    title: M
    directory: M
    architecture: qwen3.5
    max_positions: 4096
    sources: [{dir: weights}]
    profiles:
      p: {tensor_parallel: 1, served_name: m, max_model_len: 512, max_num_seqs: 4, gpu_memory_utilization: .5}
"""


def load(text: str) -> Catalog:
    return catalog_from(parse_document(text.encode(), Path("models.yaml")))


def problems(text: str):
    with pytest.raises(CatalogError) as caught:
        load(text)
    return caught.value.problems


def edited(*changes: tuple[str, str]) -> str:
    text = SMALLEST
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


def test_the_smallest_catalog_is_taken(tmp_path):
    path = tmp_path / "models.yaml"
    path.write_text(SMALLEST)
    catalog = load_catalog(path)
    assert catalog.models["m"].architecture is Architecture.QWEN3_5
    assert catalog.models["m"].profiles["p"].port == 12320
    assert catalog.models["m"].default_profile == "p"


@pytest.mark.parametrize(
    ("old", "new", "line", "said", "mend"),
    [
        (
            "vllm: 0.20.2\n",
            "vllm: 0.20\n",
            6,
            "bases.b.vllm: YAML reads 0.20 as a number",
            "quote it: '0.20'",
        ),
        ("title: M", "title: yes", 10, "models.m.title: YAML reads yes as true or false", "quote it: 'yes'"),
        ("title: M", "titel: M", 10, "models.m.titel: this key is unknown", "did you mean 'title'?"),
        ("tensor_parallel: 1", "tensor-parallel: 1", 16, "profiles.p.tensor-parallel", "'tensor_parallel'"),
        ("title: M", "title: M\n    port: 1", 11, "models.m.port: this key is unknown here", "a profile"),
        ("title: M\n    ", "", 9, "models.m: the key 'title' is missing", "name for people"),
        ("tensor_parallel: 1", "tensor_parallel: 3", 16, "3 is not allowed", "1, 2, 4 or 8"),
        ("qwen3.5", "qwen3_5", 12, "'qwen3_5' is not allowed", "did you mean 'qwen3.5'?"),
        (
            "max_num_seqs: 4",
            "max_num_seqs: '4'",
            16,
            "'4' is text, but this is a whole number",
            "without quotes",
        ),
        ("max_num_seqs: 4", "max_num_seqs: 4.5", 16, "4.5 is not a whole number", "Sequences served"),
        ("max_num_seqs: 4", "max_num_seqs: [4]", 16, "it is a list, but must be a whole number", ""),
        ("max_num_seqs: 4", "port: 99999, max_num_seqs: 4", 16, "port: 99999 is above 65535", "port inside"),
        ("utilization: .5", "utilization: 1.0", 16, "1.0 is not below 1", "Share of each chip"),
        ("title: M", "title:", 10, "title: it has no value, but needs text", "name for people"),
        ("  m:\n", "  M:\n", 9, "models.M: 'M' is not of the right form", "lower-case letters"),
        ("[{dir: weights}]", "[]", 14, "models.m.sources: it is empty", "Tried in order"),
        (
            "[{dir: weights}]",
            "[{dir: w, huggingface: a/b}]",
            14,
            "sources[0]: a source names exactly one",
            "",
        ),
        ("dir: weights", "modelscope: Qwen3", 14, "'Qwen3' is not of the right form", "owner/name"),
        ("directory: M", "directory: ../M", 11, "must not have . or ..", ""),
        ("directory: M", "directory: /M", 11, "'/M' is not of the right form", "a relative path"),
        ("sources: [{dir: weights}]", "sources: {dir: w}", 14, "it is a map, but must be a list", "- item"),
        ("version: 1", "version: 2", 1, "version: 2 is not allowed", "it may be 1"),
        ("version: 1", "version: 1\npublish: {tag: '{bse}'}", 2, "'{bse}' is not one of {base}", ""),
        (
            "version: 1",
            "version: 1\npublish: {repository: team/x}",
            2,
            "'team/x' is not of the right",
            "host",
        ),
        ("version: 1", "version: 1\nsets: {s: []}", 2, "sets.s: it is empty", ""),
        ("tensor_parallel: 1", "tensor_parallel: true", 16, "true is not a whole number", "Chips used"),
        ("tensor_parallel: 1", "tensor_parallel: 1.0", 16, "1.0 is not a whole number", "Chips used"),
        ("version: 1", "version: true", 1, "version: true is not a whole number", "version of this file"),
        ("title: M", "title: M\n    shard: [true]", 11, "shard[0]: true is not a whole number", "write"),
        ("tensor_parallel: 1", "tensor_parallel: '1'", 16, "'1' is not allowed", "write 1 without quotes"),
        ("title: M", 'title: "M\\u202e"', 10, "is not of the right form", "invisible"),
        ("title: M", 'title: "M\\u200b"', 10, "is not of the right form", "invisible"),
        ("title: M", 'title: "M\\x9b31m"', 10, "is not of the right form", "invisible"),
        ("dir: weights", "modelscope: a/b, revision: --x y", 14, "is not of the right form", "branch"),
        ("dir: weights", "modelscope: a/b, revision: a/../b", 14, "is not of the right form", "branch"),
        ("max_num_seqs: 4", "capture_sizes: [4, 1], max_num_seqs: 4", 16, "ascending", "write [1, 4]"),
        ("title: M", f"title: {'M' * 5000}", 10, "it is too long", "name for people"),
    ],
)
def test_a_wrong_value_is_told_with_line_key_reason_and_mend(old, new, line, said, mend):
    (problem,) = problems(edited((old, new)))
    assert said in problem.what
    assert mend in problem.mend
    assert problem.mend
    assert problem.position.line == line


def test_a_title_may_be_of_any_script():
    assert load(edited(("title: M", "title: 通义千问 3.5（é）"))).models["m"].title == "通义千问 3.5（é）"


def test_a_list_where_the_whole_file_should_be_a_map():
    (problem,) = problems("- a\n- b\n")
    assert problem.what == "the file: it is a list, but must be a map"


def test_a_list_for_a_map_of_models_is_told():
    (problem,) = problems(
        "version: 1\ndefault_base: b\nbases:\n  b: {images: [x], vllm: a, vllm_ascend: b}\nmodels:\n  - m\n"
    )
    assert problem.what == "models: it is a list, but must be a map"
    assert problem.position.line == 6


def test_all_errors_of_a_file_are_shown_at_once_in_the_order_of_lines():
    text = edited(
        ("title: M", "titel: M"), ("max_num_seqs: 4", "max_num_seqs: 0"), ("    images", "    image")
    )
    found = problems(text)
    assert [problem.position.line for problem in found] == sorted(problem.position.line for problem in found)
    assert len(found) == 3
    with pytest.raises(CatalogError) as caught:
        load(text)
    shown = str(caught.value)
    first, second, *rest = shown.splitlines()
    assert first == "models.yaml: 3 errors"
    assert second == "  models.yaml:5:5: bases.b.image: this key is unknown (did you mean 'images'?)"
    assert len(rest) == 2


def test_a_key_given_right_and_misspelt_is_judged_in_both_places():
    said = [problem.what for problem in problems(edited(("title: M", "titel: M\n    title: 5")))]
    assert len(said) == 2
    assert "YAML reads 5 as a number" in said[1]


def test_contradictions_are_shown_beside_the_errors_of_other_entries():
    other = (
        SMALLEST[SMALLEST.index("  m:") :].replace("  m:", "  n:").replace("p: {", "q: {").replace("M", "N")
    )
    text = SMALLEST.replace("title: M", "titel: M") + other.replace("max_num_seqs: 4", "max_num_seqs: 2")
    text += "sets: {all: [m, n, o]}\n"
    said = [problem.what for problem in problems(text)]
    assert any("titel" in what for what in said)
    assert any("capture size 4 is larger than max_num_seqs 2" in what for what in said)
    assert any("there is no model 'o'" in what for what in said)
    assert not any("there is no model 'm'" in what for what in said), "m is there, only unsound"


def test_a_hundred_errors_do_not_fill_the_screen():
    extra = "".join(f"    x{number}: 1\n" for number in range(100))
    with pytest.raises(CatalogError) as caught:
        load(SMALLEST.replace("    title: M\n", "    title: M\n" + extra))
    assert len(caught.value.problems) == 100
    assert str(caught.value).splitlines()[-1] == "  and 80 more."


def test_text_from_the_file_is_shown_without_its_control_characters():
    (problem,) = problems(edited(("title: M", '"\\e[31mtitle": M\n    title: M')))
    assert "\x1b" not in problem.what


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from([0.5, "", "x", "Qwen/x", "*"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["p", "dir", "port"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def paths(value, path=()):
    yield path
    for key, item in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from paths(item, (*path, key))


@given(st.data())
def test_whatever_stands_in_any_place_the_answer_is_a_catalog_or_an_error_with_a_place(data):
    value = yaml.safe_load(SMALLEST)
    path = data.draw(st.sampled_from([path for path in paths(value) if path]))
    changed = copy.deepcopy(value)
    inside = changed
    for part in path[:-1]:
        inside = inside[part]
    inside[path[-1]] = data.draw(ANYTHING)
    try:
        outcome = load(yaml.safe_dump(changed))
    except CatalogError as error:
        outcome = error
    if isinstance(outcome, CatalogError):
        assert all(problem.position.line >= 1 and problem.what for problem in outcome.problems)
        assert all(problem.mend for problem in outcome.problems)
    else:
        assert isinstance(outcome, Catalog)
