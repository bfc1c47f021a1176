"""docs/differences.md: accelerate still behaves as the column "measured" states, row by row."""

import json
import re
from importlib.metadata import version

import pytest
from accelerate.parallelism_config import ParallelismConfig

from tests.support.processes import ROOT, launch

pytestmark = pytest.mark.slow

SCRIPT = """
import json, logging, os, torch
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the page tells of a CPU
torch.set_num_threads(1)
logging.disable()
from accelerate import Accelerator
Accelerator(cpu=True)
from tests.field import accelerate as rows
from tests.field.accelerate import data, gradients, runs, updates
say(json.dumps(rows.measured({num_ranks})))
"""


def told():
    """Return the column "measured" by row, without the cases that the page marks as not tested."""
    page = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
    page = page.partition("## From accelerate")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \|[^|]*\| ([^|]*) \|", page, re.MULTILINE)
    tested = {
        int(number): re.sub(r"(^|; )[^;]* \(seen once, not tested\)$", "", text)
        for number, text in rows
    }
    return {number: text for number, text in tested.items() if text}


@pytest.fixture(scope="module")
def found():
    """Measure each row in every world; return the texts of each rank."""
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


def test_accelerate_refuses_replicas_beside_tensor_parallelism():
    with pytest.raises(ValueError, match="cannot be used with pure data parallelism"):
        ParallelismConfig(dp_replicate_size=2, tp_size=2)


def test_all_that_is_measured_is_on_the_page(found):
    assert found.keys() == told().keys()
