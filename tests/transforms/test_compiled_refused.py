"""compiled refuses what it cannot compile: when it is called, in build, or in the first step."""

import copy
import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch_optimizer
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate
from accel_fn.testing.internals import check_fits_in_graph, kept_gradients
from tests.support import strategies as ours
from tests.support.compilers import (
    compiles,
    looks_at_gradients,
    make_batches,
    make_plan,
    needs_compiler,
    plain_sgd,
    run,
)
from tests.transforms.test_compiled_follows import compile_guards

pytestmark = looks_at_gradients

NO_COMPILER = """
import json, sys, torch
import accel_fn as af
from tests.support import strategies as ours

model = ours.regression_model()
plan = af.compiled(scope=sys.argv[1])(af.Plan(ours.mse, model, ours.adamw(model.parameters())))
try:
    af.build(plan, af.DistState())
except ValueError as error:
    print(json.dumps(str(error)))
"""


def test_a_torch_below_a_path_with_a_space_is_refused_before_training(monkeypatch):
    monkeypatch.setattr(torch, "__file__", "/home/a user/torch/__init__.py")
    with pytest.raises(ValueError, match="below a path without a space, got /home/a user/torch"):
        af.build(af.compiled()(make_plan()), af.DistState())


@pytest.mark.slow
@pytest.mark.skipif(" " in torch.__file__, reason="refused before the compiler is tried")
@pytest.mark.parametrize("scope", ["loss", "blocks", "step"])
def test_a_machine_without_a_compiler_is_refused_before_training(scope, tmp_path):
    environment = {
        **os.environ,
        "CXX": str(tmp_path / "none"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", NO_COMPILER, scope],
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    text = json.loads(done.stdout)
    assert text.startswith("build: compiled must have a compiler for cpu on this machine, got ")
    assert "No working C++ compiler found" in text
    assert text.endswith("or leave out compiled")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"scope": "model"}, "compiled: scope must be one of loss, blocks, step, got 'model'"),
        ({"mode": "fast"}, "compiled: mode must be one of default, .*, got 'fast'"),
        ({"fullgraph": None}, "compiled: fullgraph must be True or False, got None"),
        ({"dynamic": "yes"}, "compiled: dynamic must be True, False or None, got 'yes'"),
    ],
)
def test_unknown_settings_are_refused_when_given(settings, text):
    with pytest.raises(ValueError, match=text):
        af.compiled(**settings)


@pytest.mark.parametrize(
    ("scopes", "text"),
    [
        (("loss", "blocks"), "have at most one function in compile_loss, got compiled.*blocks"),
        (("step", "step"), "have at most one function in compile_step, got compiled"),
    ],
)
def test_compiling_twice_is_refused(scopes, text):
    plan = af.compose(*[af.compiled(scope=scope) for scope in scopes])(make_plan())
    with pytest.raises(ValueError, match=f"build: plan must {text}.*leave out one"):
        af.build(plan, af.DistState())


def test_a_whole_step_of_several_ranks_is_refused():
    def refused(state):
        recipe = af.compose(af.wrap_ddp(), af.compiled(scope="step"))
        with pytest.raises(ValueError, match="must have a world of one, got 2 ranks") as raised:
            af.build(recipe(make_plan()), state)
        return str(raised.value)

    for text in simulate(refused, world_size=2):
        assert text.endswith('use scope="loss"')


def twice(plan):
    def compute_twice(grad_fn):
        return grad_fn

    return replace(plan, wrap_grad_fn=(compute_twice,))


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (twice, "compute_twice"),
        (af.freeze("0.weight", until=3), "freeze"),
        (af.skip_nonfinite(), "skip_nonfinite"),
        (af.accumulate("auto"), "accumulate"),
        (af.compiled(), "compiled"),
    ],
)
def test_a_whole_step_with_what_is_in_no_graph_is_refused(recipe, name):
    plan = af.compose(recipe, af.compiled(scope="step"))(make_plan())
    text = rf"must hold all from micro-batches to the update, got .*{name}.*; leave it out, or"
    with pytest.raises(ValueError, match=text):
        af.build(plan, af.DistState())


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        (lambda plan: plan.optimizer.register_step_pre_hook(print), "AdamW.step"),
        (lambda plan: plan.optimizer.register_step_post_hook(print), "AdamW.step"),
        (lambda plan: plan.model[0].weight.register_hook(print), "0.weight"),
        (lambda plan: plan.model[2].bias.register_post_accumulate_grad_hook(print), "2.bias"),
    ],
)
def test_a_whole_step_with_hooks_that_no_graph_calls_is_refused(hook, name):
    plan = af.compiled(scope="step")(make_plan())
    hook(plan)
    text = f"must have an optimizer and parameters without hooks, .* got those of {name}; remove"
    with pytest.raises(ValueError, match=text):
        af.build(plan, af.DistState())


