"""Users' mistakes in a plan, and the errors for them: function, rule, value, repair."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

BATCH = (torch.ones(4, 3).double(), torch.ones(4, 1).double())


def make_plan(loss_fn=ours.mse, **options):
    model = ours.regression_model()
    return af.Plan(loss_fn, model, ours.sgd(model.parameters()), **options)


BOUNDS = (-1.0, 0.0, float("nan"), float("inf"), True, "1", None)
REFUSED = [  # error, text, function, argument values
    (ValueError, "clip: max_norm must be a finite number > 0, got", af.clip, BOUNDS),
    (TypeError, "clip: max_norm", af.clip, (True, "1", None)),
    (ValueError, "clip_value: max_value must be a finite number > 0, got", af.clip_value, BOUNDS),
    (
        ValueError,
        "accumulate: num_microbatches must be an integer >= 1, got",
        af.accumulate,
        (0, -2, 1.5, True, float("nan"), "2"),
    ),
    (
        TypeError,
        r'split must be a function .*, "rows" or None, got',
        lambda value: af.accumulate(2, split=value),
        (4, "columns", True),
    ),
    (
        ValueError,
        'with_amp: precision must be "no", "bf16", "fp16", "fp8"',
        af.with_amp,
        ("fp4", "float16", torch.float32, 16),
    ),
    (
        ValueError,
        "wrap_ddp: comm_hook must be one of",
        lambda v: af.wrap_ddp(comm_hook=v),
        ("int8",),
    ),
    (
        TypeError,
        "compose: transforms must be functions Plan -> Plan, got 3",
        partial(af.compose, af.clip(1.0)),
        (3,),
    ),
    (
        TypeError,
        "count_labels: key_or_path must be a key",
        af.count_labels,
        ((), True, 1.5, None, {"labels"}, (1.5,), ("labels", None)),
    ),
    (
        TypeError,
        "count_labels: ignore_index must be an integer, got",
        lambda value: af.count_labels("labels", ignore_index=value),
        ("pad", None, 1.5, True),
    ),
    (
        TypeError,
        "count_labels: class_weight must be a 1-d tensor or sequence of finite numbers >= 0, got",
        lambda value: af.count_labels("labels", class_weight=value),
        ("weights", ["a"], {1.0}, [1j]),
    ),
    (
        ValueError,
        "count_labels: class_weight must be a 1-d tensor or sequence of finite numbers >= 0, got",
        lambda value: af.count_labels("labels", class_weight=value),
        (3.0, [], [[1.0]], torch.ones(2, 2), [1.0, -1.0], [1.0, float("nan")], [float("inf")]),
    ),
    *[
        (
            TypeError,
            f"{name}: state must be a DistState, got .*; init, build and every",
            call,
            (3, None),
        )
        for name, call in [
            ("shard_loader", partial(af.shard_loader, DataLoader(range(4)))),
            ("prefetch", partial(af.prefetch, [1])),
            ("explain", lambda state: af.explain(make_plan(), state)),
        ]
    ],
    (
        TypeError,
        "explain: plan must be a Plan or a Step, got 'NoneType'",
        lambda plan: af.explain(plan, af.DistState()),
        (None,),
    ),
    (
        TypeError,
        "averaged: step must be what build gave, got 'Linear'",
        lambda step: af.averaged(step).__enter__(),
        (torch.nn.Linear(1, 1),),
    ),
    (TypeError, "latest: folder must be the path of a folder, got", af.latest, (None, 3)),
    (
        TypeError,
        "list_checkpoints: folder must be the path of a folder",
        af.checkpoint.list_checkpoints,
        (3,),
    ),
]
CALLS = [
    *[
        (error, text, partial(call, value))
        for error, text, call, values in REFUSED
        for value in values
    ],
    *[
        (ValueError, text, partial(af.with_amp, "fp16", **settings))
        for settings, text in [
            ({"init_scale": 0}, "init_scale must be a finite number > 0, got 0"),
            ({"growth_factor": 1.0}, "growth_factor must be > 1, got 1.0"),
            ({"backoff_factor": 1.0}, "backoff_factor must be < 1, got 1.0"),
            ({"growth_interval": 0}, "growth_interval must be an integer >= 1, got 0"),
        ]
    ],
    (
        ValueError,
        r"got 'bucket_cap'; did you mean bucket_cap_mb\?",
        partial(af.wrap_ddp, bucket_cap=5),
    ),
    (
        ValueError,
        "process_group must not be given; it comes from the state",
        partial(af.wrap_ddp, process_group=None),
    ),
]


@pytest.mark.parametrize(("error", "text", "call"), CALLS)
def test_a_bad_argument_is_refused_when_it_is_given(error, text, call):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("position", "text"),
    [
        (0, "loss_fn must be a function"),
        (1, "model must be an nn.Module"),
        (2, "optimizer must be a torch.optim.Optimizer"),
        (3, "weight_fn must be a function"),
    ],
)
def test_a_plan_is_made_of_its_four_parts(position, text):
    plan = make_plan()
    arguments = [plan.loss_fn, plan.model, plan.optimizer, plan.weight_fn]
    arguments[position] = 7
    with pytest.raises(TypeError, match=f"Plan: {text}.* got 7"):
        af.Plan(*arguments)


def own_parameters_too(plan):
    return replace(plan, strategy=(*plan.strategy, lambda state, module: module))


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (af.compose(af.wrap_ddp(), own_parameters_too), "strategy, got wrap_ddp.* and "),
        (af.compose(af.wrap_ddp(), af.wrap_ddp()), "strategy, got wrap_ddp"),
        (
            af.compose(af.accumulate(2), af.accumulate(3)),
            r"split, got .*2\) and .*3\); leave out one",
        ),
        (af.compose(af.place(), af.place()), "place_model"),
        (af.compose(af.with_amp("bf16"), af.with_amp("fp16")), "enter each context once"),
        (
            af.compose(af.wrap_ddp(static_graph=True), af.accumulate(2)),
            r"static_graph=True\) must not be combined with accumulate",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused_in_build_by_name(recipe, text):
    with pytest.raises(ValueError, match=text):
        af.build(recipe(make_plan()), af.DistState())


def test_float16_parameters_are_not_scaled():
    plan = ours.plan(model=ours.regression_model().half())
    with pytest.raises(ValueError, match=r"float16 0\.weight; use model\.float\(\)"):
        af.build(af.with_amp("fp16")(plan), af.DistState())


def test_two_steps_of_one_state_must_agree_on_the_loss_scale():
    state, _ = af.build(af.with_amp("fp16")(make_plan()), af.DistState())
    with pytest.raises(
        ValueError, match="with_amp must agree with the loss scale that the state has"
    ):
        af.build(af.with_amp("fp16", growth_interval=5)(make_plan()), state)


def test_a_model_without_trainable_parameters_is_refused():
    plan = make_plan()
    plan.model.requires_grad_(False)
    with pytest.raises(
        ValueError, match="must have parameters that require a gradient, got a Sequential"
    ):
        af.build(plan, af.DistState())


def test_an_optimizer_without_trainable_parameters_is_refused():
    model = ours.regression_model()
    model[0].weight.requires_grad_(False)
    plan = af.Plan(ours.mse, model, ours.sgd([model[0].weight]))
    with pytest.raises(
        ValueError, match="optimizer must hold a parameter that requires a gradient"
    ):
        af.build(plan, af.DistState())


def grow(plan):
    """Give the second layer to the optimizer too."""
    plan.optimizer.add_param_group({"params": list(plan.model[2].parameters())})


def unfreeze(plan):
    plan.model[0].bias.requires_grad_()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (grow, "hold the 2 parameters that build found in it, got 4; build again with after=step"),
        (unfreeze, r"must not require one, got 0\.bias; build again with after=step"),
    ],
)
@pytest.mark.parametrize(
    ("recipe", "world_size"),
    [
        (af.compose(), 1),
        (lambda plan: replace(plan, compile_step=(lambda state, whole: whole,)), 1),
        (af.wrap_ddp(), 2),
        (af.wrap_fsdp(), 2),
        (af.reproducible(2), 2),
    ],
)
def test_what_is_to_be_trained_is_settled_by_build(recipe, world_size, change, text):
    """Only the last rank changes it; the others must not wait for that rank."""

    def run(state):
        model = ours.regression_model()
        model[0].bias.requires_grad_(False)
        plan = recipe(af.Plan(ours.mse, model, ours.sgd(model[0].parameters())))
        state, step = af.build(plan, state)
        state, _ = step(state, BATCH)
        last = state.rank == world_size - 1
        if last:
            change(plan)
        with pytest.raises(ValueError, match=text if last else "able to count its batch"):
            step(state, BATCH)
        if not last:
            change(plan)

    simulate(run, world_size=world_size)


def test_as_many_other_parameters_are_not_those_that_build_found():
    plan = make_plan()
    state, step = af.build(plan, af.DistState())
    plan.model[0] = nn.Linear(3, 8).double()
    plan.optimizer.param_groups[0]["params"] = [*plan.model.parameters()]
    with pytest.raises(
        ValueError, match="that build found in it, got others; build again with after=step"
    ):
        step(state, BATCH)


def test_an_optimizer_that_evaluates_the_loss_again_is_refused():
    plan = ours.plan(optimizer=torch.optim.LBFGS)
    with pytest.raises(ValueError, match="must update from gradients alone, got LBFGS"):
        af.build(plan, af.DistState())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (lambda model, batch: 3.0, "0-dim floating-point tensor, got float"),
        (lambda model, batch: model(batch[0]), r"got torch.float64 \[4, 1\]"),
        (lambda model, batch: model(batch[0]).argmax(), r"got torch.int64 \[\]"),
        (lambda model, batch: (ours.mse(model, batch), [1]), "metrics as a mapping .*, got list"),
        (lambda model, batch: (ours.mse(model, batch), {}, 1), "tensor, got tuple"),
        (lambda model, batch: (1, {}), "tensor, got int"),
        (lambda model, batch: ours.mse(model, batch).detach(), "a loss with a graph"),
    ],
)
def test_a_loss_must_be_a_scalar_with_a_graph_on_every_rank_alike(world_size, loss_fn, text):
    def run(state):
        state, step = af.build(af.wrap_ddp()(make_plan(loss_fn)), state)
        with pytest.raises(ValueError, match=f"step: loss_fn must return .*{text}"):
            step(state, BATCH)

    simulate(run, world_size=world_size)


def grads_by_hand(model, batch):
    """The loss writes gradients itself, which DDP and so the other ranks never see."""
    loss = ours.mse(model, batch)
    parameters = list(model.parameters())
    for parameter, grad in zip(
        parameters, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True
    ):
        parameter.grad = grad
    return loss


def loss_on_copies(model, batch):
    """The loss calls functional_call on copies, so the model's own parameters get no gradient."""
    copies = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    return nn.functional.mse_loss(functional_call(model, copies, batch[0]), batch[1])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (grads_by_hand, "must leave .grad of the model's parameters alone"),
        (loss_on_copies, r"got no gradient for 0\.weight, 0\.bias.*no functional_call on copies"),
    ],
)
def test_gradients_out_of_reach_of_ddp_are_refused(world_size, loss_fn, text):
    def run(state):
        state, step = af.build(af.wrap_ddp()(make_plan(loss_fn)), state)
        with pytest.raises(ValueError, match=text):
            step(state, BATCH)

    simulate(run, world_size=world_size)


