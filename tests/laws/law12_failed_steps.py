"""An error before the update is applied leaves the run as if that step had never happened."""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

import accel_fn as af
from accel_fn.testing import simulate
from tests.laws.law07_scaling import OPTIMIZERS, scaled
from tests.support import strategies as ours
from tests.support.late_reads import read_late

STRATEGIES = {
    "none": af.compose(),
    "ddp": af.wrap_ddp(),
    "ddp, small buckets": af.wrap_ddp(bucket_cap_mb=1e-5),
    "ddp, unused": af.wrap_ddp(find_unused_parameters=True),
    "fsdp": af.wrap_fsdp(),
    "local_sgd": af.local_sgd(2),
    "reproducible": af.reproducible(4),
}
SKIPS = {
    "none": af.compose(),
    "spikes": af.skip_spikes(2.0, window=4),
    "nonfinite": af.skip_nonfinite(),
}
WORLDS = {"none": [1], "reproducible": [1, 2]}
COUNTED = ("weight_fn", "split")
"""Points before the ranks know the weight of the batch: an error on one rank is one on all."""
IN_MICROBATCHES = (
    "place_batch",
    "entered context",
    "left context",
    "loss_fn",
    "loss",
    "backward of the loss",
    "backward of a layer",
)
WHOLE = ("before wrap_grad_fn", "after wrap_grad_fn", "first of gradients", "last of gradients")
VERDICTS = ("first of accept", "last of accept")
ROWS = 8
"""Samples of a batch on each rank."""
NUM_STEPS = 5


class InjectedError(Exception):
    """The error that a user's function raises."""


class Fault:
    """Raises at one point of the step, after the point was passed a number of times."""

    def __init__(self):
        self.point = None

    def arm(self, point, errors):
        """Raise these errors, one each time the point is reached; None passes, and the last one
        repeats."""
        self.point, self.errors = point, list(errors)

    def reach(self, point):
        if self.point != point:
            return
        error = self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]
        if error is not None:
            raise error(f"injected in {point}")


class Backward(torch.autograd.Function):
    """The identity, with a backward that reaches a point."""

    @staticmethod
    def forward(ctx, value, fault, point):
        ctx.reach = partial(fault.reach, point)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.reach()
        return gradient, None, None


@dataclass(frozen=True)
class Setting:
    """A plan, and the point where its step fails."""

    point: str = "last of gradients"
    strategy: str = "none"
    world_size: int = 1
    optimizer: str = "adamw"
    skip: str = "none"
    microbatches: object = None
    is_scaled: bool = False
    clips: bool = True
    averages: bool = True
    schedules: bool = True
    frozen_until: object = None
    culprit: object = None
    """The one rank that fails; None: all do."""
    passes: int = 0
    """How often the point is passed before the error."""
    memory: bool = False
    """Is the error that memory has run out?"""
    gain: float = 1.0
    """Factor of the inputs of the batch whose step fails."""
    num_before: int = 2
    is_late: bool = False
    """Do transforms read values one step late, as on an accelerator?"""

    def errors(self):
        """Return the errors that the point raises, one after the other."""
        if self.memory:
            return [MemoryError]
        if self.microbatches == "auto" and self.passes:
            return [MemoryError, InjectedError]  # the second attempt, in smaller micro-batches
        return [*[None] * self.passes, InjectedError]

    def recipe(self):
        """Compose the transforms that do not fail."""
        listed = [STRATEGIES[self.strategy], SKIPS[self.skip]]
        listed += [scaled(1024.0, growth_interval=2)] if self.is_scaled else []
        listed += [af.clip(0.5)] if self.clips else []
        listed += [af.ema(0.9)] if self.averages else []
        listed += [af.schedule(lambda number: 0.5**number)] if self.schedules else []
        if self.frozen_until is not None:
            listed.append(af.freeze("0", until=self.frozen_until))
        if self.microbatches is not None and self.point != "split":
            listed.append(af.accumulate(self.microbatches))
        return af.compose(*listed)


