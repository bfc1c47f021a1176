"""`order=` of shard_loader: what it refuses, and what a checkpoint compares."""

import re
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

import accel_fn as af
from accel_fn.testing import simulate
from tests.support.forked_ranks import run_worlds
from tests.support.streams import Counting

HERE = af.DistState()


def of(state=HERE, order="torch", **options):
    loader = DataLoader(torch.arange(9), batch_size=2, **{"shuffle": True, **options})
    return af.shard_loader(loader, state, order=order)


def test_another_word_is_refused():
    with pytest.raises(
        ValueError,
        match=re.escape(
            "shard_loader: order must be one of 'seed', 'torch', 'distributed', got 'pytorch'"
        ),
    ):
        of(order="pytorch")


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler([1.0] * 9, 9),
    "again": lambda: RandomSampler(range(9), replacement=True),
    "list": lambda: [3, 1, 2],
}


@pytest.mark.parametrize("order", ["torch", "distributed"])
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_another_sampler_is_refused(sampler, order):
    with pytest.raises(
        ValueError,
        match=re.escape(
            "shard_loader: order must be left out for a stream or a sampler that is neither in order nor "
            f"shuffle=True, got '{order}'"
        ),
    ):
        of(order=order, shuffle=False, sampler=sampler())


def test_a_stream_is_refused():
    with pytest.raises(ValueError, match="order must be left out for a stream"):
        af.shard_loader(DataLoader(Counting(9)), HERE, order="torch")


def test_a_state_without_ranks_is_refused():
    with pytest.raises(af.AccelError, match="shard_loader: state must carry a process group"):
        of(af.DistState(rank=1, world_size=2))


def test_samples_are_not_known_before_a_pass():
    match = "loader must have an order that is known before a pass, got 'order=\"torch\"'; use "
    with pytest.raises(ValueError, match="^indices: " + match):
        of().indices(0, 0)
    with pytest.raises(ValueError, match="^global_indices: " + match):
        of().global_indices(0, 0)


def test_a_pass_begins_within_only_with_its_draw():
    def run(state):
        state = replace(state, step=7)
        with pytest.raises(
            ValueError,
            match=re.escape(
                'shard_loader: loader must with order="torch" begin within a pass only if its draw is '
                "loaded, got 'batch 2 of pass 1'; load a checkpoint that was saved with "
                'extras={"loader": loader}'
            ),
        ):
            next(iter(next(of(state).epochs(3, since=state))))

    simulate(run, world_size=2)


@pytest.mark.parametrize("others", [("seed", "torch"), ("torch", "distributed")])
def test_a_run_in_another_order_is_refused(others):
    saved, here = others
    with pytest.raises(ValueError, match=f"order: {saved} saved, {here} here"):
        of(order=here).load_state_dict(of(order=saved).state_dict())


def test_a_checkpoint_without_the_order_is_loaded():
    saved = of(order="seed").state_dict()
    del saved["order"]
    of(order="seed").load_state_dict(saved)


def test_ranks_in_other_passes_raise_on_every_rank():
    def run(state):
        loader = of(state)
        if state.is_main:
            loader.set_epoch(1)
        with pytest.raises(
            RuntimeError,
            match=re.escape(
                "shard_loader: ranks must go through the same passes of a loader together, got pass 0 from "
                "batch 0 on rank 1 and pass 1 from batch 0 on rank 0; each iter(loader) is the next "
                "pass; peek on every rank, or at loader.loader"
            ),
        ):
            next(iter(loader))

    simulate(run, world_size=2)


def test_iter_alone_sends_nothing():
    def run(state):
        loader = of(state)
        if state.is_main:
            iter(loader)
            loader.set_epoch(0)
        return [af.gather(batch, state).tolist() for batch in loader]

    assert len(simulate(run, world_size=2)[1]) == 5


def test_ranks_that_differ_in_the_order_are_refused():
    def run(state):
        with pytest.raises(af.AccelError, match="loader must be the same on every rank"):
            of(state, order="distributed" if state.is_main else "seed")

    simulate(run, world_size=2)


PEEKS = """
import accel_fn as af
from tests.data.test_orders_of_torch import of

state = af.init(device="cpu", timeout_s=2)
loader = of(state)
if state.is_main:
    next(iter(loader))
af.barrier(state)
"""


def test_a_peek_on_one_rank_waits_as_long_as_the_world_and_then_names_its_line(tmp_path):
    ranks = run_worlds({"peeks": PEEKS}, tmp_path, num_processes=2, timeout_s=60)["peeks"]
    assert [rank.exit_code for rank in ranks] == [124, 124]
    assert "rank 0: in a message, loader of uint8" in ranks[0].stderr
    assert "/peeks.py:" in ranks[0].stderr
