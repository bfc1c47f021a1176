"""The table of planted bugs fits the library, and a planted bug is noticed."""

import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest

import tests.field.every  # noqa: F401
from accel_fn.transforms import clip
from tests.field.catalogue import named
from tests.tools.mutants.__main__ import (
    PAGE,
    ROOT,
    copy_to,
    is_found_by_fuzzing,
    library_table,
    plan_table,
    plant,
    plant_all,
)
from tests.tools.mutants.plans import PLANS, noticed_by
from tests.tools.mutants.probe import notices
from tests.tools.mutants.table import MUTANTS

NAMES = [each.name for each in MUTANTS]


def test_what_a_bug_replaces_stands_once_in_its_file():
    files = {mutant: (ROOT / "accel_fn" / mutant.file).read_text("utf-8") for mutant in MUTANTS}
    assert [each.name for each, text in files.items() if text.count(each.old) != 1] == []
    assert [each.name for each in MUTANTS if each.new == each.old] == []
    paths = {path for each in MUTANTS for path in each.tests.split()}
    assert [path for path in paths if not (ROOT / path).exists()] == []
    kinds = {each.kind for each in MUTANTS} - {""}
    assert [kind for kind in kinds if named(kind) != [kind]] == []


def test_there_are_forty_bugs_and_each_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    assert len(set(NAMES)) == len(MUTANTS) >= 40
    assert [name for name in (*NAMES, *PLANS) if f"\n| {name} |" not in page] == []
    assert "nothing" not in page


@pytest.mark.parametrize("name", PLANS)
def test_a_mistake_of_a_user_is_noticed(name):
    assert noticed_by(name)


@pytest.mark.slow
def test_nothing_is_noticed_in_a_library_without_a_bug():
    assert not any(notices().values())


@pytest.mark.slow
def test_a_bug_is_noticed_by_all_that_can(monkeypatch):
    clip_norm = clip.clip_norm
    monkeypatch.setattr(
        clip,
        "clip_norm",
        lambda state, grads, max_norm: clip_norm(state, grads, max_norm=max_norm + state.rank),
    )
    assert notices() == {"build": True, "assert_equivalent": False, "accel-fn test": True}


def planted(**changes):
    """Plant a bug from a new process: copies would inherit the ranks that were simulated in this."""
    (mutant,) = [each for each in MUTANTS if each.name == "clipping before unscaling"]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as new:
        task = new.submit(plant_all, [replace(mutant, **changes)], jobs=1, deadline=math.inf)
        return task.result()[mutant.name]


@pytest.mark.slow
def test_a_bug_is_planted_in_a_copy_and_noticed():
    found = planted()
    assert found["tests"]
    assert not found["build"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant", [each for each in MUTANTS if each.kind], ids=lambda each: each.kind
)
def test_programs_that_people_write_bring_out_a_bug(mutant, tmp_path):
    """In two minutes of the fuzzer with the kind of program that the bug makes wrong."""
    copy = copy_to(ROOT, tmp_path / "copy")
    plant(mutant, copy)
    assert is_found_by_fuzzing(mutant.kind, copy)


@pytest.mark.slow
def test_a_change_that_is_no_bug_is_noticed_by_nothing():
    (old,) = [each.old for each in MUTANTS if each.name == "clipping before unscaling"]
    assert not any(planted(new=f"{old}  # as it was").values())


def test_tables_name_the_detector_that_notices_first():
    found = {NAMES[0]: {"build": False, "assert_equivalent": True, "accel-fn test": True}}
    assert f"| {NAMES[0]} | `{MUTANTS[0].file}` | assert_equivalent |  | yes | yes |" in (
        library_table(found)
    )
    assert "| mistake of mine | nothing |" in plan_table({"mistake of mine": ""})
