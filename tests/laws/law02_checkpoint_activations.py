"""checkpoint_activations: the identity, bit for bit, in less memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accel_fn as af
from accel_fn.testing import strategies
from tests.laws.law03_worlds import dealt_batches
from tests.support import strategies as ours
from tests.support.block_models import stack

pytestmark = [
    pytest.mark.filterwarnings("ignore:step. model should write the same in its forward"),
    pytest.mark.filterwarnings("ignore:step. model should have no BatchNorm"),
]


class Noisy(nn.Module):
    """A block with dropout, and running statistics that its output depends on."""

    def __init__(self, width, *, dropout=0.5):
        super().__init__()
        # The norm would make the gradient of a bias rounding.
        self.layer = nn.Linear(width, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = dropout
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("largest", torch.zeros(width))

    def forward(self, inputs):
        found = nn.functional.dropout(self.norm(self.layer(inputs)), self.dropout, self.training)
        self.mean.lerp_(found.detach().mean(dim=0), 0.5)
        # assigns a new tensor
        self.largest = torch.maximum(self.largest, found.detach().amax(dim=0))
        return inputs + found * (found - self.mean.clone() - self.largest).tanh()


def noisy_model(**options):
    torch.manual_seed(0)
    blocks = [Noisy(5, **options) for _ in range(3)]
    return nn.Sequential(nn.Linear(3, 5), nn.Sequential(*blocks), nn.Linear(5, 1)).double()


def train(model, recipe, batches):
    torch.manual_seed(1)
    state, step = ours.built(recipe, model=model, optimizer=ours.adamw)
    losses = []
    for batch in batches:
        state, report = step(state, batch)
        losses.append(float(report.loss))
    return losses, model.state_dict(), torch.get_rng_state()


@pytest.mark.parametrize(
    "options", [{}, {"blocks": Noisy}, {"offload": True}, {"blocks": "1.1"}], ids=str
)
@ours.share(0.4)
@given(sizes=st.lists(st.integers(4, 9), min_size=1, max_size=3), k=st.integers(1, 2))
def test_random_numbers_and_running_statistics_are_those_of_the_run_without_it(options, sizes, k):
    generator = torch.Generator().manual_seed(0)
    batches = [
        tuple(torch.randn(size, width, generator=generator).double() for width in (3, 1))
        for size in sizes
    ]
    plain = af.accumulate(k)
    expected = train(noisy_model(), plain, batches)
    found = train(noisy_model(), af.compose(plain, af.checkpoint_activations(**options)), batches)
    assert found[0] == expected[0]
    ours.assert_identical(found[1], expected[1])
    assert torch.equal(found[2], expected[2])


UNEVEN = ours.dealt([(torch.ones(5, 3).double(), torch.ones(5, 1).double())] * 2, [[2, 3, 0]] * 2)
"""Parts of two batches; one rank has none."""


def assert_same_step(parts, recipe, offload):
    plain = af.compose(recipe, af.clip(0.1))
    expected = ours.trained(stack(), parts, plain)
    checkpointing = af.compose(plain, af.checkpoint_activations(offload=offload))
    for (losses, parameters), (found, actual) in zip(
        expected, ours.trained(stack(), parts, checkpointing), strict=True
    ):
        assert found == losses
        ours.assert_identical(actual, parameters)


@pytest.mark.parametrize(
    ("wrap", "offload"), [(af.wrap_ddp(), False), (af.wrap_fsdp(), True)], ids=["ddp", "fsdp"]
)
def test_it_is_the_same_step_over_ranks(wrap, offload):
    assert_same_step(UNEVEN, af.compose(wrap, af.accumulate(2)), offload)


@pytest.mark.slow
@ours.share(0.3)
@given(dealt=dealt_batches(strategies.batches(), 3), k=st.integers(1, 3), offload=st.booleans())
def test_it_is_the_same_step_over_any_shards(dealt, k, offload):
    assert_same_step(ours.dealt(*dealt), af.compose(af.wrap_fsdp(), af.accumulate(k)), offload)


def test_outside_of_a_step_the_model_is_as_it_was():
    model = stack()
    forwards = [block.forward for block in model.blocks]
    state, step = ours.built(af.checkpoint_activations(), model=model, optimizer=ours.adamw)
    step(state, UNEVEN[0][0])
    with torch.no_grad():
        step.forward(state, UNEVEN[0][0])
    assert [block.forward for block in model.blocks] == forwards
    assert not any("forward" in vars(block) for block in model.blocks)
