"""What has not been run for want of an accelerator is told, all of it."""

import re

from tests.processes import ROOT


def test_what_needs_an_accelerator_is_listed():
    page = (ROOT / "docs" / "transforms.md").read_text()
    section = page.partition("## On accelerators")[2]
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.gpu\b", path.read_text())
    }
    assert marked == set(re.findall(r"`(tests/[\w/]+\.py)`", section))