@pytest.mark.parametrize(
    ("recipe", "world_size", "hidden"),
    [
        (af.compose(), 1, True),
        (af.accumulate(2), 1, False),
        (af.reproducible(2), 1, True),
        (af.wrap_ddp(), 2, True),
        (af.wrap_ddp(), 2, False),
        (af.wrap_ddp(find_unused_parameters=True), 2, True),
        (af.wrap_fsdp(), 2, True),
        (af.wrap_fsdp(), 2, False),
    ],
)
def test_reentrant_checkpoints_are_refused_on_every_rank(recipe, world_size, hidden):
    """If no parameter comes before the checkpoint, the engine silently leaves out what is
    inside."""

    def loss_fn(model, batch):
        inputs = batch[0].clone().requires_grad_() if hidden else model[0](batch[0])
        inner = checkpoint(model[0] if hidden else model[1], inputs, use_reentrant=True)
        return nn.functional.mse_loss(model[2](inner), batch[1])

    def run(state):
        state, step = af.build(recipe(make_plan(loss_fn)), state)
        with pytest.raises(ValueError, match=r"must not use .*, got .*; use use_reentrant=False"):
            step(state, BATCH)

    simulate(run, world_size=world_size)


def test_a_reentrant_checkpoint_that_comes_later_is_refused_by_its_step():
    """If a gradient is missing that was there before, the step checks the graph again."""
    state, step = ours.built()
    state, _ = step(state, BATCH)
    forward = step.plan.model[0].forward

    def again(inputs):
        return checkpoint(forward, inputs.clone().requires_grad_(), use_reentrant=True)

    step.plan.model[0].forward = again
    with pytest.raises(ValueError, match="use_reentrant"):
        step(state, BATCH)


