"""The program of the page on seeing a run, as its diffs change it for a tracker."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "seeing-a-run.md"


def recipe(tracker: str) -> str:
    """Return the program with the diff that has this word."""
    page = PAGE.read_text(encoding="utf-8")
    program, *_ = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    diffs = re.findall(r"^```diff\n@@\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    [diff] = [each for each in diffs if tracker in each]
    for hunk in diff.split("@@\n"):
        old, new = (_side(hunk, sign) for sign in "-+")
        assert program.count(old) == 1
        program = program.replace(old, new)
    return program


def _side(hunk: str, sign: str) -> str:
    return "".join(re.findall(rf"^[ {sign}](.*\n)", hunk, re.MULTILINE))
