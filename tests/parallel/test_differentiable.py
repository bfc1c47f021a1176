"""Collectives in a loss: the gradient that each rank gets, and the losses that are refused."""

import dataclasses

import pytest
import torch

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

ALONE = af.DistState()


def gradient_of(collective, state, inputs):
    """Return the gradient of a loss that weighs the elements of the result by rank and place."""
    result = collective(inputs)
    weights = (state.rank + 1) * torch.arange(1.0, result.numel() + 1).view(result.shape)
    (result * weights).sum().backward()
    return inputs.grad.tolist()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (af.gather, [[3.0, 6.0], [9.0, 12.0]]),  # rows of weights 1 .. 4 of ranks 1 and 2
        (af.reduce_sum, [[3.0, 6.0], [3.0, 6.0]]),
        (af.reduce_mean, [[1.5, 3.0], [1.5, 3.0]]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_gradient_is_summed_over_the_ranks(function, expected, dtype):
    def run(state):
        inputs = torch.ones(2, dtype=dtype, requires_grad=True)
        return gradient_of(lambda each: function(each, state), state, inputs)

    assert simulate(run, world_size=2) == expected


def test_the_source_of_a_broadcast_gets_the_gradients_of_all():
    def run(state):
        value = torch.ones(2, requires_grad=state.is_main)
        sent = af.broadcast({"value": value, "number": 3}, state)["value"]
        assert sent.requires_grad
        (sent * (state.rank + 1)).sum().backward()
        return None if value.grad is None else value.grad.tolist()

    assert simulate(run, world_size=3) == [[6.0, 6.0], None, None]


def test_a_rank_without_a_graph_takes_part_in_the_backward():
    """The same holds for outputs that the loss does not use, if it uses one of the same call."""

    def run(state):
        own = torch.ones(1, 2, requires_grad=state.rank == 1)
        used, _ = af.gather((own, torch.ones(1, requires_grad=True)), state)
        used.sum().backward()
        return None if own.grad is None else own.grad.tolist()

    assert simulate(run, world_size=2) == [None, [[2.0, 2.0]]]


def test_a_rank_in_another_backward_is_an_error_on_all():
    def run(state):
        own = torch.ones(1, requires_grad=True)
        joined, total = af.gather(own, state), af.reduce_sum(own, state)
        with pytest.raises(RuntimeError, match=r"grad: every rank must be in the same collective"):
            (joined if state.is_main else total).sum().backward()

    simulate(run, world_size=2)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("function", [af.gather, af.reduce_sum, af.reduce_mean, af.broadcast])
def test_nothing_has_a_graph_in_no_grad(function, world_size):
    def run(state):
        value = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            inside = function((value, value * 1), state)
        return [each.requires_grad for each in (*inside, *function((value, value.detach()), state))]

    assert simulate(run, world_size=world_size) == [[False, False, True, False]] * world_size


def test_a_gradient_of_a_gradient_is_refused():
    def run(state):
        value = torch.ones(2, requires_grad=True)
        (first,) = torch.autograd.grad(
            af.gather(value, state).square().sum(), value, create_graph=True
        )
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()

    simulate(run, world_size=2)


# -- in a loss under training

X = torch.arange(12.0).view(4, 3).double().cos()


def step_with(collective, recipe, world_size, sizes=None, **options):
    """Train one step of a loss that calls the collective."""

    def run(state):
        model = torch.nn.Linear(3, 2).double()
        plan = af.Plan(lambda m, x: collective(m(x), state), model, ours.sgd(model.parameters()))
        state, step = af.build(recipe(plan), state, **options)
        batch = X.split(sizes)[state.rank] if sizes else X.tensor_split(world_size)[state.rank]
        return step(state, batch)[1].loss.isfinite().item()

    return simulate(run, world_size=world_size)


GRAPHS = {
    "gather": lambda z, state: af.gather(z, state).square().mean(),
    "reduce_sum": lambda z, state: af.reduce_sum(z.mean(), state),
    "reduce_mean": lambda z, state: af.reduce_mean(z.mean(), state),
    "broadcast": lambda z, state: af.broadcast(z.mean(), state),
}
PARTS = {
    "accumulate": af.compose(af.wrap_ddp(), af.accumulate(2)),
    "reproducible": af.reproducible(2),
}


@pytest.mark.parametrize(
    ("recipe", "world_size"),
    [(PARTS["accumulate"], 1), (PARTS["accumulate"], 2), (PARTS["reproducible"], 2)],
)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_part_of_the_batch_is_refused(name, recipe, world_size):
    text = f"{name}: tree must be of the whole batch where a loss is computed, got one of 2 parts"
    with pytest.raises(ValueError, match=text):
        step_with(GRAPHS[name], recipe, world_size)


def test_a_part_of_the_batch_on_one_rank_alone_is_refused_on_all():
    def run_all(z, state):
        with pytest.raises(ValueError, match="got one of 2 parts"):
            af.gather(z, state)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step_with(run_all, PARTS["accumulate"], 2, sizes=[1, 3], check_loss=False)


@pytest.mark.parametrize("name", GRAPHS)
def test_ranks_that_train_apart_are_refused(name):
    with pytest.raises(
        ValueError, match=f"{name}: tree must hold no tensor with a graph where ranks"
    ):
        step_with(GRAPHS[name], af.local_sgd(every=2), 2)


def test_a_rank_without_rows_is_an_error_on_all():
    match = "every rank must be in the same collective, got (gather|step) on rank"
    with pytest.raises(af.AccelError, match=match):
        step_with(GRAPHS["gather"], af.wrap_ddp(), 2, sizes=[4, 0], check_loss=False)


def test_a_graph_that_is_lost_for_gather_is_refused():
    def put_back(z, state):
        with torch.no_grad():
            every = af.gather(z, state)
        return torch.cat([z, every]).square().mean()

    assert step_with(put_back, af.wrap_ddp(), 1) == [True]
    with pytest.raises(
        ValueError, match="gather: tree must hold tensors with their graph where a l"
    ):
        step_with(put_back, af.wrap_ddp(), 2)


ALLOWED = {
    "detached": lambda z, state: z.sum() * af.gather(z.detach(), state).mean(),
    "labels": lambda z, state: z.sum() * len(af.gather(torch.arange(len(z)), state)),
    "a mean for a log": lambda z, state: z.sum() * af.reduce_mean(z.detach().sum(), state),
    "items": lambda z, state: z.mean() * len(af.gather([z.detach()], state)),
}


@pytest.mark.parametrize("collective", ALLOWED.values(), ids=ALLOWED)
def test_what_needs_no_gradient_is_exchanged(collective):
    assert step_with(collective, af.wrap_ddp(), 2, check_loss=False) == [True] * 2


def test_items_of_a_list_have_no_graph():
    with pytest.raises(
        ValueError, match="gather: tree must hold lists of tensors that need no grad"
    ):
        step_with(lambda z, state: af.gather([z], state)[0].mean(), af.wrap_ddp(), 2)


def test_a_loss_that_has_failed_is_over():
    """After a step that raised, a collective is not taken for a part of its loss."""

    def run(state):
        with pytest.raises(ZeroDivisionError):
            step_with(lambda z, state: z.sum() / (1 // 0), af.accumulate(2), 1)
        return af.gather(torch.ones(1, requires_grad=True).detach(), state).tolist()

    assert simulate(run, world_size=1) == [[1.0]]
    assert af.gather(X, dataclasses.replace(ALONE)) is X
