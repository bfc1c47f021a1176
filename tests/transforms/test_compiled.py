"""compiled: its results, its number of graphs, and what it leaves unchanged."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate
from tests.laws.law07_scaling import scaled
from tests.support import strategies as ours
from tests.support.block_models import Block, stack
from tests.support.compilers import (
    compiles,
    looks_at_gradients,
    make_batches,
    make_plan,
    num_breaks,
    num_graphs,
    plain_sgd,
    run,
)

pytestmark = looks_at_gradients

TOGETHER = af.compose(af.accumulate(2), af.clip(0.5), scaled(1024.0, growth_interval=30))
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
IN_FLOAT16 = af.with_amp("fp16", init_scale=2.0**8, growth_interval=30)


@compiles
@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(
    ("recipe", "optimizer", "shorter", "expected", "skipped", "dtype"),
    [
        (af.compose(), ours.sgd, [5, 3], 2, [], torch.float64),
        # Two micro-batches of two sizes: first one of 4 and one of any size, then both of any size.
        (TOGETHER, ours.adamw, [7, 5, 11, 9], 3, [], torch.float64),
        (TOGETHER, ours.adamw, [6, 4], 2, [50], torch.float64),
        (
            af.compose(af.accumulate(2), af.clip(0.5), IN_FLOAT16),
            ours.sgd,
            [6, 4],
            2,
            [50],
            torch.float16,
        ),
    ],
    ids=["sgd", "uneven", "overflow", "fp16"],
)
def test_a_hundred_steps_take_one_graph_and_one_more_for_shorter_batches(
    recipe, optimizer, shorter, expected, skipped, dtype
):
    """The learning rate differs in every step; some batches are shorter, each by another number."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    eager, plan = (recipe(make_plan(ours.regression_model().to(wide), optimizer)) for _ in range(2))
    states = [af.build(each, af.DistState()) for each in (eager, af.compiled(scope="step")(plan))]
    graphs, breaks = num_graphs(), num_breaks()
    sizes = [size for each in shorter for size in (*[8] * 9, each)]
    not_applied = [], []
    for number, batch in enumerate(make_batches(*sizes, *[8] * (100 - len(sizes)))):
        inputs, targets = (each.to(wide) for each in batch)
        if number in skipped:
            inputs[0] = float("inf")
        for index, each in enumerate((eager, plan)):
            state, step = states[index]
            each.optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
            state, report = step(state, (inputs, targets))
            states[index] = state, step
            if not report.applied:
                not_applied[index].append(number)
    assert num_graphs() - graphs == expected
    assert num_breaks() == breaks
    assert not_applied == (skipped, skipped)
    # Under autocast, the rates add up to 0.052, ten times that with momentum. They multiply
    # gradients of at most 0.5, each right to a few roundings.
    bound = {} if dtype == wide else {"rtol": 0.0, "atol": 0.5 * torch.finfo(dtype).eps}
    ours.assert_close(plan.model.state_dict(), eager.model.state_dict(), **bound)


@compiles
def test_the_parts_of_a_compiled_step_run_without_the_compiler():
    plan = af.compiled(scope="step")(make_plan(optimizer=torch.optim.SGD))
    state, step = af.build(plan, af.DistState())
    graphs = num_graphs()
    batch = make_batches(8)[0]
    loss = step.forward(state, batch)
    _, grads, report = step.grads(state, batch)
    step.update(state, grads, report)
    assert loss == report.loss
    assert num_graphs() == graphs


@compiles
def test_a_run_of_compiled_steps_continues_from_a_checkpoint_with_the_same_bits(tmp_path):
    recipe = af.compose(af.clip(0.5), af.compiled(scope="step"))
    batches = make_batches(*[8] * 5)
    whole, stopped, resumed = (recipe(make_plan()) for _ in range(3))
    run(whole, batches)
    state, step, _ = run(stopped, batches[:3])
    af.save(step, state, tmp_path)
    state, step = af.build(resumed, af.DistState())
    state = af.load(step, state, tmp_path)
    for batch in batches[state.step :]:
        state, _ = step(state, batch)
    ours.assert_identical(resumed.model.state_dict(), whole.model.state_dict())
    kept, expected = resumed.optimizer.state_dict(), whole.optimizer.state_dict()
    torch.testing.assert_close(kept, expected, rtol=0, atol=0)