def test_an_empty_part_does_not_stand_for_the_graphs_to_come():
    def loss_fn(model, batch):
        inputs = batch[0].clone().requires_grad_()
        inner = checkpoint(model[0], inputs, use_reentrant=len(inputs) == 4)
        return nn.functional.mse_loss(model[2](inner), batch[1])

    state, step = af.build(make_plan(loss_fn), af.DistState())
    step(state, (BATCH[0][:0], BATCH[1][:0]))
    with pytest.raises(ValueError, match="use_reentrant"):
        step(state, BATCH)


class Branches(nn.Module):
    """A model that uses one of its two layers."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()

    def forward(self, inputs):
        return self.used(inputs)


def test_a_parameter_that_the_loss_misses_is_named_in_a_world_of_several():
    def run(state):
        state, step = ours.built(af.wrap_ddp(), state, model=Branches())
        with pytest.raises(ValueError, match=r"got no gradient for unused\.weight, unused\.bias"):
            step(state, BATCH)

    simulate(run, world_size=2)


def test_several_ranks_must_average_their_gradients():
    def run(state):
        with pytest.raises(
            ValueError, match=r"average gradients over the 2 ranks.*add wrap_ddp\(\)"
        ):
            af.build(make_plan(), state)

    simulate(run, world_size=2)


def test_ranks_must_build_the_same_plan():
    def run(state):
        recipe = af.compose(af.wrap_ddp(), af.clip(1.0 + state.rank))
        with pytest.raises(RuntimeError, match=r"clip\(2\.0\).* on rank 1 and .*clip\(1\.0\)"):
            af.build(recipe(make_plan()), state)

    simulate(run, world_size=2)


def breaks(state, result):
    """Make a slot function that fails only on the second rank."""
    if not state.is_main:
        raise OSError("broken here")
    return result


@pytest.mark.parametrize("name", ["state_dict", "load_state_dict"])
def test_a_function_that_can_be_saved_or_loaded_alone_is_refused(name):
    half = type("Half", (), {"__call__": lambda self, state, grads: grads, name: lambda self: {}})
    slot = (af.extend.Stateful(lambda state, plan: half()),)
    match = f"that has both state_dict and load_state_dict, or neither, got {name} alone, of Half"
    with pytest.raises(ValueError, match=match):
        af.build(replace(make_plan(), gradients=slot), af.DistState())


@pytest.mark.parametrize(
    "slot",
    [
        {"init_state": (lambda state: breaks(state, state),)},
        {"place_model": (breaks,)},
        {"after_update": (af.extend.Stateful(lambda state, plan: breaks(state, breaks)),)},
    ],
    ids=lambda slot: next(iter(slot)),
)
def test_what_fails_on_one_rank_while_a_step_is_built_fails_on_all(slot):
    """An example is a model that does not fit on one device."""

    def run(state):
        with pytest.raises((OSError, RuntimeError), match="broken here"):
            af.build(replace(af.wrap_ddp()(make_plan()), **slot), state)

    simulate(run, world_size=2)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (
            (torch.ones(4, 3), torch.ones(3, 1)),
            r"one leading dimension, got shapes \[\(4, 3\), \(3, 1\)\]",
        ),
        ({"name": "nothing"}, "must hold a tensor with a leading dimension, got dict"),
        (torch.tensor(1.0), "must hold a tensor with a leading dimension, got Tensor"),
    ],
)
def test_a_batch_that_cannot_be_counted_is_refused_on_every_rank(world_size, batch, text):
    """Only the last rank gets it; the others must not wait for that rank."""

    def run(state):
        state, step = af.build(af.wrap_ddp()(make_plan()), state)
        last = state.rank == world_size - 1
        rule = text if last else "every rank must be able to count its batch"
        with pytest.raises(ValueError, match=rule):
            step(state, batch if last else BATCH)

    simulate(run, world_size=world_size)


@pytest.mark.parametrize(
    "weight",
    [
        *(-1, float("nan"), float("inf"), 10**400, True, "4", None, 4j),
        *(torch.ones(2), torch.tensor(True), torch.tensor(-1), torch.tensor(float("nan"))),
        *(np.int64(-1), np.float32("nan"), np.float16("inf"), np.bool_(True), np.ones(2)),
    ],
    ids=lambda weight: repr(weight)[:20],
)
def test_a_weight_must_be_a_finite_count_on_every_rank(weight):
    def run(state):
        last = not state.is_main
        plan = make_plan(weight_fn=lambda batch: weight if last else 4)
        state, step = af.build(af.wrap_ddp()(plan), state)
        rule = "weight_fn must return" if last else "able to count its batch"
        with pytest.raises(ValueError, match=rule):
            step(state, BATCH)

    simulate(run, world_size=2)


def test_a_batch_of_a_class_that_torch_does_not_know_is_refused_with_the_repair():
    _, step = af.build(make_plan(), af.DistState())
    with pytest.raises(ValueError, match="got SimpleNamespace; register such a class with torc"):
        step(af.DistState(), SimpleNamespace(inputs=BATCH[0]))


@pytest.mark.parametrize(
    ("path", "batch", "text"),
    [
        ("labels", {"inputs": torch.ones(2)}, r"no 'labels', got \['inputs'\]"),
        (("target", 1), {"target": [torch.ones(2)]}, "no 1, got 'list'"),
        ("labels", {"labels": "none"}, "lead to a tensor of labels"),
    ],
)
def test_labels_that_are_not_there_are_named(path, batch, text):
    with pytest.raises(ValueError, match=text):
        af.count_labels(path)(batch)


def test_a_batch_that_is_lost_where_it_is_placed_is_refused():
    def forgetful(state, batch):
        batch[0].add_(0)

    state, step = af.build(replace(make_plan(), place_batch=(forgetful,)), af.DistState())
    for call in (step, step.forward):
        with pytest.raises(ValueError, match="must return the batch, got None from forgetful"):
            call(state, BATCH)


def test_a_transform_returns_a_plan():
    def forgetful(plan):
        af.clip(1.0)(plan)

    recipe = af.compose(af.accumulate(2), forgetful, af.clip(1.0))
    with pytest.raises(TypeError, match="return a Plan, forgetful does not, got 'NoneType'"):
        recipe(make_plan())


def test_a_gradient_transform_returns_gradients():
    def forgetful(state, grads):
        return grads.values()

    state, step = af.build(replace(make_plan(), gradients=(forgetful,)), af.DistState())
    with pytest.raises(TypeError, match="return Grads, forgetful does not, got 'tuple'"):
        step(state, BATCH)


def test_a_model_whose_shapes_are_not_known_yet_is_refused():
    plan = ours.plan(model=nn.Sequential(nn.LazyLinear(1)).double())
    with pytest.raises(
        ValueError, match=r"parameters with shapes, got 0\.weight without; call the"
    ):
        af.build(plan, af.DistState())


@pytest.mark.parametrize(("recipe", "world_size"), [(af.compose(), 1), (af.wrap_ddp(), 2)])
def test_parameters_that_are_frozen_after_build_are_named(recipe, world_size):
    def run(state):
        plan = recipe(make_plan())
        state, step = af.build(plan, state)
        plan.model[2].bias.requires_grad_(False)
        with pytest.raises(
            ValueError, match=r"must still do so, got 2\.bias; build again with after=step"
        ):
            step(state, BATCH)

    simulate(run, world_size=world_size)


@pytest.mark.parametrize("parts", [7, None, {"inputs": BATCH}, "ab", torch.ones(2, 3)])
def test_a_split_must_give_a_sequence_of_microbatches_on_every_rank(parts):
    def run(state):
        last = not state.is_main
        recipe = af.compose(af.wrap_ddp(), af.accumulate(2, split=lambda b: parts if last else [b]))
        state, step = af.build(recipe(make_plan()), state)
        rule = "step: split must return a sequence of micro-batches, got"
        with pytest.raises(ValueError, match=rule if last else "able to count its batch"):
            step(state, BATCH)

    simulate(run, world_size=2)


def test_a_state_of_another_world_is_refused():
    _, step = af.build(make_plan(), af.DistState())
    with pytest.raises(ValueError, match="step: state must be of the world it was built in"):
        step(af.DistState(rank=1, world_size=2), BATCH)
    for part in (step.forward, step.grads):
        with pytest.raises(ValueError, match="step: state must be of the world it was built in"):
            part(af.DistState(rank=1, world_size=2), BATCH)


@pytest.mark.parametrize("state", [BATCH, None, 0])
def test_a_value_that_is_no_state_is_refused(state):
    _, step = af.build(make_plan(), af.DistState())
    _, grads, report = step.grads(af.DistState(), BATCH)
    calls = {
        "step": lambda: step(state, af.DistState()),
        "forward": lambda: step.forward(state, af.DistState()),
        "grads": lambda: step.grads(state, af.DistState()),
        "update": lambda: step.update(state, grads, report),
        "evaluate": lambda: af.evaluate(step, state, [BATCH]),
        "predict": lambda: af.predict(step, state, [BATCH], lambda model, batch: batch[0]),
        "build": lambda: af.build(make_plan(), state),
    }
    for name, call in calls.items():
        function = name if name in ("evaluate", "predict", "build") else "step"
        with pytest.raises(TypeError, match=rf"{function}: state must be a DistState, got '\w+'; "):
            call()


def test_what_is_built_is_a_plan():
    with pytest.raises(TypeError, match="build: plan must be a Plan, got 'NamedTransform'"):
        af.build(af.clip(1.0), af.DistState())


def test_an_update_takes_what_the_gradients_were_given_with():
    state, step = af.build(make_plan(), af.DistState())
    _, grads, report = step.grads(state, BATCH)
    for given, text in (
        ((report, grads), "grads must be a Grads, as step.grads gives it, got 'Report'"),
        ((grads, None), "report must be a Report, as step.grads gives it, got 'NoneType'"),
        ((grads.tensors, report), "grads must be a Grads"),
        ((af.Grads(grads.tensors[:3]), report), "for each of 4 trained parameters, got 3"),
    ):
        with pytest.raises(ValueError, match=f"step.update: .*{text}"):
            step.update(state, *given)


def test_a_state_without_the_loss_scale_of_its_step_is_refused():
    _, step = af.build(af.with_amp("fp16")(make_plan()), af.DistState())
    with pytest.raises(ValueError, match="must carry a loss scale, got none; use the state"):
        step(af.DistState(), BATCH)


def local_gradients(plan):
    """A gradient function that forgets to average what it adds."""

    def wrap(grad_fn):
        def forgotten(state, batch):
            state, grads, report = grad_fn(state, batch)
            return state, grads.map(lambda value: value + state.rank), report

        return forgotten

    return replace(plan, wrap_grad_fn=(wrap,))


def local_noise(plan):
    """A gradient transform with different random numbers on each rank."""

    def noisy(state, grads):
        return grads.map(lambda value: value + state.rank)

    return replace(plan, gradients=(noisy,))


def local_factor(plan):
    """A gradient transform with a different factor on each rank."""

    def scaled(state, grads):
        return grads.scaled(torch.tensor(1.0 + state.rank).double())

    return replace(plan, gradients=(scaled,))


@pytest.mark.parametrize(
    ("transform", "what"),
    [(local_gradients, r"0\.weight"), (local_noise, r"0\.weight"), (local_factor, "the factor")],
)
def test_gradients_that_differ_by_rank_are_refused_on_every_rank_before_an_update(transform, what):
    def run(state):
        plan = transform(af.wrap_ddp()(make_plan()))
        state, step = af.build(plan, state)
        with pytest.raises(RuntimeError, match=f"equal on all ranks, {what} differs on rank 1"):
            step(state, BATCH)
        return plan.model.state_dict()

    for parameters in simulate(run, world_size=2):
        ours.assert_identical(parameters, ours.regression_model().state_dict())


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"rank": 2, "world_size": 2}, "rank must be in 0 .. world_size - 1 = 1, got 2"),
        ({"rank": -1}, "rank must be an integer >= 0, got -1"),
        ({"local_rank": 1}, "local_rank must be in 0 .. local_world_size - 1 = 0, got 1"),
        ({"world_size": 0}, "world_size must be an integer >= 1, got 0"),
        ({"local_world_size": 2.0}, "local_world_size must be an integer >= 1, got 2.0"),
        ({"rank": True, "world_size": 2}, "rank must be an integer >= 0, got True"),
        ({"step": -1}, "step must be an integer >= 0, got -1"),
        ({"rank": "1"}, "rank must be an integer >= 0, got '1'"),
        ({"seed": 0.5}, "seed must be an integer >= 0, got 0.5"),
    ],
)
def test_a_state_is_a_place_in_a_world(fields, text):
    with pytest.raises(ValueError, match=f"DistState: {text}"):
        af.DistState(**fields)
