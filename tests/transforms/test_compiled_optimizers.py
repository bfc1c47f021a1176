"""The table of optimizers in a compiled step matches the results of compiling each one."""

import pytest

from tests.support.compilers import compiles
from tests.support.optimizers import PAGE, ROWS, split_page
from tests.support.optimizers_compiled import FENCES, HEAD, line


def written():
    _, found, _ = split_page(PAGE.read_text(encoding="utf-8"), FENCES)
    return found.strip().splitlines()


def test_the_page_has_a_row_for_each_optimizer():
    names = [row.split("`")[1] for row in written()[len(HEAD) :]]
    assert (written()[: len(HEAD)], names) == (HEAD, [*ROWS])


@compiles
@pytest.mark.filterwarnings("ignore")  # for optimizers that are no longer maintained
@pytest.mark.parametrize("name", ROWS)
def test_the_page_lists_whether_an_optimizer_fits_into_a_graph(name):
    assert line(name) in written(), "anew: python -m tests.support.optimizers_compiled"
