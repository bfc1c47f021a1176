"""Prefetch copies on a stream of its own; each part of its care is needed."""

import math
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from tests.sim.device import recorded
from tests.sim.programs import waits_in

prefetch_module = sys.modules[af.prefetch.__module__]


def read_ahead(number=6):
    """Sum batches that are moved ahead and dropped at once; return the sums and what was seen."""
    batches = [torch.full((100,), float(each)) for each in range(number)]
    sums = []
    with recorded() as seen:
        for batch in af.prefetch(batches, af.init()):
            sums.append((batch * 1).sum())
            del batch
        side = list(af.prefetch(batches, af.init()))  # allocates where the batches were
        del side
    return [float(each) for each in sums], seen


def kinds(seen):
    return {each.kind for each in seen}


def test_batches_arrive_whole_without_a_wait():
    sums, seen = read_ahead()
    assert sums == [100.0 * number for number in range(6)]
    assert not waits_in(seen, since=0)
    assert not {"hazard", "staged"} & kinds(seen)


def test_a_loop_that_does_not_wait_for_the_copies_computes_with_what_is_not_there(monkeypatch):
    monkeypatch.setattr(prefetch_module._SideStream, "hand_over", lambda self, moved: moved[0])
    sums, _ = read_ahead()
    assert any(map(math.isnan, sums))


def test_without_record_stream_memory_is_reused_while_the_loop_uses_it(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    _, seen = read_ahead()
    assert "hazard" in kinds(seen)


def test_from_memory_that_is_not_pinned_copies_are_staged(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    _, seen = read_ahead()
    assert "staged" in kinds(seen)


@pytest.mark.parametrize("options", [{}, {"pin_memory": True}, {"num_workers": 1}])
def test_a_loader_gives_what_it_gives_on_a_cpu(options):
    data = TensorDataset(torch.arange(20.0))
    found = []
    for device in ("cpu", None):
        state = af.init(device=device)
        given = DataLoader(data, batch_size=3, shuffle=True, **options)
        loader = af.prefetch(af.shard_loader(given, state), state)
        found.append([[row[0].tolist() for row in epoch] for epoch in loader.epochs(2)])
    assert found[0] == found[1]
