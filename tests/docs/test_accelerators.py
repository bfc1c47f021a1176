"""A page lists every test that waits for an accelerator."""

import re

from tests.support.processes import ROOT


def test_what_needs_an_accelerator_is_listed():
    page = (ROOT / "docs" / "tests-on-a-gpu.md").read_text()
    marked = {
        str(path.relative_to(ROOT))
        for path in [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "tests/laws").glob("law*.py")]
        if re.search(r"pytest\.mark\.gpu\b", path.read_text())
    }
    assert marked == set(re.findall(r"`(tests/[\w/]+\.py)`", page))