@compiles
def test_a_batch_that_weighs_nothing_is_a_gradient_of_zero():
    batches = [*make_batches(4, 4), (torch.zeros(0, 3).double(), torch.zeros(0, 1).double())]
    eager, plan = make_plan(), af.compiled(scope="step")(make_plan())
    run(eager, batches)
    _, _, reports = run(plan, batches)
    assert (reports[-1].loss, reports[-1].weight) == (0, 0)
    ours.assert_close(plan.model.state_dict(), eager.model.state_dict())


@compiles
@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_loss_is_one_graph_of_plain_keys_also_for_evaluation(mode):
    eager, plan = make_plan(), af.compiled(fullgraph=True, mode=mode)(make_plan())
    keys = list(plan.model.state_dict())
    batches = make_batches(4, 4, 4)
    run(eager, batches)
    graphs = num_graphs()
    state, step, _ = run(plan, batches)
    assert num_graphs() - graphs == 2  # the check of the machine, and the loss
    ours.assert_close(plan.model.state_dict(), eager.model.state_dict())
    assert list(plan.model.state_dict()) == keys
    assert torch.allclose(step.forward(state, batches[0]), ours.mse(plan.model, batches[0]))


@compiles
@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(
    "recipe",
    [
        af.compiled(scope="blocks", fullgraph=True),
        af.compose(af.checkpoint_activations(), af.compiled(scope="blocks")),
    ],
    ids=["alone", "checkpoint_activations"],
)
def test_blocks_are_compiled_once_with_plain_keys(recipe):
    model = stack()
    eager = make_plan(copy.deepcopy(model))
    plan = recipe(make_plan(model))
    keys = list(model.state_dict())
    batches = make_batches(4, 4, 4)
    run(eager, batches)
    graphs = num_graphs()
    run(plan, batches)
    assert num_graphs() - graphs == 2  # the check of the machine, and all three blocks
    assert list(model.state_dict()) == keys
    ours.assert_close(model.state_dict(), eager.model.state_dict())


@compiles
@pytest.mark.usefixtures("forgetful")
def test_blocks_of_more_widths_than_torch_keeps_graphs_for_are_all_compiled():
    """A network with many resolutions has such blocks."""
    widths = [*range(3, 13), 1]
    model = nn.Sequential(*map(nn.Linear, widths, widths[1:])).double()
    plan = af.compiled(scope="blocks")(make_plan(model))
    state, step = af.build(plan, af.DistState())
    graphs = num_graphs()
    step(state, make_batches(4)[0])
    assert num_graphs() - graphs == len(model)


class Reading(Block):
    """A block that reads a tensor on the host, which breaks a graph."""

    def forward(self, inputs):
        return super().forward(inputs) if inputs.isfinite().all() else inputs


def reading_loss(model, batch):
    loss = ours.mse(model, batch)
    return loss if loss.isfinite() else loss * 2


BREAKS = {"loss": (Block, reading_loss), "block": (Reading, ours.mse)}
"""The place of a graph break: in the loss outside of the model, or inside each block."""


@compiles
@pytest.mark.parametrize(
    ("scope", "place"), [("loss", "loss"), ("loss", "block"), ("blocks", "block")]
)
def test_fullgraph_refuses_a_break_in_the_first_step(scope, place):
    block, loss_fn = BREAKS[place]
    plan = af.compiled(scope=scope, fullgraph=True)(make_plan(stack(block=block), loss_fn=loss_fn))
    state, step = af.build(plan, af.DistState())
    with pytest.raises(torch._dynamo.exc.Unsupported):
        step(state, make_batches(4)[0])


@compiles
@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(
    ("scope", "place", "fullgraph"),
    [("loss", "loss", False), ("blocks", "block", False), ("blocks", "loss", True)],
)
def test_a_break_that_is_allowed_trains_the_same(scope, place, fullgraph):
    """Outside of the compiled part, the read is no break."""
    block, loss_fn = BREAKS[place]
    eager, plan = (make_plan(stack(block=block), loss_fn=loss_fn) for _ in range(2))
    batches = make_batches(4, 4, 4)
    run(eager, batches)
    state, step = af.build(af.compiled(scope=scope, fullgraph=fullgraph)(plan), af.DistState())
    graphs, breaks = num_graphs(), num_breaks()
    for batch in batches:
        state, _ = step(state, batch)
    ours.assert_close(plan.model.state_dict(), eager.model.state_dict())
    assert num_graphs() > graphs
    assert (num_breaks() > breaks) == (not fullgraph)


