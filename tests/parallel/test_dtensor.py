"""Sharded tensors on meshes of two axes: filled, compared, counted once in a norm, saved and trained."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import accel_fn as af
from accel_fn.testing import simulate
from accel_fn.testing.internals import (
    ModelRanks,
    axes_of,
    check_same,
    fill,
    global_norm,
    local,
    make_mesh,
    shard_like,
    whole,
)
from tests.support import strategies as ours

CUTS = {
    "rows over the first axis": (Shard(0), Replicate()),
    "rows over the second axis": (Replicate(), Shard(0)),
    "columns over the first axis": (Shard(1), Replicate()),
    "rows and columns": (Shard(0), Shard(1)),
    "columns and rows": (Shard(1), Shard(0)),
    "rows over both axes": (Shard(0), Shard(0)),
    "rows over both axes, the second first": (_StridedShard(0, split_factor=2), Shard(0)),
    "nothing": (Replicate(), Replicate()),
}
VALUES = torch.arange(1, 16).double().view(5, 3)  # no size is a multiple of a number of ranks


def cut(value, mesh, placements):
    return distribute_tensor(value.clone(), mesh, placements, src_data_rank=None)


def simulated(fn):
    """Run `fn(state, mesh)` on four ranks, as a mesh of 2 x 2."""
    return simulate(lambda state: fn(state, make_mesh(state, replicate=2)), world_size=4)


@pytest.mark.parametrize("values", [VALUES, torch.arange(32.0).view(8, 4)], ids=["uneven", "even"])
@pytest.mark.parametrize("placements", CUTS.values(), ids=CUTS)
def test_each_rank_gets_its_part_of_a_whole_tensor(placements, values):
    def run(state, mesh):
        filled = cut(torch.zeros_like(values), mesh, placements)
        home = local(filled).data_ptr()
        fill(filled, values)
        like = shard_like(values.half(), filled)
        assert local(filled).data_ptr() == home
        return whole(filled), whole(like)

    for filled, like in simulated(run):
        assert torch.equal(filled, values)
        assert torch.equal(like, values.half())


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("values", [VALUES, torch.arange(32.0).view(8, 4)], ids=["uneven", "even"])
@pytest.mark.parametrize("placements", CUTS.values(), ids=CUTS)
def test_a_tensor_is_gathered_to_one_rank_alone(placements, values, rank):
    def run(state, mesh):
        tensor = cut(values, mesh, placements)
        return ModelRanks.of("save_model", [tensor]).gather_to(tensor, rank)

    found = simulated(run)
    assert [each is None for each in found] == [other != rank for other in range(4)]
    assert torch.equal(found[rank], values)


def gathered_from(tensor_of, rank):
    """Gather a tensor of the main rank's mesh, of two times two ranks, to one rank."""

    def run(state, mesh):
        some = cut(VALUES, mesh, (Shard(0), Shard(1)))
        return ModelRanks.of("save_model", [some]).gather_to(tensor_of(state, mesh), rank)

    return simulated(run)[rank]


@pytest.mark.parametrize("rank", range(4))
def test_of_a_whole_tensor_one_rank_gets_the_main_ranks_values(rank):
    def tensor_of(state, mesh):
        return (VALUES + state.rank).t()

    assert torch.equal(gathered_from(tensor_of, rank), VALUES.t())


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_a_tensor_on_a_part_of_the_mesh_is_gathered(axis, rank):
    def tensor_of(state, mesh):
        return cut(VALUES, mesh[axis], [Shard(1)])

    assert torch.equal(gathered_from(tensor_of, rank), VALUES)


@pytest.mark.parametrize("stride", [2, 3])
def test_a_split_with_a_stride_is_gathered_whatever_the_stride(stride):
    """As of a fused projection, whose parts are split one by one: a shard is no chunk."""
    values = torch.arange(24.0).view(12, 2)

    def tensor_of(state, mesh):
        return cut(values, mesh["shard"], [_StridedShard(0, split_factor=stride)])

    assert torch.equal(gathered_from(tensor_of, 3), values)


def test_no_rank_but_the_writer_has_memory_for_the_tensor():
    def run(state, mesh):
        tensor = cut(torch.zeros(4096, 4), mesh, (Shard(0), Shard(0)))
        ranks = ModelRanks.of("save_model", [tensor])
        with Largest() as mode:
            ranks.gather_to(tensor, 2)
        return mode.numel

    assert simulated(run) == [2 * 4096, 4096, 4 * 4096, 4096]


