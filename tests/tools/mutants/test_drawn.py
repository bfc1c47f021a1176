"""Mutants drawn by a seed: what is changed, which tests are run for it, and what is kept of the results."""

import ast
import json

import pytest

from tests.tools.mutants.__main__ import ROOT
from tests.tools.mutants.covering import Covering, _function, record
from tests.tools.mutants.draw import changes, draw
from tests.tools.mutants.score import Judged, Results, copy_to, failures, judged, report


def changed(source):
    source = source.encode()
    return {each.planted(source).decode() for each in changes("a.py", source)}


@pytest.mark.parametrize(
    ("source", "others"),
    [
        ("a = b < c", {"a = (b <= c)"}),
        ("a = b + c", {"a = (b - c)"}),
        ("a = b and c", {"a = ((b) or (c))"}),
        ("a = not b", {"a = b"}),
        ("a = 1", {"a = 2"}),
        ("a = True", {"a = False"}),
        ("if a:\n    pass", {"if (not (a)):\n    pass"}),
        ("a.wait()", {"pass"}),
        ("a += b", {"pass"}),
        ("f(a, b)", {"pass", "f(b, a)"}),
        ("def f(a):\n    return a", {"def f(a):\n    return None"}),
    ],
)
def test_each_kind_of_change(source, others):
    assert changed(source) == others


@pytest.mark.parametrize(
    "source",
    [
        "raise E(a < b)",
        "a: int | None",
        'f"{1}"',
        "assert a < 1",
        "def f(a: int = b) -> 1: pass",
        "f(*a, b)",
    ],
)
def test_texts_of_errors_annotations_and_own_checks_are_left_as_they_are(source):
    assert changed(source) - {"pass"} == set()


@pytest.mark.slow
def test_a_seed_draws_the_same_changes_of_all_files_and_each_is_code():
    root = ROOT / "accel_fn"
    drawn = draw(root, 3, 200)
    assert drawn == draw(root, 3, 200) != draw(root, 4, 200)
    assert len({each.file for each in drawn}) > 50
    for each in drawn:
        source = (root / each.file).read_bytes()
        planted = each.planted(source)
        assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(source))


@pytest.mark.parametrize(
    "context",
    [
        "tests.data.test_order.test_it",
        "tests/data/test_order.py::test_it[case-1] (call)",
        "tests/data/test_order.py::test_it (setup)|",
    ],
)
def test_a_context_names_the_test_function(context):
    assert _function(context) == "tests/data/test_order.py::test_it"
    in_a_class = context.replace("py::", "py::TestAll::").replace(
        "order.test", "order.TestAll.test"
    )
    assert _function(in_a_class) == "tests/data/test_order.py::TestAll::test_it"


def test_tests_run_fastest_first_and_as_many_as_there_is_time_for(tmp_path):
    found = {
        "tests": ["slow", "fast", "middle"],
        "lines": {"a.py": {"1": [0, 1, 2], "2": []}},
        "seconds": {"slow": 30.0, "fast": 1.0, "middle": 10.0},
    }
    (tmp_path / "covering.json").write_text(json.dumps(found))
    covering = Covering(tmp_path)
    assert covering.of("a.py", 1, 100) == ["fast", "middle", "slow"]
    assert covering.of("a.py", 1, 12) == ["fast", "middle"]
    assert covering.of("a.py", 2, 12) == [
        "fast",
        "middle",
    ]  # of the file: no test runs the line alone
    assert covering.of("b.py", 1, 12) == []


def test_results_are_kept_and_counted_by_package_and_equivalent_ones_are_left_out(tmp_path):
    path = tmp_path / "results.jsonl"
    for each in (
        Judged("data/a.py", 1, "constant", "1 -> 2", ["one"], 3),
        Judged("data/a.py", 2, "constant", "1 -> 2", [], 3),
        Judged("data/a.py", 3, "constant", "1 -> 2", [], 3, "a longer sleep"),
        Judged("errors.py", 4, "constant", "1 -> 2", ["one"], 3),
    ):
        Results(path).add(each)
    results = Results(path)
    assert results.has("data/a.py", 2, "1 -> 2")
    assert not results.has("data/a.py", 2, "1 -> 3")
    *scores, survivor = report(results).splitlines()
    assert [line.split() for line in scores] == [
        ["data", "1", "of", "2", "killed"],
        ["errors", "1", "of", "1", "killed"],
        ["all", "2", "of", "3", "killed"],
    ]
    assert survivor == "survived: accel_fn/data/a.py:2: 1 -> 2"


@pytest.mark.slow
def test_a_mutant_is_killed_by_the_recorded_tests_of_its_line(tmp_path):
    file = "core/batch.py"
    copy = tmp_path / "copy"
    record(ROOT, tmp_path / "recorded", ["tests/core/test_samples.py"])
    covering = Covering(tmp_path / "recorded")
    copy_to(ROOT, copy)
    source = (ROOT / "accel_fn" / file).read_bytes()
    every = [each for each in changes(file, source) if each.kind == "statement"]
    found = [judged(each, source, copy, covering) for each in every[:2]]
    assert all(each.is_dead for each in found)
    (copy / "accel_fn" / file).write_bytes(source)
    assert failures(copy, covering.of(file, every[0].line, 60.0)) == []
