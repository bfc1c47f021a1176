"""wrap_cp: what it refuses, and what each rank draws."""

import copy
import json
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import accel_fn as af
from accel_fn.core.torch_internals import run_backward
from accel_fn.testing import simulate
from tests.support import long_sequences as long
from tests.support import strategies as ours
from tests.support.processes import launch

CUT = af.wrap_cp(long.DIMS)
MESH = {"dp": 2, "cp": 2}


def step_once(state, recipe=af.compose(af.wrap_ddp(), CUT), *, model=None, batch=None, **given):  # noqa: B008
    """Build a step and run it on this rank's rows of a batch."""
    given = {"loss_fn": long.loss_fn, "weight_fn": af.count_labels("labels")} | given
    model = copy.deepcopy(model or long.long_model(depth=1))
    plan = af.Plan(given.pop("loss_fn"), model, ours.sgd(model.parameters()), **given)
    state, step = af.build(recipe(plan), state)
    batch = long.batches(4)[0] if batch is None else batch
    return step(state, af.shard_batch(batch, state))


def refused(match, mesh=MESH, recipe=af.compose(af.wrap_ddp(), CUT), **given):  # noqa: B008
    with pytest.raises(ValueError, match=match):
        simulate(lambda state: step_once(state, recipe, **given), mesh=mesh)


@pytest.mark.parametrize(
    ("dims", "kind", "match"),
    [
        ("input_ids", TypeError, "wrap_cp: dims must map names of entries of a batch"),
        ({"input_ids": True}, TypeError, "dimension of their tokens, got {'input_ids': True}"),
        ({}, ValueError, "wrap_cp: dims must name an entry, got {}; such as"),
    ],
)
def test_dims_must_map_names_to_dimensions(dims, kind, match):
    with pytest.raises(kind, match=re.escape(match)):
        af.wrap_cp(dims)


def test_the_data_axis_is_none_to_cut_sequences_over():
    with pytest.raises(ValueError, match="wrap_cp: axis must be one of pp, cp, tp, got 'dp'"):
        af.wrap_cp(long.DIMS, axis="dp")


def test_on_one_process_it_does_nothing():
    _, report = step_once(af.DistState(), CUT)
    _, expected = step_once(af.DistState(), af.compose())
    assert torch.equal(report.loss, expected.loss)


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        (
            CUT,
            "wrap_cp must stand beside one wrap_ddp or wrap_fsdp, .* got nothing",
        ),
        (
            af.compose(af.wrap_ddp(), CUT, CUT),
            "must stand beside one .* got wrap_ddp",
        ),
        (af.compose(af.local_sgd(2), CUT), "must have a mesh of dp alone"),
        (
            af.compose(af.wrap_ddp(), CUT, af.accumulate("auto")),
            r'accumulate\("auto"\) must not be used with wrap_cp',
        ),
        (
            af.compose(af.wrap_ddp(), CUT, af.compiled()),
            r"wrap_cp must not be used with compiled\(\), whose graph",
        ),
        (
            af.compose(af.wrap_ddp(), CUT, af.compiled(scope="blocks")),
            r"wrap_cp must not be used with compiled\(scope='blocks'\)",
        ),
    ],
)
def test_plans_that_cannot_cut_sequences_are_refused(recipe, match):
    refused(match, recipe=recipe)


def test_several_ranks_without_a_mesh_are_refused():
    with pytest.raises(ValueError, match="wrap_cp's mesh must have an axis 'cp', got 'dp 2'; use"):
        simulate(step_once, world_size=2)


def test_several_terms_are_refused():
    refused(
        "weight_fn must be one function with wrap_cp, got .terms",
        weight_fn={"a": af.count_samples},
    )


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        (nn.BatchNorm1d(4), "normalize tokens one by one, got 'extra, a BatchNorm1d"),
        (nn.Embedding(4, 4, sparse=True), "have dense gradients, got 'extra"),
        (
            nn.MultiheadAttention(4, 1),
            "attend by F.scaled_dot_product_attention, got 'extra, a MultiheadAttention",
        ),
    ],
)
def test_models_that_mix_tokens_in_other_ways_are_refused(layer, match):
    model = long.long_model(depth=1)
    model.extra = layer.double()
    refused(match, model=model)