class Largest(TorchDispatchMode):
    """Records the elements of the largest tensor that an operation returns, on this thread."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        for each in pytree.tree_leaves(found):
            if isinstance(each, torch.Tensor) and each.dtype != torch.uint8:
                self.numel = max(self.numel, each.numel())
        return found


def test_a_norm_counts_every_element_once_over_all_axes():
    """Also where some tensors are whole, and where gradients are still to be summed over an axis."""

    def run(state, mesh):
        tensors = [cut(VALUES, mesh, placements) for placements in CUTS.values()]
        tensors.append(cut(VALUES, mesh["shard"], [Shard(1)]))
        half = local(cut(VALUES / 2, mesh, (Shard(0), Replicate())))
        summand = DTensor.from_local(half, mesh, (Shard(0), Partial()), shape=(5, 3), stride=(3, 1))
        return global_norm([*tensors, summand, VALUES])

    expected = torch.linalg.vector_norm(torch.stack([VALUES] * (len(CUTS) + 3)))
    for norm in simulated(run):
        assert abs(norm - expected) <= 1e-12 * expected


def compared(state, tensors, make_strategy=af.extend.Strategy):
    """Compare tensors over the ranks; return the error, or an empty text."""
    plan = replace(ours.plan(), strategy=(af.extend.SlotFunction(make_strategy),))
    strategy = af.build(plan, state)[1].strategy
    try:
        check_same(strategy, state, tensors, "check: {name} differs on {ranks}")
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("placements", CUTS.values(), ids=CUTS)
def test_ranks_that_hold_the_same_shard_are_compared_and_no_others(placements):
    def run(state, mesh, bad_rank):
        tensor = cut(VALUES, mesh, placements)
        if state.rank == bad_rank:
            local(tensor).view(-1)[0] += 1
        return compared(state, {"it": tensor})

    assert simulated(partial(run, bad_rank=None)) == [""] * 4
    is_replica = any(each.is_replicate() for each in placements)
    words = "check: it differs on rank 3" if is_replica else ""
    assert simulated(partial(run, bad_rank=3)) == [words] * 4


def test_a_shard_without_a_gradient_on_one_rank_is_found():
    def run(state, mesh):
        tensor = None if state.rank == 1 else cut(VALUES, mesh, (Shard(0), Shard(0)))
        return compared(state, {"it": tensor})

    assert simulated(run) == ["check: it differs on rank 1"] * 4


class OfStages(af.extend.Strategy):
    """Ranks 0 and 1 are one stage of a pipeline, ranks 2 and 3 the next."""

    def compared_ranks(self, state):
        return (0, 1) if state.rank < 2 else (2, 3)


@pytest.mark.parametrize(
    ("bad_rank", "words"),
    [(None, ""), (1, "check: first differs on rank 1"), (3, "check: next differs on rank 3")],
)
def test_a_tensor_is_compared_among_the_ranks_that_hold_it_and_are_to_be_equal(bad_rank, words):
    def run(state):
        stage = state.rank // 2
        change = int(state.rank == bad_rank)
        tensors = {("first", "next")[stage]: VALUES + change, "number of the stage": VALUES * stage}
        return compared(state, tensors, OfStages)

    assert simulate(run, world_size=4) == [words] * 4


WAYS = {
    "0.weight": ("shard", (Shard(0),)),
    "0.bias": (None, (_StridedShard(0, split_factor=2), Shard(0))),
    "2.weight": (None, (Replicate(), Shard(1))),
    "2.bias": (None, (Shard(0), Replicate())),
}
"""How parameters of the small model are cut: over one axis of the mesh, or over all."""


def cut_model(model, mesh):
    """Put the parameters of the small model on a mesh, as new tensors."""
    for name, (axis, placements) in WAYS.items():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        value = cut(getattr(module, last).detach(), mesh[axis] if axis else mesh, placements)
        setattr(module, last, nn.Parameter(value))
    return model


def test_a_model_over_two_axes_is_saved_and_loaded(tmp_path):
    def run(state, mesh):
        model = cut_model(ours.regression_model(), mesh)
        af.save_model(model, tmp_path)
        with torch.no_grad():
            for each in model.parameters():
                local(each).zero_()
        af.load_model(model, tmp_path)
        return {name: whole(each) for name, each in model.named_parameters()}

    expected = dict(ours.regression_model().named_parameters())
    for found in simulated(run):
        ours.assert_identical(found, expected)
    plain = ours.regression_model(seed=1)
    af.load_model(plain, tmp_path)
    ours.assert_identical(dict(plain.named_parameters()), expected)


@pytest.mark.parametrize(("axis", "num_axes"), [("tp", 2), ("pp", 3)])
def test_replicas_of_a_part_count_and_other_layers_do_not(axis, num_axes):
    def run(state):
        shard = cut(torch.ones(4), af.device_mesh(state)[axis], [Shard(0)])
        return len(axes_of([shard]))

    mesh = {"pp": 2, "dp": 2, "tp": 2}
    assert simulate(run, mesh=mesh) == [num_axes] * 8


def gathered_mse(model, batch):
    """The loss of a model whose parameters are on a mesh, on every rank for the whole batch."""
    values = {name: each.full_tensor() for name, each in model.named_parameters()}
    return F.mse_loss(torch.func.functional_call(model, values, batch[0]), batch[1])


def built_on(mesh, state):
    """Build a step of the small model whose optimizer has made an update, cut over a mesh if there is one."""
    batch = (torch.ones(2, 3).double(), torch.ones(2, 1).double())
    plan = ours.plan(optimizer=ours.adamw, loss_fn=gathered_mse if mesh else ours.mse)
    ours.mse(plan.model, batch).backward()
    plan.optimizer.step()
    plan.optimizer.zero_grad()
    plan = af.compose(af.clip(0.1), af.check_replicas(1))(plan)
    if mesh:
        plan = replace(
            plan,
            shard_model=(lambda state, model: cut_model(model, mesh),),
            strategy=(af.extend.SlotFunction(af.extend.Strategy),),
        )
    return af.build(plan, state)


def test_a_step_trains_what_shard_model_has_cut():
    """The optimizer, which has already made an update, gets the shards."""
    batches = [(torch.randn(6, 3).double(), torch.randn(6, 1).double()) for _ in range(3)]

    def run(state, mesh=None):
        state, step = built_on(mesh, state)
        found = {}
        for batch in batches:
            state, report = step(state, batch)
            found |= {f"loss {state.step}": report.loss, f"norm {state.step}": report.grad_norm}
        return found | ours.whole(dict(step.plan.model.named_parameters()))

    expected = run(af.DistState())
    for found in simulated(run):
        ours.assert_close(found, expected)