@st.composite
def settings_of_a_run(draw, point):
    refusing = ["local_sgd"] if point in VERDICTS else []
    strategy = draw(st.sampled_from([each for each in STRATEGIES if each not in refusing]))
    equal = strategy != "local_sgd"  # `local_sgd` refuses transforms that decide about an update
    can_retry = strategy not in ("reproducible", "fsdp") and point != "split"
    microbatches = draw(st.sampled_from([None, 2, 3, *["auto"] * can_retry]))
    world_size = draw(st.sampled_from(WORLDS.get(strategy, [1, 2, 3])))
    retries = microbatches == "auto" and point in ("weight_fn", *IN_MICROBATCHES)
    memory = retries and draw(st.booleans())
    several = microbatches is not None or strategy == "reproducible"
    can_pass = point in IN_MICROBATCHES and several and not memory
    passes = draw(st.integers(0, 1)) if can_pass else 0
    is_agreed = point in COUNTED or memory
    culprit = draw(st.none() | st.integers(0, world_size - 1)) if is_agreed else None
    frozen_until = draw(st.sampled_from([None, 2, 4]))
    # torch's fused SGD takes no shards, and no group in which only some parameters have momenta.
    no_fused_sgd = strategy == "fsdp" or frozen_until is not None
    optimizers = [each for each in OPTIMIZERS if not no_fused_sgd or each != "fused sgd"]
    return Setting(
        strategy=strategy,
        world_size=world_size,
        optimizer=draw(st.sampled_from(optimizers)),
        skip=draw(st.sampled_from([*SKIPS])) if equal else "none",
        microbatches=microbatches,
        is_scaled=equal and draw(st.booleans()),
        clips=draw(st.booleans()),
        averages=equal and draw(st.booleans()),
        schedules=draw(st.booleans()),
        frozen_until=frozen_until,
        point=point,
        culprit=culprit,
        passes=passes,
        memory=memory,
        gain=draw(st.sampled_from([1.0, 1e3, float("nan")])),
        num_before=draw(st.integers(0, NUM_STEPS - 1)),
        is_late=draw(st.booleans()),
    )


def failing_plan(setting, fault, model):
    """Make a plan whose functions reach the points, each in a slot that the setting does not
    use."""
    reach = fault.reach

    def weight_fn(batch):
        reach("weight_fn")
        return af.count_samples(batch)

    def loss_fn(model, batch):
        reach("loss_fn")
        inputs, targets = batch
        hidden = Backward.apply(model[0](inputs), fault, "backward of a layer")
        loss = F.mse_loss(model[2](model[1](hidden)), targets)
        loss = Backward.apply(loss, fault, "backward of the loss")
        reach("loss")
        return loss

    plan = af.Plan(loss_fn, model, OPTIMIZERS[setting.optimizer](model.parameters()), weight_fn)
    if setting.point == "split":
        plan = af.accumulate(3, split=partial(splitting, setting, reach))(plan)
    plan = setting.recipe()(plan)
    return with_points(plan, setting.point, partial(reach, setting.point))


def splitting(setting, reach, batch):
    reach("split")
    return [*zip(*[each.tensor_split(setting.microbatches or 1) for each in batch], strict=True)]


@contextmanager
def entering(state, *, point, reach):
    if point == "entered context":
        reach()
    yield
    if point == "left context":
        reach()


def accepting(state, grads, *, reach):
    reach()
    return torch.ones((), dtype=torch.bool)


def passing(state, value, *, reach):
    reach()
    return value


def wrapping(grad_fn, *, point, reach):
    def wrapped(state, batch):
        if point.startswith("before"):
            reach()
        found = grad_fn(state, batch)
        if point.startswith("after"):
            reach()
        return found

    return wrapped


def with_points(plan, point, reach):
    """Add a function that reaches the point where no other function does."""
    functions = {
        "place_batch": partial(passing, reach=reach),
        "forward_contexts": partial(entering, point=point, reach=reach),
        "wrap_grad_fn": partial(wrapping, point=point, reach=reach),
        "accept": partial(accepting, reach=reach),
        "gradients": partial(passing, reach=reach),
    }
    slot = "forward_contexts" if point.endswith("context") else point.split(" ")[-1]
    if slot not in functions:
        return plan
    there, added = getattr(plan, slot), (functions[slot],)
    return replace(
        plan, **{slot: (*added, *there) if point.startswith("first") else (*there, *added)}
    )