def with_entry(name, value):
    return {**long.batches(4)[0], name: value}


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        (
            long.batches(4, length=1)[0],
            "have at least one token for each of 2 ranks along cp, got 1",
        ),
        (
            with_entry("labels", torch.ones(4, 9, dtype=torch.long)),
            "have one length in all entries that wrap_cp cuts, got {'input_ids': 10, 'labels': 9",
        ),
        (
            with_entry("labels", torch.ones(4, dtype=torch.long)),
            "batch['labels'] must be a tensor with dimension 1, as dims of wrap_cp say, got 'shape [",
        ),
        ({"x": torch.ones(4, 9)}, "hold one of the entries that wrap_cp cuts"),
        (
            (torch.ones(4, 9), torch.ones(4, 9)),
            "be a mapping of names to tensors with wrap_cp, got",
        ),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batch, match):
    refused(re.escape(match), batch=batch, weight_fn=lambda batch: 1)


def test_a_rank_whose_rows_cannot_be_cut_stops_all():
    def run(state):
        batch = long.batches(2, length=10 if state.data.rank else 1)[0]
        model = long.long_model(depth=1)
        plan = af.Plan(long.loss_fn, model, ours.sgd(model.parameters()), af.count_labels("labels"))
        state, step = af.build(af.compose(af.wrap_ddp(), CUT)(plan), state)
        kind = "every rank must be able to count" if state.data.rank else "at least one token"
        with pytest.raises(ValueError, match=kind):
            step(state, batch)
        return True

    assert all(simulate(run, mesh=MESH))


@pytest.mark.parametrize("mesh", [{"cp": 2}, MESH], ids=str)
def test_weights_that_do_not_add_up_over_blocks_are_refused(mesh):
    match = (
        r"of the blocks of a sequence add up, got (4|2) for all and (4 \+ 4|2 \+ 2) for the blocks"
    )
    refused(match, mesh=mesh, weight_fn=af.count_samples)


def test_weights_that_do_not_add_up_are_refused_without_gradients():
    def run(state):
        model = long.long_model(depth=1)
        plan = af.Plan(long.loss_fn, model, ours.sgd(model.parameters()))
        state, step = af.build(af.compose(af.wrap_ddp(), CUT)(plan), state)
        step.forward(state, long.batches(4)[0])

    with pytest.raises(ValueError, match="weight_fn must count tokens"):
        simulate(run, mesh={"cp": 2})


def attending(**options):
    """Return a loss whose attention has these options."""

    def loss_fn(model, batch):
        hidden = model.embedding(batch["input_ids"])[:, None]
        keys = hidden[..., : options.get("num_keys", 99), :]
        others = {name: each for name, each in options.items() if name != "num_keys"}
        mixed = F.scaled_dot_product_attention(hidden, keys, keys, **others)
        return F.cross_entropy(model.head(mixed[:, 0]).flatten(0, 1), batch["labels"].flatten())

    return loss_fn


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dropout_p": 0.1}, "have attention without dropout, got dropout_p=0.1; set it to 0"),
        ({"num_keys": 3}, "among the 5 tokens of this rank's block, got 5 queries and 3 keys"),
        (
            {"attn_mask": torch.ones(5, 5, dtype=torch.bool)},
            "masks over the whole sequence, [..., 10, 10] or [..., 1, 10], got [5, 5]",
        ),
        (
            {"attn_mask": torch.ones(10, 10, dtype=torch.bool), "is_causal": True},
            "a mask or is_causal, got both",
        ),
    ],
)
def test_attention_that_is_not_that_of_the_block_is_refused(options, match):
    model = long.long_model(depth=0)
    model.places.requires_grad_(False)
    refused(re.escape(match), mesh={"cp": 2}, loss_fn=attending(**options), model=model)


def test_attention_is_of_a_kind_that_is_known():
    with pytest.raises(ValueError, match='attention must be "gather" or "ulysses"'):
        af.wrap_cp(long.DIMS, attention="ring")


def test_heads_that_the_ranks_do_not_divide_are_refused():
    recipe = af.compose(af.wrap_ddp(), af.wrap_cp(long.DIMS, attention="ulysses"))
    refused("must have heads that 4 ranks divide, got 2", mesh={"cp": 4}, recipe=recipe)


@pytest.mark.parametrize("shape", [(10, 10), (1, 10), (10,), (2, 1, 1, 10)], ids=str)
def test_a_mask_and_its_gradient_are_those_of_the_whole_sequence(shape):
    torch.manual_seed(0)
    bias = torch.randn(shape).double()

    def run(state):
        model = long.long_model(depth=0)
        model.places = nn.Parameter(bias.clone())

        def loss_fn(model, batch):
            return attending(attn_mask=model.places)(model, batch)

        _, report = step_once(
            state,
            af.compose(af.wrap_ddp(), CUT),
            model=model,
            loss_fn=loss_fn,
            batch=long.batches(2)[0],
        )
        return report.loss, model.state_dict()

    ((loss, expected),) = simulate(run, world_size=1)
    for found, actual in simulate(run, mesh={"cp": 2}):
        assert torch.allclose(found, loss, rtol=1e-12)
        ours.assert_close(actual, expected)


