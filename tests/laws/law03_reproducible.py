"""reproducible: every number of ranks gives the same bits."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import strategies
from tests.laws.law07_scaling import scaled
from tests.support import strategies as ours
from tests.support.reproducible_runs import RECIPES, WORLDS, fingerprints, spoilt

pytestmark = [
    pytest.mark.filterwarnings("ignore:step. model should write the same in its forward"),
    pytest.mark.filterwarnings("ignore:step. loss_fn should return the mean"),
]

EXCLUSIVE = [{"fp16", "bf16"}, {"schedule", "plateau"}]


@ours.share(0.32)
@given(
    chosen=st.lists(st.sampled_from(sorted(RECIPES)), unique=True, max_size=4).filter(
        lambda names: not any(each <= set(names) for each in EXCLUSIVE)
    ),
    num_virtual_ranks=st.sampled_from([2, 4]),
    samples=st.integers(1, 3),
    bad_row=st.none() | st.integers(0, 7),
)
@example(chosen=["fp16", "value", "average"], num_virtual_ranks=4, samples=2, bad_row=5)
@example(
    chosen=["accumulate", "checkpoint_activations"], num_virtual_ranks=4, samples=3, bad_row=None
)
@example(
    chosen=["spikes", "uniform average", "replicas"], num_virtual_ranks=4, samples=2, bad_row=1
)
def test_it_holds_with_every_transform(chosen, num_virtual_ranks, samples, bad_row):
    if not {"fp16", "norm", "spikes"} & set(chosen):  # no transform skips bad updates
        bad_row = None
    data = spoilt(5, num_virtual_ranks * samples, bad_row)
    recipe = af.compose(af.reproducible(num_virtual_ranks), *[RECIPES[name] for name in chosen])
    worlds = [
        each for each in WORLDS if each <= num_virtual_ranks and each in (1, num_virtual_ranks)
    ]
    assert len(fingerprints(recipe, worlds, data=data)) == 1


@ours.share(0.6)
@given(
    data=strategies.labelled_batches(max_samples=4),
    num_virtual_ranks=st.sampled_from([1, 2, 4]),
    k=st.integers(1, 3),
)
def test_it_is_the_mean_over_the_global_batch(data, num_virtual_ranks, k):
    """The mean is over labels; some slices have none that count."""
    data = [
        {key: each.repeat_interleave(num_virtual_ranks, dim=0) for key, each in batch.items()}
        for batch in data
    ]
    _, expected = ours.trained_by_hand(
        ours.token_model(), data, loss_fn=ours.token_loss, max_norm=0.5
    )
    sizes = [[af.count_samples(batch) // num_virtual_ranks] * num_virtual_ranks for batch in data]
    recipe = af.compose(
        af.reproducible(num_virtual_ranks), af.accumulate(k), af.clip(0.5), scaled(8.0)
    )
    for _, parameters in ours.trained(
        ours.token_model(),
        ours.dealt(data, sizes),
        recipe,
        loss_fn=ours.token_loss,
        weight_fn=af.count_labels("labels"),
    ):
        ours.assert_close(parameters, expected)
