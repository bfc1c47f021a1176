"""The table of optimizers on shards and from checkpoints matches the results of running each
one."""

import pytest

from tests.support.optimizers import PAGE, split_page
from tests.support.optimizers_sharded_and_saved import FENCES, line, table

pytestmark = pytest.mark.filterwarnings("ignore")  # for optimizers that are no longer maintained

# One of each kind: both work, `build` refuses it, torch fails, its state is no plain tensor, or the
# reason names a line of code.
SOME = [
    "torch.optim.AdamW",
    "torch.optim.Rprop",
    "torch_optimizer.A2GradUni",
    "torch_optimizer.AggMo",
    "torch_optimizer.NovoGrad",
]


def written():
    _, found, _ = split_page(PAGE.read_text(encoding="utf-8"), FENCES)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_the_page_lists_shards_and_checkpoints_of_an_optimizer(name):
    assert line(name) in written().splitlines(), (
        "anew: python -m tests.support.optimizers_sharded_and_saved"
    )


@pytest.mark.slow
def test_the_page_holds_the_table_of_shards_and_checkpoints():
    assert written().strip() == table().strip(), (
        "anew: python -m tests.support.optimizers_sharded_and_saved"
    )