def bits(value):
    """Return a value with its tensors as bits, of this rank's shard."""
    if isinstance(value, torch.Tensor):
        held = value.to_local() if isinstance(value, DTensor) else value
        held = held.detach().contiguous()
        return str(held.dtype), tuple(held.shape), held.reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {name: bits(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [bits(each) for each in value]
    return value


def kept(state, step):
    """Return the bits of parameters, optimizer state, stateful slot functions and loss scale."""
    plan, scaler = step.plan, state.scaler
    holders = [plan.model, plan.optimizer, *plan.gradients, *plan.accept, *plan.after_update]
    found = [each.state_dict() for each in holders if hasattr(each, "state_dict")]
    return bits([*found, scaler and [scaler.scale, scaler.good_steps, scaler.skipped]])


def expected_errors(setting, rank):
    if setting.memory and setting.point != "weight_fn":
        return af.errors.OutOfMemoryError
    is_other = setting.culprit is not None and setting.culprit != rank
    if is_other:
        return af.errors.BatchError
    return MemoryError if setting.memory else InjectedError


def batches_of(setting, state):
    generator = torch.Generator().manual_seed(0)
    rows = ROWS * state.world_size
    inputs = torch.randn(NUM_STEPS + 1, rows, ours.NUM_FEATURES, generator=generator).double()
    mine = inputs[:, state.rank * ROWS :][:, :ROWS]
    return [(each, each.sum(dim=1, keepdim=True)) for each in mine]


def train(state, setting, fails):
    """Return what is kept before the failing step, after it and at the end, and all reports."""
    fault = Fault()
    plan = failing_plan(setting, fault, ours.regression_model())
    state, step = af.build(plan, state)
    if setting.is_late:
        read_late(*step.plan.accept, *step.plan.after_update)
    *good, bad = batches_of(setting, state)
    before = after = None
    reports = []
    for number, batch in enumerate(good):
        if number == setting.num_before:
            before = None if setting.is_late else kept(state, step)
            if fails:
                if setting.culprit in (None, state.rank):
                    fault.arm(setting.point, setting.errors())
                with pytest.raises(expected_errors(setting, state.rank)):
                    step(state, (bad[0] * setting.gain, bad[1]))
                fault.point = None
            after = None if setting.is_late else kept(state, step)
        state, report = step(state, batch)
        reports.append(bits([report.loss, report.grad_norm, report.applied, report.extras]))
    return before, after, kept(state, step), reports


POINTS = [*COUNTED, *IN_MICROBATCHES, *WHOLE, *VERDICTS]


@ours.share(0.5)
@given(setting=st.sampled_from(POINTS).flatmap(settings_of_a_run))
def test_a_step_that_fails_before_it_is_applied_never_happened(setting):
    check(setting)


@pytest.mark.parametrize(
    "setting",
    [
        Setting(skip="spikes"),
        Setting("last of accept", skip="spikes", is_late=True),
        Setting(skip="nonfinite", gain=float("nan"), is_scaled=True),
        Setting("backward of a layer", "ddp", 3),
        Setting("backward of a layer", "ddp, small buckets", 3, microbatches=2),
        Setting("loss_fn", microbatches="auto", passes=1),
        Setting("weight_fn", "ddp", 3, microbatches="auto", memory=True, culprit=0),
        Setting("weight_fn", "ddp, unused", 2, culprit=0),
    ],
    ids=str,
)
def test_these_plans_keep_nothing_of_a_step_that_failed(setting):
    check(setting)


def check(setting):
    found, expected = (
        simulate(partial(train, setting=setting, fails=fails), world_size=setting.world_size)
        for fails in (True, False)
    )
    for (before, after, last, reports), (_, _, wanted, told) in zip(found, expected, strict=True):
        assert after == before
        assert last == wanted
        assert reports == told
