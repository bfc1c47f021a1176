"""local_sgd in a plan: its collectives, the transforms that it works with, and those that it
refuses."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.block_models import batches, part


def built(state, recipe, optimizer=ours.sgd, model=None, loss_fn=ours.mse):
    model = ours.regression_model() if model is None else model
    plan = af.Plan(loss_fn, model, optimizer(model.parameters()))
    return af.build(recipe(plan), state, check_loss=False)


def weights(step):
    return {name: value.clone() for name, value in step.plan.model.state_dict().items()}


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 1)
        self.register_buffer("mask", torch.tensor([float("-inf"), 0.0]))

    def forward(self, inputs):
        return self.linear(self.norm(inputs))


def test_running_statistics_are_averaged_and_counts_are_left_alone():
    (batch,) = batches(num=1, size=6)

    def run(state):
        torch_model = Normed().double()
        state, step = built(state, af.local_sgd(1), model=torch_model)
        step(state, part(batch, state))
        return weights(step)

    first, second = simulate(run, world_size=2)
    ours.assert_identical(first, second)
    means = [0.1 * each.mean(dim=0) for each in batch[0].chunk(2)]
    torch.testing.assert_close(first["norm.running_mean"], sum(means) / 2)
    assert first["norm.num_batches_tracked"] == 1
    assert first["mask"].tolist() == [float("-inf"), 0.0]


def test_what_comes_after_an_update_sees_the_average_wherever_it_is_listed():
    def watching(seen):
        def watch(state, report):
            seen.append(report_of[state.rank]())
            return state

        return lambda plan: replace(plan, after_update=(*plan.after_update, watch))

    report_of = {}

    def run(state):
        seen = []
        model = ours.regression_model()
        report_of[state.rank] = lambda: model[0].weight.detach().clone()
        state, step = built(state, af.compose(watching(seen), af.local_sgd(1)), model=model)
        step(state, part(batches()[0], state))
        return seen

    (first,), (second,) = simulate(run, world_size=2)
    assert torch.equal(first, second)


def test_a_gradient_function_that_drops_the_rank_s_weight_is_refused():
    def forgetting(grad_fn):
        def wrapped(state, batch):
            state, grads, report = grad_fn(state, batch)
            return state, grads, af.Report(loss=report.loss, weight=report.weight)

        return wrapped

    def run(state):
        recipe = af.compose(lambda plan: replace(plan, wrap_grad_fn=(forgetting,)), af.local_sgd(2))
        state, step = built(state, recipe)
        with pytest.raises(
            ValueError,
            match=r'step: report must have extras\["own_weight"\] for local_sgd, got none',
        ):
            step(state, part(batches()[0], state))

    simulate(run, world_size=2)


def test_the_order_in_which_a_rank_has_come_to_its_state_does_not_matter():
    def run(state):
        state, step = built(state, af.local_sgd(2), ours.adamw)
        for batch in batches(num=2):
            held = step.plan.optimizer.state
            for parameter in held if state.rank else ():
                held[parameter] = dict(reversed(held[parameter].items()))
            state, _ = step(state, part(batch, state))
        kept = step.plan.optimizer.state.values()
        return [each[name] for each in kept for name in ("exp_avg", "exp_avg_sq")]

    first, second = simulate(run, world_size=2)
    assert all(map(torch.equal, first, second))


class Routed(nn.Module):
    """A model that uses one of two layers, depending on the input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])

    def forward(self, inputs):
        return self.layers[int(inputs[0, 0] > 0)](inputs)


def test_optimizer_state_that_a_rank_does_not_have_is_named_on_every_rank():
    def run(state):
        torch_model = Routed()
        state, step = built(state, af.local_sgd(1), model=torch_model)
        sign = 1.0 if state.rank else -1.0
        with pytest.raises(RuntimeError) as caught:
            step(state, (torch.full((2, 3), sign), torch.ones(2, 1)))
        return str(caught.value)

    first, second = simulate(run, world_size=2)
    assert first == second
    assert first == (
        "local_sgd: optimizer state must be of the same parameters on all ranks, got no "
        "layers.0.bias momentum_buffer 0 [1] torch.float32 on ranks [1]; freeze what a "
        "rank's loss may not reach, or use wrap_ddp(find_unused_parameters=True)"
    )


def test_a_run_resumes_from_an_average_with_the_same_bits(tmp_path):
    def run(state):
        state, step = built(state, af.local_sgd(2), ours.adamw)
        first, *rest = [part(each, state) for each in batches(num=7)]
        state, _ = step(state, first)
        with pytest.raises(
            ValueError,
            match="save: state must be one at which local_sgd has averaged the ranks, got 1 of 2 updates "
            "after it; save where their number is a multiple of 2",
        ):
            af.save(step, state, tmp_path)
        state, _ = step(state, rest[0])
        af.save(step, state, tmp_path)
        for batch in rest[1:]:
            state, _ = step(state, batch)
        expected = ours.kept_tensors(step)
        again = af.load(step, state, tmp_path)
        af.save(step, again, tmp_path / "again")  # ranks are equal again

        state, step = built(replace(state, step=0), af.local_sgd(2), ours.adamw)
        state = af.load(step, state, tmp_path)
        for batch in rest[1:]:
            state, _ = step(state, batch)
        ours.assert_identical(ours.kept_tensors(step), expected)

    simulate(run, world_size=2)


