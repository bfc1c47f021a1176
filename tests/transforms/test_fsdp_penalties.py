"""Under wrap_fsdp, a loss that uses parameters beside the forward is exact, or the step refuses it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import accel_fn as af
from accel_fn.testing import simulate


class Model(nn.Module):
    """Two layers outside of blocks, and two blocks."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.last = nn.Linear(5, 1)

    def forward(self, x):
        x = self.first(x).tanh()
        for block in self.blocks:
            x = block(x).tanh()
        return self.last(x)


def squares(parameters):
    return 0.1 * sum(each.square().sum() for each in parameters)


def gathered(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def own_part(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def outside_of_blocks(model):
    return squares([*model.first.parameters(), *model.last.parameters()])


def output_of_a_block(model):
    return model.blocks[0](torch.ones(1, 5).double()).square().sum()


def all_parameters(model):
    return squares(model.parameters())


def product_with_a_block(model):
    return F.linear(torch.ones(1, 5).double(), model.blocks[1].weight).square().sum()


def gathered_by_hand(model):
    return squares(map(gathered, model.parameters()))


def parts_of_ranks(model):
    return squares(map(own_part, model.parameters()))


OF_BLOCKS = [all_parameters, product_with_a_block, gathered_by_hand, parts_of_ranks]
"""These are exact where blocks have run and stay whole until their backward."""
ROWS = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def made():
    torch.manual_seed(0)
    model = Model().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


CASES = [
    (outside_of_blocks, True, False, 1),
    (output_of_a_block, False, True, 2),
    *[(penalty, False, True, 2) for penalty in OF_BLOCKS],
    (product_with_a_block, False, False, 1),
    (parts_of_ranks, False, False, 1),
    (all_parameters, True, False, 2),
]


@pytest.mark.parametrize(
    ("penalty", "goes_first", "reshard", "k"),
    CASES,
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_penalty_is_exact_or_refused_on_all_ranks(penalty, goes_first, reshard, k):
    def loss_fn(model, x):
        early = penalty(model) if goes_first else 0.0
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True).sin())
        return early + loss + (0.0 if goes_first else penalty(model))

    model, optimizer = made()
    for rows in ROWS:
        optimizer.zero_grad()
        loss_fn(model, rows).backward()
        optimizer.step()

    def run(state):
        own, optimizer = models[state.rank]
        recipe = af.compose(af.wrap_fsdp(reshard_after_forward=reshard), af.accumulate(k))
        state, step = af.build(recipe(af.Plan(loss_fn, own, optimizer)), state, check_loss=False)
        mine = slice(0, 2) if state.is_main else slice(2, 8)
        try:
            for rows in ROWS:
                state, _ = step(state, rows[mine])
        except af.AccelError as error:
            return str(error)
        return {name: each.full_tensor() for name, each in own.named_parameters()}

    models = [made() for _ in range(2)]
    for end in simulate(run, world_size=2):
        if penalty in OF_BLOCKS and (reshard or goes_first):
            assert "uses a block's parameters by calling the block" in end
        else:
            torch.testing.assert_close(end, dict(model.named_parameters()), rtol=0, atol=1e-12)
