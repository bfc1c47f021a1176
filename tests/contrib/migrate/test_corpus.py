"""Twelve scripts in the style of public ones, and the programs that follow from the output of `migrate`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.commands import command

CORPUS = Path(__file__).with_name("corpus")
EXPLAINED = {
    "language_model": "labels counted unevenly",
    "short_window": "a short last window of accumulation",
}
"""Scripts of which accelerate computes an update wrongly, and what is printed of it."""
BY_HAND = {
    "by_hand": ["`len(train_dataloader)` counts updates now"],
    "text_to_image": ["draws numbers of a shape that only the loss knows"],
}
NAMES = sorted(path.name.removesuffix("_old.py") for path in CORPUS.glob("*_old.py"))


def squeezed(text: str) -> str:
    """A text without what a formatter changes."""
    return re.sub(r",(?=[)\]}])", "", re.sub(r"\s+", "", text))


def test_there_are_twelve_and_each_was_moved():
    assert len(NAMES) == 12
    assert all((CORPUS / f"{name}_new.py").exists() for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_moved_program_has_what_is_printed(name, tmp_path):
    done = command(tmp_path, "migrate", CORPUS / f"{name}_old.py", "--json")
    found = json.loads(done.stdout)
    moved = (CORPUS / f"{name}_new.py").read_text()
    uses = [use["replacement"] or "" for line in found["lines"] for use in line["uses"]]
    written = [each for each in uses if "af.init(" in each or "predict_fn" in each]
    assert len(written) == 1 + moved.count("def predict_fn")
    assert all(squeezed(each) in squeezed(moved) for each in written)
    for loop in found["loops"]:
        for text in (*loop["program"].split("\n\n"), loop["in_loop"]):
            assert squeezed(text.replace("*SHAPE", "*(4,)")) in squeezed(moved)
    reasons = [each for loop in found["loops"] for each in loop["by_hand"]]
    expected = BY_HAND.get(name, [])
    assert len(reasons) == len(expected)
    assert all(text in reason for text, reason in zip(expected, reasons, strict=True))
    assert "accelerate" not in moved.split('"""')[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_moved_program_agrees_with_the_script(name, tmp_path):
    pair = [CORPUS / f"{name}_{which}.py" for which in ("old", "new")]
    done = command(tmp_path, "migrate", "--verify", *pair, "--json")
    assert done.exit_code == 0, done.stderr
    old_and_new, one_and_two = json.loads(done.stdout)
    if name in EXPLAINED:
        assert old_and_new["explanation"].startswith(EXPLAINED[name])
    else:
        assert (old_and_new["difference"], old_and_new["num_equal"] >= 10) == ("", True)
    assert (one_and_two["difference"], one_and_two["num_equal"] >= 10) == ("", True)
