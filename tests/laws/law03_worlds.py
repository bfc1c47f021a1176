"""Law 3: W ranks give the result of one rank, whatever part each of them holds."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.support import strategies as ours


class AveragedByHand(af.extend.Strategy):
    """A user's strategy: it averages the gradients after the last backward."""

    def __init__(self, state, module, plan):
        self.finds_unused = False
        super().__init__(state, module, plan)

    def average(self, state):
        for parameter in self.trainable():
            if state.world_size > 1:
                state.group.allreduce([parameter.grad]).wait()
                parameter.grad /= state.world_size


def wrap_by_hand(plan):
    return replace(plan, strategy=(AveragedByHand,))


wrappers = pytest.mark.parametrize(
    "wrap", [af.wrap_ddp(), wrap_by_hand], ids=["wrap_ddp", "by_hand"]
)


@st.composite
def dealt_batches(draw, batches, max_world=5):
    """Draw global batches, and any split over the ranks, also empty parts."""
    found = draw(batches)
    world_size = draw(strategies.world_sizes(max_world))
    sizes = [draw(strategies.uneven_parts(af.count_samples(batch), world_size)) for batch in found]
    return found, sizes


@wrappers
@ours.share(0.5)
@given(dealt=dealt_batches(strategies.batches()), num_microbatches=st.integers(1, 4))
@example(
    dealt=([(torch.ones(3, 3).double(), torch.ones(3, 1).double())], [[0, 3]]), num_microbatches=2
)
def test_any_ranks_are_one_rank(wrap, dealt, num_microbatches):
    batches, sizes = dealt
    recipe = af.compose(wrap, af.accumulate(num_microbatches), af.clip(0.5))
    ranks = ours.trained(ours.regression_model(), ours.dealt(batches, sizes), recipe)
    ours.assert_trained(ranks, ours.trained_by_hand(ours.regression_model(), batches, max_norm=0.5))
    for losses, parameters in ranks[1:]:
        ours.assert_identical(parameters, ranks[0][1])
        assert losses == ranks[0][0]


@pytest.mark.parametrize(
    "wrap",
    [af.wrap_ddp(), af.wrap_fsdp(reshard_after_forward=False)],
    ids=["wrap_ddp", "wrap_fsdp"],
)
@ours.share(0.34)
@given(dealt=dealt_batches(strategies.labelled_batches(), 4), num_microbatches=st.integers(1, 3))
def test_any_ranks_are_one_rank_by_tokens(wrap, dealt, num_microbatches):
    batches, sizes = dealt
    model, options = ours.token_model(), {"loss_fn": ours.token_loss}
    recipe, weight_fn = af.compose(af.accumulate(num_microbatches), wrap), af.count_labels("labels")
    ranks = ours.trained(model, ours.dealt(batches, sizes), recipe, weight_fn=weight_fn, **options)
    ours.assert_trained(ranks, ours.trained_by_hand(model, batches, **options))


@st.composite
def weighted_batches(draw):
    """Draw a batch and the weight of each sample; a rank's samples may weigh nothing."""
    ((inputs, targets),) = draw(strategies.batches(num_batches=1))
    return inputs, targets, draw(strategies.weights(len(inputs)))


@ours.share(0.5)
@given(weighted=weighted_batches(), world_size=strategies.world_sizes())
def test_weights_may_be_any_numbers(weighted, world_size):
    """A sample's weight counts in the mean over its batch and in the mean over ranks."""

    def loss_fn(model, batch):
        inputs, targets, weight = batch
        errors = (model(inputs) - targets).squeeze(1).square()
        return (errors * weight).sum() / weight.sum()

    _, expected = ours.trained_by_hand(ours.regression_model(), [weighted], loss_fn=loss_fn)
    results = ours.trained(
        ours.regression_model(),
        ours.dealt_evenly([weighted], world_size),
        af.compose(af.accumulate(2), af.wrap_ddp()),
        loss_fn=loss_fn,
        weight_fn=lambda batch: batch[2].sum(),
    )
    for _, actual in results:
        ours.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("recipe", "world_size"),
    [
        (af.accumulate(4), 1),
        (af.wrap_ddp(), 2),
        (af.wrap_fsdp(), 2),
        (af.local_sgd(every=1), 2),
        (af.reproducible(2), 2),
    ],
)
def test_a_factor_of_all_weights_of_a_batch_changes_nothing(recipe, world_size):
    scales = 1e25, 1e-25, 1e29, 1.0, 1e-20
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    targets = inputs.sum(1, keepdim=True)
    batches = [(inputs, targets, torch.full((8,), each).double()) for each in scales]
    expected = ours.trained_by_hand(
        ours.regression_model(), [batch[:2] for batch in batches], optimizer=ours.sgd
    )
    ranks = ours.trained(
        ours.regression_model(),
        ours.dealt_evenly(batches, world_size),
        recipe,
        loss_fn=lambda model, batch: ours.mse(model, batch[:2]),
        optimizer=ours.sgd,
        weight_fn=lambda batch: batch[2].sum(),
    )
    ours.assert_trained(ranks, expected)


@pytest.mark.parametrize("weight", [1e-31, 1e31])
def test_weights_beyond_what_losses_can_go_times_are_refused(weight):
    batch = torch.ones(2, 3).double(), torch.ones(2, 1).double()
    state, step = ours.built(weight_fn=lambda batch: weight)
    with pytest.raises(
        ValueError, match=r"weight_fn must return 0 or a count from 1e-30 to 1e\+30, .* go times it"
    ):
        step(state, batch)


@ours.share(0.5)
@given(dealt=dealt_batches(strategies.batches(num_batches=1), 4))
def test_the_forward_alone_is_the_loss_of_the_global_batch(dealt):
    batches, sizes = dealt
    model = ours.regression_model()
    expected = ours.mse(model, batches[0]).item()
    parts = ours.dealt(batches, sizes)

    def run(state):
        state, step = ours.built(af.compose(af.wrap_ddp(), af.accumulate(2)), state)
        return float(step.forward(state, parts[state.rank][0]))

    assert simulate(run, world_size=len(parts)) == pytest.approx([expected] * len(parts), rel=1e-6)
