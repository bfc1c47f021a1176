"""accumulate("auto") under wrap_fsdp: who runs out of memory leaves no rank in a gather."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.fsdp import FSDPModule

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests import strategies as ours
from tests.laws.test_halving import (
    FULL,
    FailingBackward,
    assert_same_runs,
    cut_into,
    told_by,
)
from tests.laws.test_scaling import scaled
from tests.stacks import batches as fixed_batches
from tests.stacks import stack


def at_once(model, batch):
    raise FULL["accelerator"]()


def in_a_block(model, batch):
    def fail(*_):
        raise FULL["host"]()

    handle = model.blocks[1].inner[0].register_forward_pre_hook(fail)
    try:
        return ours.mse(model, batch)
    finally:
        handle.remove()


def after_the_forward(model, batch):
    ours.mse(model, batch)
    raise FULL["python"]()


def in_the_backward(model, batch):
    hidden = model.first(batch[0])
    for index, block in enumerate(model.blocks):
        hidden = block(FailingBackward.apply(hidden) if index == 1 else hidden)
    return F.mse_loss(model.last(hidden), batch[1])


def at_the_end_of_the_backward(model, batch):
    hidden = FailingBackward.apply(model.first(batch[0]))
    for block in model.blocks:
        hidden = block(hidden)
    return F.mse_loss(model.last(hidden), batch[1])


FAILING = [
    at_once,
    in_a_block,
    after_the_forward,
    in_the_backward,
    at_the_end_of_the_backward,
]


def limited(limit, failing, last_rows=None):
    """A loss that takes at most so many samples at a time, if the last of a batch is one of them."""

    def loss_fn(model, batch):
        is_last = last_rows is None or any(torch.equal(batch[0][-1:], row) for row in last_rows)
        too_many = limit is not None and len(batch[0]) > limit and is_last
        return (failing if too_many else ours.mse)(model, batch)

    return loss_fn


def train(state, parts, loss_fn, recipe, **options):
    model = stack()
    plan = af.Plan(loss_fn, model, ours.adamw(model.parameters()))
    state, step = af.build(state, af.compose(af.wrap_fsdp(**options), recipe)(plan))
    reports = []
    for part in parts:
        state, report = step(state, part)
        reports.append(report)
    shards = {name: each.to_local().clone() for name, each in model.named_parameters()}
    return reports, {**shards, **dict(model.named_buffers())}, state


def checked(parts, culprit, limit, failing, recipe, *, late=False, **options):
    """Train where one rank has little room; it is the run that was cut so from the start.

    How many micro-batches were made of each batch, and the last state.
    """
    world_size = len(parts)

    def found(state):
        mine = parts[state.rank]
        rows = [part[0][-1:] for part in mine] if late else None
        loss_fn = limited(limit if state.rank == culprit else None, failing, rows)
        return train(state, mine, loss_fn, af.compose(recipe, af.accumulate("auto")), **options)

    runs = simulate(found, world_size=world_size)
    reports, _, last = runs[0]
    counts = [report.extras["num_microbatches"] for report in reports]

    def expected(state):
        recipes = af.compose(recipe, cut_into(counts))
        return train(state, parts[state.rank], ours.mse, recipes, **options)

    assert_same_runs(runs, simulate(expected, world_size=world_size), counts)
    return counts, last


@ours.share(0.25)
@given(
    batches=strategies.batches(num_batches=2),
    world_size=st.sampled_from([2, 4]),
    culprit=st.integers(0, 3),
    limit=st.integers(1, 4),
    failing=st.sampled_from(FAILING),
    late=st.booleans(),
    reshard=st.booleans(),
    recipe=st.sampled_from([af.clip(0.1), scaled(8.0, growth_interval=2), af.checkpointed()]),
)
@example(  # buffers that a failed attempt has changed are what they were
    batches=fixed_batches(num=2, size=8),
    world_size=2,
    culprit=1,
    limit=2,
    failing=after_the_forward,
    late=False,
    reshard=True,
    recipe=af.clip(0.1),
)
def test_it_is_the_run_that_had_as_many_micro_batches_from_the_start_to_the_bit(
    batches, world_size, culprit, limit, failing, late, reshard, recipe
):
    """Wherever memory runs out: in the first micro-batch or the last, the forward or the backward."""
    parts = ours.dealt_evenly(batches, world_size)
    options = {"late": late, "reshard_after_forward": reshard}
    counts, _ = checked(parts, culprit % world_size, limit, failing, recipe, **options)
    mine = [len(part[0]) for part in parts[culprit % world_size]]
    for size, count in zip(mine, counts, strict=True):
        part = size // count if late else -(-size // count)  # the last, or the largest
        assert part <= limit


@pytest.mark.parametrize("failing", [after_the_forward, in_the_backward])
@pytest.mark.parametrize("world_size", [2, 4])
def test_it_is_that_run_where_the_last_rank_alone_has_no_room(world_size, failing):
    parts = ours.dealt_evenly(fixed_batches(num=2, size=16), world_size)
    counts, last = checked(parts, world_size - 1, 1, failing, scaled(8.0, growth_interval=2))
    assert counts == [16 // world_size] * 2
    assert told_by(last.scaler) == (16.0, 0, 0)


@pytest.mark.parametrize("failing", [after_the_forward, in_the_backward])
def test_a_batch_that_overflows_as_well_is_skipped_once(failing):
    """On the first rank, while the last one goes along without room."""
    batches = fixed_batches(num=2, size=16)
    batches[0][1][0] = float("inf")  # of the targets: buffers stay finite
    parts = ours.dealt_evenly(batches, world_size=2)
    counts, last = checked(parts, 1, 1, failing, scaled(8.0, growth_interval=2))
    assert counts == [8] * 2
    assert told_by(last.scaler) == (4.0, 1, 1)


def encoded(model, batch):
    """By the model's methods, without its forward."""
    return F.mse_loss(model.last(model.encode(batch[0])), batch[1])


