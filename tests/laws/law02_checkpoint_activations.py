"""checkpoint_activations: the identity, bit for bit, in less memory."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accel_fn as af
from accel_fn.testing import strategies
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
        self.layer = nn.Linear(
            width, width, bias=False
        )  # the norm would make its gradient rounding
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
@given(
    sizes=st.lists(st.integers(4, 9), min_size=1, max_size=3),
    num_microbatches=st.integers(1, 2),
)
def test_random_numbers_and_running_statistics_are_those_of_the_run_without_it(
    options, sizes, num_microbatches
):
    generator = torch.Generator().manual_seed(0)
    batches = [
        tuple(torch.randn(size, width, generator=generator).double() for width in (3, 1))
        for size in sizes
    ]
    plain = af.accumulate(num_microbatches)
    expected = train(noisy_model(), plain, batches)
    found = train(noisy_model(), af.compose(plain, af.checkpoint_activations(**options)), batches)
    assert found[0] == expected[0]
    ours.assert_identical(found[1], expected[1])
    assert torch.equal(found[2], expected[2])


@st.composite
def dealt_batches(draw):
    """Draw the parts of global batches for one to three ranks, of any sizes, empty ones too."""
    batches, world_size = draw(strategies.batches()), draw(strategies.world_sizes(3))
    sizes = [draw(strategies.uneven_parts(af.num_samples(each), world_size)) for each in batches]
    return ours.dealt(batches, sizes)


@pytest.mark.parametrize("wrap", [af.wrap_ddp(), af.wrap_fsdp()], ids=["ddp", "fsdp"])
@ours.share(0.3)
@given(parts=dealt_batches(), num_microbatches=st.integers(1, 3), offload=st.booleans())
@example(
    parts=ours.dealt([(torch.ones(5, 3).double(), torch.ones(5, 1).double())] * 2, [[2, 3, 0]] * 2),
    num_microbatches=2,
    offload=True,
)
def test_it_is_the_same_step_over_ranks(wrap, offload, parts, num_microbatches):
    recipe = af.compose(wrap, af.accumulate(num_microbatches), af.clip(0.1))
    checkpointing = af.compose(recipe, af.checkpoint_activations(offload=offload))
    expected = ours.trained(stack(), parts, recipe)
    for plain, found in zip(expected, ours.trained(stack(), parts, checkpointing), strict=True):
        assert found[0] == plain[0]
        ours.assert_identical(found[1], plain[1])


@given(batches=strategies.batches(num_batches=1))
def test_outside_of_a_step_the_model_is_as_it_was(batches):
    model = stack()
    forwards = [block.forward for block in model.blocks]
    state, step = ours.built(af.checkpoint_activations(), model=model, optimizer=ours.adamw)
    step(state, batches[0])
    with torch.no_grad():
        step.forward(state, batches[0])
    assert [block.forward for block in model.blocks] == forwards
    assert not any("forward" in vars(block) for block in model.blocks)