def test_a_sum_and_its_count_are_refused_with_a_repair_that_keeps_the_weights():
    def loss_fn(model, batch):
        loss, metrics = long.loss_fn(model, batch)
        return loss * metrics["right"][1], metrics["right"][1]

    match = r"loss_fn must return the mean over the tokens .* got \(sum, count\); divide the sum"
    refused(match, mesh={"cp": 2}, loss_fn=loss_fn)


def test_metrics_that_differ_by_block_are_refused():
    def loss_fn(model, batch):
        loss, metrics = long.loss_fn(model, batch)
        has_first = bool((batch["position_ids"] == 0).any())
        return loss, metrics if has_first else {}

    refused(
        "return the same metrics for every block of a sequence", mesh={"cp": 2}, loss_fn=loss_fn
    )


def test_draws_for_whole_rows_are_refused_in_the_loss():
    def run(state):
        def loss_fn(model, batch):
            af.draw(lambda generator: torch.rand(4, generator=generator), state)
            return long.loss_fn(model, batch)

        step_once(state, loss_fn=loss_fn)

    with pytest.raises(ValueError, match="draw: must be called in the loop where wrap_cp cuts"):
        simulate(run, mesh={"cp": 2})


DROPOUT = """
import json
import torch
import torch.nn.functional as F
import accel_fn as af
from tests.support import long_sequences as long
from tests.support import strategies as ours

def loss_fn(model, batch):
    loss, _ = long.loss_fn(model, batch)
    masks.append(F.dropout(torch.ones(4, 5), 0.5).flatten().tolist())
    return loss

found = []
with af.distributed(device="cpu", timeout_s=60, mesh={"cp": 2}) as state:
    for recipe in (af.compose(), af.checkpoint_activations()):
        masks = []
        af.seed_all(state)
        model = long.long_model()
        model.blocks[0].down = torch.nn.Sequential(model.blocks[0].down, torch.nn.Dropout(0.5))
        plan = af.Plan(loss_fn, model, ours.sgd(model.parameters()), af.count_labels("labels"))
        now, step = af.build(af.compose(af.wrap_ddp(), af.wrap_cp(long.DIMS), recipe)(plan), state, checks=())
        af.seed_all(state)
        now, report = step(now, long.batches(4)[0])
        after = torch.rand(()).item()
        found.append([masks, after, {name: each.tolist() for name, each in model.state_dict().items()}])
say(json.dumps([state.rank, found]))
"""


@pytest.mark.slow
def test_ranks_draw_masks_of_their_own_that_a_recomputation_repeats():
    ranks = dict(map(json.loads, launch(DROPOUT, num_processes=2).splitlines()))
    plain, again = zip(ranks[0], ranks[1], strict=True)
    for first, second in (plain, again):
        assert first[0] != second[0]  # masks of two blocks
        assert first[1:] == second[1:]  # draws after the step, and parameters
    for kept, computed in zip(plain, again, strict=True):
        assert kept == computed


CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_recomputation_in_a_thread_of_the_engine_sees_the_mode_around_the_backward(device):
    seen = []

    class Counting(TorchFunctionMode):
        def __torch_function__(self, fn, types, args=(), kwargs=None):
            seen.append(fn is F.scaled_dot_product_attention)
            return fn(*args, **(kwargs or {}))

    weight = nn.Parameter(torch.randn(1, 2, 3, 4, device=device))

    def attend(tensor):
        return F.scaled_dot_product_attention(tensor, tensor, tensor)

    with Counting():
        loss = checkpoint(attend, weight, use_reentrant=False).sum()
    assert sum(seen) == 1
    with Counting():
        run_backward(loss, None, [weight])
    assert sum(seen) == 2


def test_explain_names_the_blocks_and_the_check():
    def run(state):
        model = long.long_model(depth=1)
        plan = af.Plan(long.loss_fn, model, ours.sgd(model.parameters()), af.count_labels("labels"))
        state, step = af.build(af.compose(af.wrap_ddp(), CUT)(plan), state)
        step(state, long.batches(4)[0])
        return af.explain(step, state)

    for text in simulate(run, mesh={"cp": 2}):
        assert "the mean over the global batch, by wrap_ddp() and wrap_cp({'input_ids': 1" in text
        assert "the same rows along cp" in text
        assert (
            "cut        the loss of blocks of sequences is that of the whole one, in step" in text
        )
