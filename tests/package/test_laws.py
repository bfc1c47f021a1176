"""The `Law:` of a docstring names the tests that hold it."""

import inspect
import re
from pathlib import Path

import pytest

import accel_fn as af

ROOT = Path(__file__).parents[2]
LAW = re.compile(r"^Law: (?:.+\n?)+", re.MULTILINE)
WITHOUT_TESTS = {"wrap_as_launched": "it returns one of three transforms, which name their tests"}
"""Transforms whose law names no tests, and why."""


def laws():
    """Return, by public name, the law that its docstring states."""
    homes = (af, af.data, af.checkpoint, af.launcher, af.extend)
    every = {name: getattr(home, name) for home in homes for name in home.__all__}
    found = {name: LAW.search(inspect.getdoc(value) or "") for name, value in every.items()}
    return {name: law[0] for name, law in found.items() if law}


def named_tests(law):
    return re.findall(r"`(tests/\S+\.py)`", law)


LAWS = laws()
FUNCTIONS = filter(inspect.isfunction, (getattr(af, name) for name in af.__all__))
TRANSFORMS = {
    "Preemption",
    *(
        each.__name__
        for each in FUNCTIONS
        if inspect.signature(each).return_annotation == "Transform"
    ),
}


@pytest.mark.parametrize("name", sorted(TRANSFORMS - WITHOUT_TESTS.keys()))
def test_the_law_of_a_transform_names_tests_that_use_it(name):
    named = named_tests(LAWS[name])
    assert named
    for each in named:
        text = (ROOT / each).read_text(encoding="utf-8")
        assert re.search(rf"\b{name}\b", text), each


def test_tests_that_laws_name_exist():
    named = {each for law in LAWS.values() for each in named_tests(law)}
    assert len(named) > 25
    assert [each for each in sorted(named) if not (ROOT / each).is_file()] == []


def test_a_law_without_tests_is_that_of_a_transform_with_a_reason():
    assert {name for name, law in LAWS.items() if not named_tests(law)} == WITHOUT_TESTS.keys()