def forward_with_gradients(model, step, state, batch):
    model(batch[0])


def evaluation(model, step, state, batch):
    step.forward(state, batch)


@pytest.mark.parametrize("before", [forward_with_gradients, evaluation])
@pytest.mark.parametrize(
    "failing", [at_once, pytest.param(in_the_backward, marks=pytest.mark.slow)]
)
def test_forwards_outside_of_the_step_are_not_on_the_way(before, failing):
    """They leave parameters whole, and FSDP a list of what it has gathered."""
    part = (torch.ones(4, 3).double(), torch.ones(4, 1).double())

    def run(state, recipe, limit):
        model = stack()
        mine = limit if state.rank == 1 else None

        def loss_fn(model, batch):
            too_many = mine is not None and torch.is_grad_enabled() and len(batch[0]) > mine
            return (failing if too_many else encoded)(model, batch)

        plan = af.Plan(loss_fn, model, ours.adamw(model.parameters()))
        state, step = af.build(state, af.compose(af.wrap_fsdp(), recipe)(plan))
        for _ in range(2):
            before(model, step, state, part)
            state, _ = step(state, part)
        return [each.to_local().tolist() for each in model.parameters()]

    def found(state):
        return run(state, af.accumulate("auto"), 2)

    def expected(state):
        return run(state, af.accumulate(2), None)

    assert simulate(found, world_size=2) == simulate(expected, world_size=2)


def limited_everywhere(limit, failing=at_once):
    """On the last rank, which is never the one that prints."""

    def run(state):
        mine = limit if state.rank == state.world_size - 1 else None
        batch = (torch.ones(4, 3).double(), torch.ones(4, 1).double())
        return train(state, [batch], limited(mine, failing), af.accumulate("auto"))[0]

    return run


def test_the_ranks_say_which_of_them_had_no_room(capsys):
    simulate(limited_everywhere(1, in_a_block), world_size=3)
    words = "out of memory on rank 2 at step 1; going on with"
    assert capsys.readouterr().err.splitlines() == [
        f"accel_fn: {words} {count} micro-batches" for count in (2, 4)
    ]


def test_one_sample_that_is_too_much_is_an_error_on_every_rank():
    """Without any sample the last rank goes along until all know."""

    def run(state):
        with pytest.raises(MemoryError, match="micro-batches of one sample, got on rank 1: Tried"):
            limited_everywhere(0)(state)
        return True

    assert simulate(run, world_size=2) == [True, True]


def test_a_model_that_is_too_much_by_itself_is_an_error_where_it_is():
    with pytest.raises(MemoryError, match="fit into memory with few samples, got on rank 1: Tried"):
        simulate(limited_everywhere(-1), world_size=2)


def test_groups_of_shards_are_refused():
    def run(state):
        with pytest.raises(
            ValueError, match=r'replicate\) must be 1 with accumulate\("auto"\), got 2'
        ):
            train(state, [], ours.mse, af.accumulate("auto"), replicate=2)

    simulate(run, world_size=2)


def test_a_torch_that_cannot_begin_again_is_refused(monkeypatch):
    monkeypatch.delattr(FSDPModule, "reset_iter_state")

    def run(state):
        with pytest.raises(ValueError, match=r"wrap_fsdp must have torch >= 2\.13, got 2"):
            train(state, [], ours.mse, af.accumulate("auto"))

    simulate(run, world_size=2)
