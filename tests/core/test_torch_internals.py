"""The parts inside torch that accel_fn uses: a test here fails if torch changes one."""

import contextlib
import functools
import inspect

import torch
import torch.distributed
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate
from tests.support.optimizers import batches
from tests.support.strategies import mse, regression_model


def one_step(optimizer_of, before=lambda optimizer: None):
    """Return a model and its optimizer after one step; `before` sees the optimizer that was
    built."""
    model = regression_model()
    optimizer = optimizer_of(model.parameters())
    state, step = af.build(af.Plan(mse, model, optimizer), af.DistState())
    before(optimizer)
    step(state, batches(torch.float64)[0])
    return model, optimizer


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def test_wrapper_is_left_out_where_nothing_listens():
    files = []

    class Looking(torch.optim.SGD):
        def step(self, closure=None):
            files.append({each.filename for each in inspect.stack()})

    wrapper = inspect.getfile(torch.optim.Optimizer)
    _, optimizer = one_step(lambda parameters: Looking(parameters, lr=0.1))
    optimizer.step()
    assert [wrapper in each for each in files] == [False, True]


def test_step_that_somebody_wrapped_on_the_class_is_run():
    class Watched(torch.optim.SGD):
        pass

    seen = []
    sgd([nn.Parameter(torch.ones(1))])  # making one lets torch wrap its step
    original = torch.optim.SGD.step

    @functools.wraps(original)
    def watching(self, *args, **kwargs):
        seen.append(self)
        return original(self, *args, **kwargs)

    Watched.step = watching
    _, optimizer = one_step(lambda parameters: Watched(parameters, lr=0.1))
    assert seen == [optimizer]


def steps_of_replicas(loss_fn, around=contextlib.nullcontext):
    """Return the first rank's state after three steps: losses, parameters, and recorded calls."""

    def rank(state):
        model = regression_model()
        plan = af.Plan(loss_fn, model, sgd(model.parameters()))
        state, step = af.build(af.wrap_ddp()(plan), state)
        losses = []
        with around() if state.is_main else contextlib.nullcontext() as seen:
            for batch in batches(torch.float64)[:3]:
                state, report = step(state, batch)
                losses.append(float(report.loss))
        return losses, model.state_dict(), seen

    return simulate(rank, world_size=2)[0]


def test_profiler_records_the_forward_of_replicas():
    """With a profiler, DDP's own forward is called; the steps are the same."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    losses, _, profile = steps_of_replicas(
        mse, lambda: torch.profiler.profile(activities=activities)
    )
    assert losses == steps_of_replicas(mse)[0]
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["DistributedDataParallel.forward"] == 3
