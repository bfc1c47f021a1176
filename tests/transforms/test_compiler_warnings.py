"""The warnings of torch's compiler come once, from rank 0."""

import pytest

from tests.support.compilers import needs_compiler
from tests.support.forked_ranks import run_worlds

pytestmark = [pytest.mark.slow, needs_compiler]

SCRIPT = """
import logging, os, torch
from torch import nn
import accel_fn as af

class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, inputs):
        found = self.inner(inputs)
        return found if found.detach().sum().item() < 1e9 else 2 * found

def loss_fn(model, batch):
    return model(batch).square().mean()

{logs}
state = af.init(device="cpu", timeout_s=120)
model = Reads()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recipe = af.compose(af.wrap_ddp(), af.compiled())
state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), state, checks=())
step(state, torch.ones(2, 3))
# Torch itself repeats some warnings in each compilation.
for text in ("a limit is reached", "a limit is reached", "another one"):
    logging.getLogger("torch._dynamo.convert_frame").warning(text)
"""


def printed(tmp_path, logs):
    """Run on two ranks; return how often each rank printed each of the three warnings."""
    script = SCRIPT.format(logs=logs)
    ranks = run_worlds({"script": script}, tmp_path, num_processes=2, timeout_s=300)["script"]
    assert [rank.exit_code for rank in ranks] == [0, 0], ranks
    texts = ("Graph break from `Tensor.item()`", "a limit is reached", "another one")
    return [[rank.stderr.count(text) for text in texts] for rank in ranks]


def test_each_warning_comes_once_from_rank_0(tmp_path):
    assert printed(tmp_path, "") == [[1, 1, 1], [0, 0, 0]]


def test_a_user_who_asks_for_logs_gets_them_from_all_ranks(tmp_path):
    first, second = printed(tmp_path, "os.environ['TORCH_LOGS'] = 'recompiles'")
    assert first == second == [1, 2, 1]