@compiles
@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(
    ("scope", "dynamic", "expected"),
    [("loss", True, 1), ("blocks", False, 3), ("step", None, 2), ("step", True, 1)],
)
def test_dynamic_sets_how_many_graphs_three_batch_sizes_take(scope, dynamic, expected):
    plan = af.compiled(scope=scope, dynamic=dynamic)(make_plan(stack(), plain_sgd))
    state, step = af.build(plan, af.DistState())
    graphs = num_graphs()
    for batch in make_batches(8, 6, 4):
        state, _ = step(state, batch)
    assert num_graphs() - graphs == expected


OF_MODES = {name for mode in MODES for name in torch._inductor.list_mode_options(mode)}


@pytest.mark.parametrize(
    ("scope", "mode"), [("loss", MODES[1]), ("blocks", MODES[2]), ("step", MODES[3])]
)
def test_a_mode_reaches_the_compiler_as_its_options(scope, mode, monkeypatch):
    """The effect of a mode is not visible on every machine: CUDA graphs exist only on CUDA."""
    asked = []

    def compile_nothing(fn, **settings):
        if "dynamic" in settings:  # only training is compiled with these options
            asked.append(settings["options"])
        return fn

    monkeypatch.setattr(torch, "compile", compile_nothing)
    plan = af.compiled(scope=scope, mode=mode)(make_plan(stack(), plain_sgd))
    state, step = af.build(plan, af.DistState())
    if scope != "step":  # these are compiled once they are called
        step(state, make_batches(4)[0])
    [options] = asked
    of_mode = {name: value for name, value in options.items() if name in OF_MODES}
    assert of_mode == torch._inductor.list_mode_options(mode)


@compiles
def test_more_models_than_torch_keeps_graphs_for_are_compiled_all_the_same():
    """torch counts graphs by the code that they were made of, and stops at 8."""
    batches = make_batches(4)
    for number in range(10):
        graphs = num_graphs()
        run(af.compiled(fullgraph=True)(make_plan(ours.regression_model(number))), batches)
        assert num_graphs() > graphs


@compiles
@pytest.mark.parametrize("optimizer", [ours.adamw, plain_sgd])
def test_what_comes_after_a_compiled_step_comes_after_it(optimizer):
    """A schedule and an average of the parameters come after the step."""
    recipe = af.compose(af.schedule(lambda num_updates: 1 / (num_updates + 1)), af.ema(0.5))
    batches = make_batches(4, 4, 4)
    found = []
    for each in (recipe, af.compose(recipe, af.compiled(scope="step"))):
        plan = each(make_plan(optimizer=optimizer))
        _, step, _ = run(plan, batches)
        with af.averaged(step):
            means = {f"mean {name}": v.clone() for name, v in plan.model.state_dict().items()}
        rate = torch.tensor(plan.optimizer.param_groups[0]["lr"])
        found.append({**plan.model.state_dict(), **means, "rate": rate})
    ours.assert_close(found[1], found[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA, for its graphs")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # as torch warms it up
@pytest.mark.parametrize("scope", ["loss", "blocks", "step"])
def test_cuda_graphs_are_captured_and_compute_the_same_and_keep_reports(scope, monkeypatch):
    calls = Counter()

    def count(name):
        call = getattr(torch.cuda.CUDAGraph, name)

        def counted(graph, *args, **kwargs):
            calls[name] += 1
            return call(graph, *args, **kwargs)

        monkeypatch.setattr(torch.cuda.CUDAGraph, name, counted)

    count("capture_begin")
    count("replay")
    ends = []
    for recipe in (af.compose(), af.compiled(scope=scope, mode="reduce-overhead")):
        assert not calls
        plan = make_plan(optimizer=lambda p: torch.optim.AdamW(p, lr=0.05, capturable=True))
        state, step = af.build(af.compose(af.place(), recipe)(plan), af.init())
        reports = []
        for batch in make_batches(4)[:1] * 12:
            state, report = step(state, batch)
            reports.append(report)
        ends.append([float(report.loss) for report in reports])
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)
    assert calls["capture_begin"] >= 1
    assert calls["replay"] >= 6  # all but the first few of the 12 steps


@compiles
def test_simulated_ranks_leave_the_compiler_of_their_process_on():
    """The first step runs the model uncompiled, in the thread of its rank."""

    def train(state):
        state, step = af.build(af.compose(af.wrap_ddp(), af.compiled())(make_plan()), state)
        step(state, make_batches(4)[0])

    simulate(train, world_size=2)
    graphs = num_graphs()
    torch.compile(lambda values: values + 1, backend="eager")(torch.ones(2))
    assert num_graphs() - graphs == 1
