"""reproducible refuses these plans in build, and these batches in the step, on every rank alike."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 1))

    def forward(self, inputs):
        return self.layers(inputs)


def make_plan(model):
    return af.Plan(ours.mse, model, torch.optim.SGD(model.parameters(), lr=0.1))


def refused(recipe, world_size=1, make=ours.regression_model):
    """Return the error of `build` on each rank."""

    def run(state):
        with pytest.raises(af.AccelError) as caught:
            af.build(recipe(make_plan(make())), state)
        return str(caught.value)

    (words,) = set(simulate(run, world_size=world_size))
    return words


def test_a_number_of_slots_is_a_power_of_two():
    with pytest.raises(
        ValueError, match="reproducible: num_virtual_ranks must be a power of two, got 6"
    ):
        af.reproducible(6)
    with pytest.raises(ValueError, match="num_virtual_ranks must be an integer >= 1, got 0"):
        af.reproducible(0)


@pytest.mark.parametrize(("num_virtual_ranks", "world_size"), [(8, 3), (2, 4)])
def test_the_number_of_ranks_divides_that_of_slots(num_virtual_ranks, world_size):
    assert refused(af.reproducible(num_virtual_ranks), world_size) == (
        f"build: reproducible(num_virtual_ranks={num_virtual_ranks}) must have a number of ranks "
        f"that divides num_virtual_ranks, a power of two, got {world_size} ranks"
    )


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True), nn.SyncBatchNorm(4)],
    ids=lambda norm: type(norm).__name__,
)
def test_a_layer_that_takes_running_statistics_is_named(norm):
    words = refused(af.reproducible(), 2, lambda: Normed(norm))
    assert words == (
        "build: reproducible's model must take no running statistics of batches, got layers.1, a "
        f"{type(norm).__name__} in training mode; use GroupNorm or track_running_stats=False, or freeze "
        "it by eval()"
    )


def test_a_layer_that_takes_none_is_taken():
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    af.build(af.reproducible(2)(make_plan(Normed(norm))), af.DistState())


@pytest.mark.filterwarnings("ignore:step. model should be in training mode")
def test_one_that_was_frozen_and_is_not_any_more_is_named_by_the_step_on_all_ranks():
    """The layer may have changed on one rank only."""

    def run(state, culprits):
        model = Normed(nn.BatchNorm1d(4).eval())
        state, step = af.build(af.reproducible(2)(make_plan(model)), state)
        state, _ = step(state, (torch.ones(2, 3), torch.ones(2, 1)))
        model.train(state.rank in culprits)
        with pytest.raises(af.AccelError) as caught:
            step(state, (torch.ones(2, 3), torch.ones(2, 1)))
        return str(caught.value)

    for words in simulate(lambda state: run(state, {0, 1}), world_size=2):
        assert words.startswith("step: reproducible's model must take no running statistics")
    first, second = simulate(lambda state: run(state, {1}), world_size=2)
    assert first == (
        "step: every rank must be able to count its batch; another rank could not, see the error "
        "that it raised"
    )
    assert "got layers.1, a BatchNorm1d in training mode" in second


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (af.wrap_ddp(), "build: plan must have at most one function in strategy, got"),
        (af.accumulate("auto"), 'build: accumulate("auto") must not be used with reproducible'),
        (
            af.compiled(scope="step"),
            'build: compiled(scope="step") must not be used with reproducible',
        ),
    ],
    ids=["wrap_ddp", "auto", "step"],
)
def test_what_it_cannot_be_combined_with_is_named(other, words):
    assert refused(af.compose(af.reproducible(), other)).startswith(words)


class Counting(nn.Module):
    """A module with a buffer that counts forwards, as spectral norm updates its vectors."""

    def __init__(self, persistent):
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.register_buffer("constant", torch.full((2,), float("nan")))
        self.register_buffer("calls", torch.zeros(()), persistent=persistent)

    def forward(self, inputs):
        if inputs[0, 0] > 0:
            self.calls = self.calls + 1
        return self.inner(inputs)


def test_a_forward_that_changes_what_is_saved_is_raised_on_all_ranks_after_the_first_batch():
    """The change may happen on one rank only."""

    def run(state):
        state, step = af.build(af.reproducible(2)(make_plan(Counting(persistent=True))), state)
        part = (torch.tensor([[0.0] * 3, [1.0] * 3]), torch.ones(2, 1))
        part = tuple(each.tensor_split(2)[state.rank] for each in part)
        for _ in range(2):  # a second attempt fails too
            with pytest.raises(af.AccelError) as caught:
                step(state, part)
        return str(caught.value)

    (words,) = set(simulate(run, world_size=2))
    assert "model must change no buffers" in words
    assert "got calls;" in words


def test_what_is_not_saved_may_change():
    plan = af.reproducible(2)(make_plan(Counting(persistent=False)))
    state, step = af.build(plan, af.DistState())
    step(state, (torch.ones(2, 3), torch.ones(2, 1)))
    assert plan.model.calls == 2


class Looked(nn.Module):
    """A table that chooses its kind of gradient in its forward."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.ones(5, 1))

    def forward(self, inputs):
        return nn.functional.embedding(inputs, self.rows, sparse=True)


def test_sparse_gradients_that_a_forward_makes_are_named_by_the_step_on_all_ranks():
    def run(state):
        state, step = af.build(af.reproducible(4)(make_plan(Looked())), state)
        with pytest.raises(
            ValueError, match=r"step: .* dense gradients, got 'rows'; use sparse=False"
        ):
            step(state, (torch.arange(4), torch.ones(4, 1)))

    simulate(run, world_size=2)


