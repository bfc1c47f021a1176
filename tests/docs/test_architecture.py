"""docs/architecture.md is short, and its tables and its picture have the names that the package
has."""

import dataclasses
import re
import tomllib
from xml.etree import ElementTree

import accel_fn as af
from tests.support.processes import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def first_column(heading: str) -> list[str]:
    """Return the names in the first column of the table of a section."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)", cell)]


def test_the_table_of_slots_is_that_of_a_plan():
    fields = dataclasses.fields(af.Plan)
    slots = [field.name for field in fields if field.default == () and field.kw_only]
    assert sorted(first_column("Slots of a plan")) == sorted(slots)


def test_the_table_of_the_strategy_names_its_methods():
    public = {name for name in vars(af.extend.Strategy) if not name.startswith("_")}
    assert set(first_column("The strategy")) <= public


def test_the_picture_shows_the_order_of_imports_that_lint_checks():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    expected = [name for layer in layers for name in sorted(re.split(r"\W+", layer))]
    picture = ElementTree.parse(ROOT / "docs" / "_static" / "packages.svg")
    drawn = [each for each in picture.iter() if each.get("font-weight") == "600"]
    assert [each.text for each in drawn] == expected
