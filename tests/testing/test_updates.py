"""recorded_updates: what it records, and which random numbers a program gets inside."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.testing import recorded_updates


def trained(state: af.DistState, p: float = 0.0) -> tuple[af.DistState, af.Step]:
    model = nn.Sequential(nn.Linear(3, 1, dtype=torch.float64), nn.Dropout(p))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return af.build(
        af.Plan(lambda model, batch: model(batch).square().mean(), model, optimizer), state
    )


BATCH = torch.ones(6, 3, dtype=torch.float64)


def test_each_report_is_handed_over():
    state, step = trained(af.DistState())
    seen = []
    with recorded_updates(seen.append) as updates:
        for _ in range(3):
            state, report = step(state, BATCH)
    state, _ = step(state, BATCH)
    assert seen == updates
    assert len(updates) == 3
    assert updates[-1].report is report
    assert state.step == 4


@pytest.mark.parametrize(("p", "draws"), [(0.0, False), (0.5, True)])
def test_a_step_that_draws_is_marked(p, draws):
    state, step = trained(af.DistState(), p)
    with recorded_updates() as updates:
        step(state, BATCH)
    assert [each.draws for each in updates] == [draws]


def noise(state: af.DistState) -> torch.Tensor:
    return af.draw(lambda generator: torch.randn(4, 2, generator=generator), state)


def test_one_rank_draws_from_the_global_generator():
    torch.manual_seed(3)
    expected = torch.randn(4, 2), torch.randn(4, 2)
    torch.manual_seed(3)
    with recorded_updates() as updates:
        found = noise(af.DistState()), noise(af.DistState())
    assert all(map(torch.equal, found, expected))
    assert updates.num_draws == 2


def test_a_seed_is_that_of_the_program_that_runs():
    af.seed_all(af.DistState(seed=5))
    expected = torch.rand(3)
    with recorded_updates():
        af.seed_all(af.DistState(seed=5))
        assert torch.equal(torch.rand(3), expected)


def test_draws_are_those_of_the_state_if_wanted_and_afterwards():
    expected = noise(af.DistState())
    with recorded_updates(draws="state"):
        assert torch.equal(noise(af.DistState()), expected)
    assert torch.equal(noise(af.DistState()), expected)


def test_several_ranks_draw_by_their_states():
    whole = noise(af.DistState())
    with recorded_updates():
        parts = [noise(af.DistState(rank=rank, world_size=2)) for rank in range(2)]
    assert torch.equal(torch.cat(parts), whole)


def test_an_error_ends_the_record():
    run = af.Step.__call__
    with pytest.raises(KeyError), recorded_updates():
        raise KeyError
    assert af.Step.__call__ is run


def test_another_source_of_draws_is_refused():
    words = "recorded_updates: draws must be one of 'global', 'state'"
    with pytest.raises(ValueError, match=words), recorded_updates(draws="none"):
        pass
