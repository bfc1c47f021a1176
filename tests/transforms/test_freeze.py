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