@pytest.mark.parametrize("options", [{"param_dtype": torch.bfloat16}, {"offload": True}])
def test_a_whole_step_with_shards_on_one_rank_is_refused(options):
    plan = af.compose(af.wrap_fsdp(blocks="0", **options), af.compiled(scope="step"))(make_plan())
    [name] = options
    text = rf'wrap_fsdp\({name}\) must not be used with compiled\(scope="step"\), .*; leave it out'
    with pytest.raises(ValueError, match=text):
        af.build(plan, af.DistState())


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (torch.optim.SparseAdam, "SparseAdam does not support dense gradients"),
        (torch.optim.Adafactor, "Could not guard on data-dependent"),
        (torch_optimizer.AdaBelief, "it counts in Python's numbers"),
        (torch_optimizer.Lookahead, "it runs another optimizer"),
    ],
)
def test_an_optimizer_that_fits_into_no_graph_is_refused_by_name(kind, reason, monkeypatch):
    monkeypatch.setattr(torch, "compile", compile_guards)

    def make(parameters):
        around = kind is torch_optimizer.Lookahead
        return kind(torch.optim.SGD(parameters, lr=0.1) if around else parameters)

    plan = af.compiled(scope="step")(make_plan(optimizer=make))
    name = type(plan.optimizer).__name__
    text = rf"must have an optimizer that fits into a graph, got {name}: {reason}.*such as AdamW"
    before = copy.deepcopy(plan.model.state_dict())
    with pytest.raises(ValueError, match=text):
        af.build(plan, af.DistState())
    ours.assert_identical(plan.model.state_dict(), before)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, "capturable=True or fused=True"), (torch.optim.NAdam, "capturable=True")],
)
def test_an_optimizer_that_counts_on_the_host_is_refused_with_the_options_that_it_has(
    kind, options
):
    """The meta device stands for an accelerator: it is no CPU, and nothing is computed."""
    optimizer = kind(ours.regression_model().parameters())
    text = (
        f'got {kind.__name__}: it counts on the host; make it with {options}, or use scope="loss"'
    )
    with pytest.raises(ValueError, match=f"{re.escape(text)}$"):
        check_fits_in_graph(optimizer, torch.device("meta"))


def test_a_model_without_repeated_blocks_is_refused():
    text = r"must find modules of one class repeated in .*, got none; use scope=\"loss\""
    with pytest.raises(ValueError, match=text):
        af.build(af.compiled(scope="blocks")(make_plan(nn.Linear(3, 1).double())), af.DistState())


@compiles
def test_a_loss_that_breaks_the_graph_is_refused_by_the_step():
    def loss_fn(model, batch):
        return ours.mse(model, batch) * float(batch[0].sum() > 0)

    plan = af.compiled(scope="step")(make_plan(optimizer=torch.optim.SGD, loss_fn=loss_fn))
    state, step = af.build(plan, af.DistState())
    with pytest.raises(
        ValueError, match=r'must hold the step in one graph, got .*; use scope="los'
    ):
        step(state, make_batches(4)[0])


def penalized(model, batch):
    inputs = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return ours.mse(model, batch) + (slope.norm(dim=1) - 1).square().mean()


def penalized_by_func(model, batch):
    slope = torch.func.grad(lambda inputs: model(inputs).sum())(batch[0])
    return ours.mse(model, batch) + (slope.norm(dim=1) - 1).square().mean()


@compiles
@pytest.mark.parametrize(
    ("scope", "text"),
    [
        ("loss", "compiled must have a loss_fn without gradients of gradients, got one that calls"),
        ("blocks", "compiled must have a loss_fn without gradients of gradients, got one that"),
        ("step", "must hold the step in one graph, got .*torch.autograd.grad.*"),
    ],
)
def test_a_gradient_penalty_is_refused_and_what_the_message_advises_is_the_plain_step(scope, text):
    batches, recipe = make_batches(4, 4, 4), af.compiled(scope=scope)
    with pytest.raises(ValueError, match=f"step: .*{text}.*; call torch.func.grad, or leave out"):
        run(recipe(make_plan(loss_fn=penalized)), batches)
    ends = [make_plan(loss_fn=penalized), recipe(make_plan(loss_fn=penalized_by_func))]
    for plan in ends:
        run(plan, batches)
    ours.assert_close(ends[1].model.state_dict(), ends[0].model.state_dict())