def bounded(kind):
    """A table whose forward shortens rows of its weight: those that this rank's samples use."""
    return nn.Sequential(nn.Sequential(kind(5, 3, max_norm=1.0)), nn.Linear(3, 1))


@pytest.mark.parametrize(
    ("recipe", "world_size", "kind"),
    [
        (af.reproducible(), 1, nn.Embedding),
        (af.wrap_ddp(), 2, nn.EmbeddingBag),
        (af.wrap_fsdp(), 2, nn.Embedding),
    ],
    ids=["reproducible", "wrap_ddp", "wrap_fsdp"],
)
def test_a_table_whose_forward_writes_to_its_weight_is_named(recipe, world_size, kind):
    words = refused(recipe, world_size, lambda: bounded(kind))
    assert "must not write to parameters in its forward" in words
    assert "got 0.0, of max_norm=1.0;" in words


@pytest.mark.parametrize(
    ("recipe", "world_size"),
    [(af.accumulate(2), 1), (af.local_sgd(2), 2)],
    ids=["accumulate", "local_sgd"],
)
def test_where_a_rank_trains_alone_such_a_table_is_fine(recipe, world_size):
    simulate(
        lambda state: af.build(recipe(make_plan(bounded(nn.Embedding))), state),
        world_size=world_size,
    )


@pytest.mark.parametrize(
    ("num_virtual_ranks", "sizes", "got"),
    [(8, [12], "12"), (2, [3, 1], "3 + 1"), (4, [5, 5, 5, 1], "5 + 5 + 5 + 1")],
)
def test_samples_that_do_not_fill_the_slots_are_refused_on_all_ranks(num_virtual_ranks, sizes, got):
    def run(state):
        state, step = af.build(
            af.reproducible(num_virtual_ranks)(make_plan(ours.regression_model())), state
        )
        size = sizes[state.rank]
        with pytest.raises(af.AccelError) as caught:
            step(state, (torch.ones(size, 3).double(), torch.ones(size, 1).double()))
        return str(caught.value)

    (words,) = set(simulate(run, world_size=len(sizes)))
    assert f"num_virtual_ranks={num_virtual_ranks} of reproducible divides" in words
    assert f"got {got}; let it divide batch_size" in words


def part_of(state):
    batch = torch.arange(12.0).view(4, 3), torch.ones(4, 1)
    return tuple(each.double().tensor_split(state.world_size)[state.rank] for each in batch)


class Failing:
    """A loss, or a gradient transform, that raises on rank 1 while it is told to."""

    def __init__(self, state, then):
        self.fails, self.is_last, self.then = False, state.rank == 1, then

    def __call__(self, *inputs):
        if self.fails and self.is_last:
            raise ArithmeticError("no number")
        return self.then(*inputs)


def second_loss():
    """Return the loss of the second update where nothing fails."""
    plan = make_plan(ours.regression_model())
    state, step = af.build(af.reproducible(4)(plan), af.DistState())
    state, _ = step(state, part_of(state))
    return float(step(state, part_of(state))[1].loss)


@pytest.mark.parametrize("goes_on", ["step", "gather", "forward"])
def test_all_ranks_raise_what_a_loss_raises_on_one_of_them_and_can_go_on(goes_on):
    def run(state):
        model, loss_fn = ours.regression_model(), Failing(state, ours.mse)
        plan = af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1))
        state, step = af.build(af.reproducible(4)(plan), state)
        state, _ = step(state, part_of(state))
        loss_fn.fails = True
        with pytest.raises((ArithmeticError, af.errors.PeerError)) as caught:
            step(state, part_of(state))
        loss_fn.fails = False
        run = {
            "gather": lambda: af.gather(torch.ones(1), state),
            "forward": lambda: step.forward(state, part_of(state)),
        }
        run.get(goes_on, int)()
        _, report = step(state, part_of(state))
        return caught.type, str(caught.value), float(report.loss)

    (peer, words, loss), (own, reason, other_loss) = simulate(run, world_size=2)
    assert (own, reason) == (ArithmeticError, "no number")
    assert peer is af.errors.PeerError
    assert re.fullmatch(
        r"step: failed on rank 1: ArithmeticError\('no number'\) at .*test_reproducible_refused\.py:\d+",
        words,
    )
    assert loss == other_loss == second_loss()


def test_a_rank_that_repeats_a_step_alone_is_an_error_on_all_ranks():
    """Its random numbers and its parameters would be those of another step."""

    def run(state):
        model, keep = ours.regression_model(), Failing(state, lambda state, grads: grads)
        plan = af.Plan(ours.mse, model, torch.optim.SGD(model.parameters(), lr=0.1))
        plan = replace(af.reproducible(2)(plan), gradients=(keep,))
        state, step = af.build(plan, state)
        state, _ = step(state, part_of(state))
        keep.fails = True
        try:
            state, _ = step(state, part_of(state))
        except ArithmeticError:
            keep.fails = False
        with pytest.raises(af.errors.WorldError) as caught:
            step(state, part_of(state))
        return str(caught.value)

    (words,) = set(simulate(run, world_size=2))
    assert words == (
        "step: every rank must be in the same step, got step 3 on rank 0 and 2 on rank 1; a rank that "
        "catches an error of a step must not go on alone"
    )
