"""docs/differences.md: accelerate still does what the column "measured" says, row by row."""

import json
import re
from importlib.metadata import version

import pytest

from tests.processes import ROOT, launch

pytestmark = pytest.mark.slow

SCRIPT = """
import json, logging, os, torch
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the page tells of a CPU
torch.set_num_threads(1)
logging.disable()
from accelerate import Accelerator
Accelerator(cpu=True)
from tests import field
from tests.field import data, gradients, runs, updates
say(json.dumps(field.measured({num_ranks})))
"""


def told():
    """What the page says was measured, by row, but for what it says is not tested."""
    page = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|[^|]*\| ([^|]*) \|", page, re.MULTILINE)
    tested = {
        int(number): re.sub(r"(^|; )[^;]* \(seen once, not tested\)$", "", text)
        for number, text in rows
    }
    return {number: text for number, text in tested.items() if text}


@pytest.fixture(scope="module")
def found():
    """The words of each row, by each of its ranks."""
    words = {}
    for num_ranks in (1, 2):
        said = launch(SCRIPT.format(num_ranks=num_ranks), num_processes=num_ranks)
        ranks = [json.loads(line) for line in said.splitlines()]
        words |= {int(number): {rank[number] for rank in ranks} for number in ranks[0]}
    return words


@pytest.mark.parametrize(("number", "text"), told().items())
def test_accelerate_does_as_the_page_lists(number, text, found):
    assert found[number] == {text}, (
        f"row {number} of docs/differences.md is not what accelerate {version('accelerate')} does; "
        "where accelerate no longer fails, take the row out, else put in what was found"
    )


def test_all_that_is_measured_is_on_the_page(found):
    assert found.keys() == told().keys()
