"""freeze: what gradient functions see, when the host waits, and what is refused."""

import pytest
import torch

import accel_fn as af
from accel_fn.testing import simulate
from tests.laws.law10_freezing import BATCHES, built, spoilt
from tests.support import late_reads
from tests.support import strategies as ours


def test_the_host_waits_for_an_accelerator_only_where_the_next_update_may_be_the_first(monkeypatch):
    class Counting(late_reads.LateRead):
        num_waits = 0

        def __call__(self, value):
            self.is_of_this_step = True
            return super().__call__(value)

        def last(self):
            self.num_waits += self.held is not None and self.is_of_this_step
            return super().last()

    state, step = built(af.compose(af.freeze("0", until=5), af.skip_nonfinite()))
    reads, waits = Counting(), []
    monkeypatch.setattr(late_reads, "LateRead", lambda: reads)
    late_reads.read_late(*step.plan.after_update)
    for batch in spoilt([*BATCHES, *BATCHES], {2, 5}):
        reads.is_of_this_step = False
        state, _ = step(state, batch)
        waits.append(reads.num_waits)
    assert waits == [0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2]


def test_ranks_agree_on_what_is_frozen():
    def run(state):
        plan = ours.plan(optimizer=ours.adamw)
        names = ["0", "2.bias"][state.rank]
        with pytest.raises(RuntimeError, match="build: plan must be the same on every rank"):
            af.build(af.compose(af.wrap_ddp(), af.freeze(names))(plan), state)

    simulate(run, world_size=2)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("0.wieght", "got '0.wieght'; did you mean 0.weight?"),
        ("1", "freeze: names must be of parameters or modules of the model, got '1'"),
        (["0", "2"], r"must leave a parameter to train, got \['0', '2'\]; give until"),
        ([], "names must be names of parameters or modules"),
        ([3], "names must be names of parameters or modules"),
        (None, "names must be names of parameters or modules, got 'NoneType'; such as \"encoder\""),
        (
            torch.nn.Linear(1, 1),
            "freeze: names must be names of parameters or modules, got 'Linear'",
        ),
    ],
)
def test_what_names_no_parameter_is_refused(names, text):
    plan = ours.plan(optimizer=ours.adamw)
    with pytest.raises(ValueError, match=text):
        af.freeze(names)(plan)


def test_until_is_the_number_of_an_update():
    with pytest.raises(ValueError, match="freeze: until must be an integer >= 1, got 0"):
        af.freeze("0", until=0)


def test_another_plan_trains_what_one_freezes():
    """As the two halves of a GAN: each plan freezes the half of the other."""

    def run(state):
        model, batches = ours.regression_model(), BATCHES[:4]
        first = torch.optim.SGD([*model[0].parameters()], lr=0.1)
        second = torch.optim.SGD([*model[2].parameters()], lr=0.1)
        plans = [
            af.compose(af.wrap_ddp(), af.freeze(names))(af.Plan(ours.mse, model, optimizer))
            for names, optimizer in (("2", first), ("0", second))
        ]
        state, one = af.build(plans[0], state)
        state, two = af.build(plans[1], state)
        for batch in batches:
            part = af.shard_batch(batch, state)
            state, _ = one(state, part, advance=False)
            state, _ = two(state, part)
        return model.state_dict()

    model = ours.regression_model()
    for batch in BATCHES[:4]:
        for half in (model[0], model[2]):
            model.zero_grad()
            ours.mse(model, batch).backward()
            torch.optim.SGD(half.parameters(), lr=0.1).step()
    for found in simulate(run, world_size=2):
        ours.assert_close(found, model.state_dict())


@pytest.mark.parametrize("until", [None, 3])
def test_replicas_stay_equal_through_a_thaw(until):
    def run(state):
        plan = ours.plan(optimizer=ours.adamw)
        recipe = af.compose(af.wrap_ddp(), af.freeze("0", until=until), af.check_replicas(every=1))
        state, step = af.build(recipe(plan), state)
        for batch in BATCHES:
            state, _ = step(state, af.shard_batch(batch, state))
        return [each.detach().clone() for each in plan.model.parameters()]

    first, second = simulate(run, world_size=2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_no_gradient_of_what_is_frozen_for_good_is_computed():
    state, step = built(af.freeze("0"))
    seen = []
    step.plan.model[0].weight.register_hook(seen.append)
    for batch in BATCHES[:2]:
        state, _ = step(state, batch)
    assert not seen