@compiles
def test_a_parameter_that_only_later_batches_reach_is_refused_by_the_step():
    def loss_fn(model, batch):
        used = model["late"] if len(batch[0]) == 5 else model["early"]
        return ours.mse(used, batch)

    model = nn.ModuleDict({"early": ours.regression_model(), "late": ours.regression_model(1)})
    plan = af.compiled(scope="step")(make_plan(model, loss_fn=loss_fn))
    state, step, _ = run(plan, make_batches(4, 4))
    with pytest.raises(ValueError, match="loss_fn reaches a parameter that it did not at first"):
        step(state, make_batches(5)[0])


@compiles
@pytest.mark.usefixtures("forgetful")
def test_more_graphs_than_torch_keeps_are_an_error():
    plan = af.compiled(scope="step", dynamic=False)(make_plan(optimizer=plain_sgd))
    text = (
        r"must fit into the 1 graphs .* another batch size.*; use dynamic=True, batches of one size"
    )
    with torch._dynamo.config.patch(recompile_limit=1):
        state, step, _ = run(plan, make_batches(4))
        with pytest.raises(ValueError, match=text):
            step(state, make_batches(5)[0])


@pytest.mark.parametrize(
    ("adding", "scope", "mode"),
    [
        (af.accumulate(2), "loss", "reduce-overhead"),
        (af.accumulate("auto"), "blocks", "reduce-overhead"),
        (af.reproducible(2), "loss", "max-autotune"),
    ],
    ids=str,
)
def test_cuda_graphs_are_refused_where_gradients_of_several_runs_are_added_up(adding, scope, mode):
    plan = af.compose(af.place(), af.compiled(scope=scope, mode=mode), adding)(make_plan())
    text = (
        rf"^build: compiled\(mode='{mode}'\) must have one backward a step, since the next run of a CUDA "
        rf"graph overwrites gradients, got {re.escape(str(adding))}; use "
        r'mode="max-autotune-no-cudagraphs", or scope="step"$'
    )
    with pytest.raises(ValueError, match=text):
        af.build(plan, af.DistState(device="cuda"))


@pytest.mark.parametrize(
    ("device", "recipe"),
    [
        ("cuda", af.compiled(mode="reduce-overhead")),
        ("cuda", af.compose(af.compiled(mode="reduce-overhead"), af.accumulate(1, split="rows"))),
        ("cuda", af.compose(af.compiled(mode="max-autotune-no-cudagraphs"), af.accumulate(2))),
        ("cpu", af.compose(af.compiled(mode="reduce-overhead"), af.accumulate(2))),
    ],
)
def test_modes_are_taken_where_no_cuda_graph_overwrites_a_gradient(device, recipe):
    plan = recipe(make_plan())
    [slot] = plan.compile_loss
    slot.validate(af.DistState(device=device), plan)


@pytest.mark.parametrize(("mode", "copies"), [("default", False), ("reduce-overhead", True)])
def test_gradients_are_copied_where_they_may_be_memory_of_a_cuda_graph(mode, copies):
    plan, grads = af.compiled(mode=mode)(make_plan()), af.Grads([torch.ones(2), None])
    kept = kept_gradients(af.DistState(), plan, grads)
    assert (kept.tensors[0] is not grads.tensors[0]) == copies
    assert kept.tensors[0].tolist() == [1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA, for its graphs")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # as torch warms it up
def test_gradients_of_a_cuda_graph_are_kept_by_the_next_run():
    recipe = af.compose(af.place(), af.compiled(mode="reduce-overhead"))
    state, step = af.build(recipe(make_plan()), af.init())
    for batch in make_batches(4)[:1] * 3:  # the third run replays the graph
        state, grads, _ = step.grads(state, batch)
    kept = [each.clone() for each in grads.tensors]
    step.grads(state, tuple(2 * each for each in batch))
    torch.testing.assert_close(list(grads.tensors), kept, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CUDA, where counts may be elsewhere"
)
@pytest.mark.parametrize(
    "options", [{"capturable": True}, {"fused": True}], ids=["capturable", "fused"]
)
def test_an_optimizer_refused_for_counting_on_the_host_is_taken_as_the_message_advises(options):
    def built(**options):
        optimizer = functools.partial(torch.optim.AdamW, lr=0.05, **options)
        recipe = af.compose(af.place(), af.compiled(scope="step"))
        return af.build(recipe(make_plan(optimizer=optimizer)), af.init())

    with pytest.raises(
        ValueError, match="it counts on the host; make it with capturable=True or fused"
    ):
        built()
    state, step = built(**options)
    state, report = step(state, make_batches(4)[0])
    assert bool(report.applied)