def test_a_run_of_one_rank_is_saved_anywhere_and_continues_in_two(tmp_path):
    def started(state):
        state, step = built(state, af.local_sgd(2))
        state, _ = step(state, batches()[0])
        af.save(step, state, tmp_path)

    def gone_on(state):
        state, step = built(state, af.local_sgd(2))
        state = af.load(step, state, tmp_path)
        af.save(step, state, tmp_path)  # ranks are equal
        step(state, part(batches()[1], state))  # the second of two updates
        return weights(step)

    simulate(started, world_size=1)
    first, second = simulate(gone_on, world_size=2)
    ours.assert_identical(first, second)


def test_a_run_of_two_ranks_continues_in_another_number_as_the_loop_over_all_batches(tmp_path):
    """The average comes after every update, and parts have any sizes."""
    data = batches(num=5)

    def leg(state, given, *, resumed):
        state, step = built(state, af.local_sgd(1))
        state = af.load(step, state, tmp_path) if resumed else state
        for batch in given:
            state, _ = step(state, part(batch, state))
        af.save(step, state, tmp_path)
        return weights(step)

    simulate(lambda state: leg(state, data[:2], resumed=False), world_size=2)
    found = simulate(lambda state: leg(state, data[2:], resumed=True), world_size=3)
    _, expected = ours.trained_by_hand(ours.regression_model(), data, optimizer=ours.sgd)
    for actual in found:
        ours.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (af.wrap_fsdp(), "the only strategy, .*got wrap_fsdp.*leave out one of wrap_fsdp and loc"),
        (af.wrap_ddp(), "the only strategy, .*got wrap_ddp"),
        (af.with_amp("fp16"), "without a loss scale"),
        (af.skip_nonfinite(), "must apply every update, .*got skip_nonfinite"),
        (af.check_replicas(5), "must not be combined with .*got check_replicas"),
        (af.ema(0.9), "got ema"),
    ],
    ids=["wrap_fsdp", "wrap_ddp", "fp16", "accept", "replicas", "average"],
)
def test_what_it_cannot_be_combined_with_is_refused_on_every_rank(other, words):
    def run(state):
        with pytest.raises(ValueError, match=f"^build: local_sgd .*{words}"):
            built(state, af.compose(other, af.local_sgd(2)))

    simulate(run, world_size=2)


def test_momentum_of_sparse_gradients_is_refused():
    def run(state):
        model = nn.Embedding(6, 2, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        plan = af.Plan(lambda model, rows: model(rows).mean(), model, optimizer)
        with pytest.raises(ValueError, match="local_sgd's model must have dense gradients beside"):
            af.build(af.local_sgd(1)(plan), state)

    simulate(run, world_size=2)


def test_a_state_with_the_loss_scale_of_another_step_is_refused():
    def run(state):
        def move(state, model):
            raise AssertionError("it is refused before anything is moved")

        def moving(plan):
            return replace(plan, place_model=(move,))

        scaled = replace(state, scaler=af.extend.LossScale.start(2.0))
        with pytest.raises(ValueError, match="build: local_sgd must be used without a loss scale"):
            built(scaled, af.compose(moving, af.local_sgd(2)))
        _, step = built(state, af.local_sgd(2))
        with pytest.raises(
            ValueError, match="step: state must carry no loss scale under local_sgd, got one; keep"
        ):
            step(scaled, part(batches()[0], state))

    simulate(run, world_size=2)


@pytest.mark.parametrize("every", [0, 1.5])
def test_how_often_is_a_number_of_updates(every):
    with pytest.raises(ValueError, match="local_sgd: every must be an integer >= 1, got"):
        af.local_sgd(every)


@pytest.mark.parametrize(
    ("settings", "is_exact"),
    [({}, True), ({"momentum": 0.9}, False), ({"weight_decay": 0.1}, False)],
)
def test_with_every_1_a_parameter_that_a_rank_does_not_reach_is_as_on_one_rank_or_refused(
    settings, is_exact
):
    base = nn.ModuleList(nn.Linear(3, 1).double() for _ in range(2))
    rows = torch.randn(8, 3, dtype=torch.float64)
    mixed, apart = rows.clone(), rows.clone()
    mixed[:, 0] = torch.tensor([1.0, -1.0] * 4)
    apart[:, 0] = torch.tensor([1.0] * 4 + [-1.0] * 4)

    def loss_fn(model, x):
        y, chosen = model[0](x), x[:, :1] > 0
        return (y + model[1](x) * chosen if chosen.any() else y).sub(1).square().mean()

    def run(state):
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **settings)
        state, step = af.build(af.local_sgd(every=1)(af.Plan(loss_fn, model, optimizer)), state)
        for x in (mixed, apart, apart):
            state, _ = step(state, x.tensor_split(state.world_size)[state.rank])
        return torch.cat([each.detach().flatten() for each in model.parameters()])

    (alone,) = simulate(run, world_size=1)
    if not is_exact:
        with pytest.raises(
            RuntimeError, match=r"same parameters on all ranks, got no 1\.\w+ updated"
        ):
            simulate(run, world_size=2)
        return
    for each in simulate(run, world_size=2):
        torch.testing.assert_close(each, alone, rtol=0, atol=1e-12)
