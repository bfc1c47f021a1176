"""With `every`, the learning rate of an update is a function of the number of batches before it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from accel_fn.testing import simulate
from tests import reference
from tests.support import strategies as ours

NUM_EPOCHS = 4

BY_EPOCH = {
    "multistep": lambda o: schedulers.MultiStepLR(o, [1, 3], 0.1),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, NUM_EPOCHS),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.5, 1), schedulers.ExponentialLR(o, 0.5)], [1]
    ),
    "function": lambda o: lambda epoch: 1 / (1 + epoch),
}

WRAPS = {
    "wrap_ddp": af.wrap_ddp,
    "wrap_fsdp": af.wrap_fsdp,
    "local_sgd": lambda: af.local_sgd(every=1),  # equal to one rank, as SGD is linear in gradients
}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def loader_of(num_samples, bad=(), batch_size=6):
    """Make a loader of batches that are the same for 1, 2 and 3 ranks; updates of `bad` are skipped."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_samples, 3, generator=generator).double()
    targets = inputs.sum(dim=1, keepdim=True)
    inputs[list(bad)] = float("nan")
    return DataLoader(TensorDataset(inputs, targets), batch_size, shuffle=True)


def by_hand(loader, make, every=None):
    """Step a scheduler after each epoch, or after `every` batches; skip updates that are not finite."""
    model = ours.regression_model()
    optimizer = sgd(model.parameters())
    made = make(optimizer)
    scheduler = schedulers.LambdaLR(optimizer, made) if callable(made) else made
    num_batches = 0
    for epoch in af.shard_loader(loader, af.DistState()).epochs(NUM_EPOCHS):
        for batch in epoch:
            if batch[0].isfinite().all():
                reference.train(model, ours.mse, optimizer, [batch])
            num_batches += 1
            if every is not None and num_batches % every == 0:
                scheduler.step()
        if every is None:
            scheduler.step()
    return model.state_dict()


def built(state, make, wrap, k, loader, every):
    model = ours.regression_model()
    optimizer = sgd(model.parameters())
    # local_sgd applies every update
    skip = af.skip_nonfinite() if wrap != "local_sgd" else af.compose()
    recipe = af.compose(
        WRAPS[wrap](), af.accumulate(k), skip, af.schedule(make(optimizer), every=every or loader)
    )
    return af.build(recipe(af.Plan(ours.mse, model, optimizer)), state)


def leg(state, loader, make, wrap, k, every, folder, stop):
    """Train from the newest checkpoint to `stop`, or to the end."""
    loader = af.shard_loader(loader, state)
    state, step = built(state, make, wrap, k, loader, every)
    state = af.resume(step, state, folder, extras={"data": loader})
    for epoch in loader.epochs(NUM_EPOCHS, since=state):
        for batch in epoch:
            state, _ = step(state, batch)
            if state.step == stop:
                af.save(step, state, folder, extras={"data": loader})
                return None
    return {name: each.clone() for name, each in ours.whole(step.plan.model.state_dict()).items()}


# torch warns of an epoch whose updates were all skipped
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("make", BY_EPOCH.values(), ids=BY_EPOCH)
@ours.share(0.3)
@given(
    wrap=st.sampled_from(list(WRAPS)),
    num_samples=st.sampled_from([6, 9, 16, 24]),
    bad=st.sets(st.integers(0, 5), max_size=2),
    worlds=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    k=st.integers(1, 3),
    every=st.one_of(st.none(), st.integers(1, 5)),
    data=st.data(),
)
def test_a_schedule_of_epochs_or_batches_is_that_of_one_process_wherever_the_run_was_stopped(
    tmp_path_factory, make, wrap, num_samples, bad, worlds, k, every, data
):
    """Steps into which a run may be cut are all, an epoch's last among them."""
    folder = tmp_path_factory.mktemp("run")
    loader = loader_of(num_samples, bad if wrap != "local_sgd" else ())
    stop = data.draw(st.integers(1, NUM_EPOCHS * len(loader)))
    expected = by_hand(loader, make, every)
    for world_size, until in zip(worlds, (stop, None), strict=True):
        ends = simulate(
            lambda state, until=until: leg(state, loader, make, wrap, k, every, folder, until),
            world_size=world_size,
        )
    for found in ends:
        ours.assert_close(found, expected)
