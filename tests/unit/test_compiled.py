"""compiled: what it computes, how many graphs it takes, what it leaves alone, and what it refuses."""

import copy
import functools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import torch_optimizer
from torch import nn
from torch._dynamo.utils import counters

import accel_fn as af
from accel_fn._capturing import keeps_tensors
from accel_fn._compiling import MODES, moving_guards
from accel_fn.testing import simulate
from accel_fn.transforms import _compilation
from tests import strategies as ours
from tests.compilers import compiles
from tests.properties.test_scaling import scaled
from tests.stacks import Block, stack

# torch's compiler looks at the gradients of tensors that have none.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

GENERATOR = torch.Generator().manual_seed(0)
FACTOR, measured = 1.0, F.mse_loss


def scaled_loss(model, batch):
    return measured(model(batch[0]), batch[1]) * FACTOR


def make_batches(*sizes):
    return [
        (
            torch.randn(size, 3, generator=GENERATOR).double(),
            torch.randn(size, 1, generator=GENERATOR).double(),
        )
        for size in sizes
    ]


def make_plan(model=None, optimizer=ours.adamw, loss_fn=ours.mse):
    model = model or ours.regression_model()
    return af.Plan(loss_fn, model, optimizer(model.parameters()))


def plain_sgd(parameters):
    """It remembers nothing, so that even its first update is compiled."""
    return torch.optim.SGD(parameters, lr=0.05)


def run(plan, batches):
    state, step = af.build(af.DistState(), plan)
    reports = []
    for batch in batches:
        state, report = step(state, batch)
        reports.append(report)
    return state, step, reports


def num_graphs():
    return counters["stats"]["unique_graphs"]


def num_breaks():
    return sum(counters["graph_break"].values())


@pytest.fixture
def forgetful():
    """torch remembers which shapes have varied, by where the code stands."""
    torch._dynamo.reset()


TOGETHER = af.compose(af.accumulate(2), af.clip(0.5), scaled(1024.0, growth_interval=30))
IN_FLOAT16 = af.with_amp("fp16", init_scale=2.0**8, growth_interval=30)


@compiles
@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(
    ("recipe", "optimizer", "shorter", "expected", "skipped", "dtype"),
    [
        (af.compose(), ours.adamw, [5, 3], 2, [], torch.float64),
        (af.compose(), ours.sgd, [5, 3], 2, [], torch.float64),
        (TOGETHER, ours.adamw, [6, 4], 2, [], torch.float64),
        # Two micro-batches of two sizes: of 4, which is known, and of any; then of any two.
        (TOGETHER, ours.adamw, [7, 5, 11, 9], 3, [], torch.float64),
        (TOGETHER, ours.adamw, [6, 4], 2, [50], torch.float64),
        (af.compose(TOGETHER, af.with_amp("bf16")), ours.sgd, [6, 4], 2, [50], torch.bfloat16),
        (
            af.compose(af.accumulate(2), af.clip(0.5), IN_FLOAT16),
            ours.sgd,
            [6, 4],
            2,
            [50],
            torch.float16,
        ),
    ],
    ids=["adamw", "sgd", "together", "uneven", "overflow", "bf16", "fp16"],
)
def test_a_hundred_steps_take_one_graph_and_one_more_for_shorter_batches(
    recipe, optimizer, shorter, expected, skipped, dtype
):
    """The learning rate is another in every step; some batches are shorter, each by another number."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    eager, plan = (recipe(make_plan(ours.regression_model().to(wide), optimizer)) for _ in range(2))
    states = [af.build(af.DistState(), each) for each in (eager, af.compiled(scope="step")(plan))]
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
    # Under autocast, rates that add up to 0.052, tenfold with momentum, times gradients of at most
    # 0.5, each right to a few roundings.
    bound = {} if dtype == wide else {"rtol": 0.0, "atol": 0.5 * torch.finfo(dtype).eps}
    ours.assert_close(plan.model.state_dict(), eager.model.state_dict(), **bound)


@compiles
@pytest.mark.parametrize("scope", ["loss", "blocks", "step"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_compiled_step_under_autocast_is_the_step_to_the_rounding_of_its_dtype(precision, scope):
    """In float16, the third batch overflows."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]

    def loss_fn(model, batch):
        output = model(batch[0])
        assert output.dtype == dtype
        return nn.functional.mse_loss(output.float(), batch[1])

    batches = [tuple(each.float() for each in batch) for batch in make_batches(*[8] * 6)]
    batches[2] = batches[2][0] * 1e6, batches[2][1]
    if precision == "bf16":
        del batches[2]
    ends = []
    for compiling in (af.compose(), af.compiled(scope=scope)):
        plan = make_plan(ours.regression_model().float(), ours.sgd, loss_fn)
        autocast = af.with_amp(precision, init_scale=2.0**8)
        recipe = af.compose(af.accumulate(2), af.clip(0.5), autocast, compiling)
        state, _, reports = run(recipe(plan), batches)
        scale = None if state.scaler is None else float(state.scaler.scale)
        ends.append(([bool(each.applied) for each in reports], scale, plan.model.state_dict()))
    assert ends[0][:2] == ends[1][:2]
    assert ends[1][0] == [index != 2 or precision == "bf16" for index in range(len(batches))]
    # Five updates, with momentum, of 0.05 times gradients of at most 0.5, each right to a few roundings.
    ours.assert_close(ends[1][2], ends[0][2], rtol=0.0, atol=0.5 * torch.finfo(dtype).eps)


@compiles
@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_the_same_and_has_nothing_to_say(mode, capfd):
    """Not every mode can be called from C++, and a large matrix has its numbers computed apart."""
    batches, ends = make_batches(8, 8, 8, 8), []
    for recipe in (af.compose(), af.compiled(scope="step", mode=mode)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 512), nn.Tanh(), nn.Linear(512, 1)).double()
        plan = af.compose(af.accumulate(2), af.clip(0.1), recipe)(make_plan(model))
        _, _, reports = run(plan, batches)
        ends.append(([float(each.loss) for each in reports], model.state_dict()))
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-6)
    ours.assert_close(ends[0][1], ends[1][1])
    assert capfd.readouterr().err == ""


@compiles
def test_the_parts_of_a_compiled_step_run_without_the_compiler():
    plan = af.compiled(scope="step")(make_plan(optimizer=torch.optim.SGD))
    state, step = af.build(af.DistState(), plan)
    graphs = num_graphs()
    batch = make_batches(8)[0]
    loss = step.forward(state, batch)
    _, grads, report = step.grads(state, batch)
    step.update(state, grads, report)
    assert loss == report.loss
    assert num_graphs() == graphs


@compiles
def test_a_run_of_compiled_steps_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path):
    recipe = af.compose(af.clip(0.5), af.compiled(scope="step"))
    batches = make_batches(*[8] * 5)
    whole, stopped, resumed = (recipe(make_plan()) for _ in range(3))
    run(whole, batches)
    state, step, _ = run(stopped, batches[:3])
    af.save(tmp_path, state, step)
    state, step = af.build(af.DistState(), resumed)
    state = af.load(tmp_path, state, step)
    for batch in batches[state.step :]:
        state, _ = step(state, batch)
    ours.assert_identical(resumed.model.state_dict(), whole.model.state_dict())
    kept, expected = resumed.optimizer.state_dict(), whole.optimizer.state_dict()
    torch.testing.assert_close(kept, expected, rtol=0, atol=0)


@compiles
@pytest.mark.parametrize("scope", ["loss", "blocks", "step"])
def test_a_run_goes_on_where_it_is_compiled_and_where_it_is_no_more(tmp_path, scope):
    model, batches = stack(), make_batches(*[4] * 6)
    whole = make_plan(copy.deepcopy(model))
    run(whole, batches)
    for recipe, stop in ((af.compose(), 2), (af.compiled(scope=scope), 4), (af.compose(), 6)):
        plan = recipe(make_plan(copy.deepcopy(model)))
        state, step = af.build(af.DistState(), plan)
        if af.latest(tmp_path):
            state = af.load(tmp_path, state, step)
        for batch in batches[state.step : stop]:
            state, _ = step(state, batch)
        af.save(tmp_path, state, step)
    ours.assert_close(plan.model.state_dict(), whole.model.state_dict())


@compiles
def test_a_batch_that_weighs_nothing_is_a_gradient_of_zero():
    batches = [*make_batches(4, 4), (torch.zeros(0, 3).double(), torch.zeros(0, 1).double())]
    eager, plan = make_plan(), af.compiled(scope="step")(make_plan())
    run(eager, batches)
    _, _, reports = run(plan, batches)
    assert (reports[-1].loss, reports[-1].weight) == (0, 0)
    ours.assert_close(plan.model.state_dict(), eager.model.state_dict())


@compiles
def test_frozen_and_unused_parameters_stay_as_they_are():
    def start():
        model = nn.ModuleDict({"used": ours.regression_model(), "unused": ours.regression_model(1)})
        model["used"][0].bias.requires_grad_(False)
        return model

    def loss_fn(model, batch):
        return ours.mse(model["used"], batch)

    batches = make_batches(4, 4, 4)
    eager = make_plan(start(), loss_fn=loss_fn)
    plan = af.compiled(scope="step")(make_plan(start(), loss_fn=loss_fn))
    run(eager, batches)
    run(plan, batches)
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
    assert num_graphs() - graphs == 2  # of the check of the machine, and of the loss
    ours.assert_close(plan.model.state_dict(), eager.model.state_dict())
    assert list(plan.model.state_dict()) == keys
    assert torch.allclose(step.forward(state, batches[0]), ours.mse(plan.model, batches[0]).float())


@compiles
@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(
    "recipe",
    [
        af.compiled(scope="blocks", fullgraph=True),
        af.compose(af.checkpointed(), af.compiled(scope="blocks")),
    ],
    ids=["alone", "checkpointed"],
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
    assert num_graphs() - graphs == 2  # of the check of the machine, and of all three blocks
    assert list(model.state_dict()) == keys
    ours.assert_close(model.state_dict(), eager.model.state_dict())


@compiles
@pytest.mark.usefixtures("forgetful")
def test_blocks_of_more_widths_than_torch_keeps_graphs_for_are_all_compiled():
    """As a network of many resolutions has them."""
    widths = [*range(3, 13), 1]
    model = nn.Sequential(*map(nn.Linear, widths, widths[1:])).double()
    plan = af.compiled(scope="blocks")(make_plan(model))
    state, step = af.build(af.DistState(), plan)
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
"""Where a graph breaks: in the loss outside of the model, or inside of each block."""


@compiles
@pytest.mark.parametrize(
    ("scope", "place"), [("loss", "loss"), ("loss", "block"), ("blocks", "block")]
)
def test_fullgraph_refuses_a_break_in_the_first_step(scope, place):
    block, loss_fn = BREAKS[place]
    plan = af.compiled(scope=scope, fullgraph=True)(make_plan(stack(block=block), loss_fn=loss_fn))
    state, step = af.build(af.DistState(), plan)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        step(state, make_batches(4)[0])


@compiles
@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(
    ("scope", "place", "fullgraph"),
    [("loss", "loss", False), ("blocks", "block", False), ("blocks", "loss", True)],
)
def test_a_break_that_is_allowed_trains_the_same(scope, place, fullgraph):
    """Outside of what is compiled, it is none."""
    block, loss_fn = BREAKS[place]
    eager, plan = (make_plan(stack(block=block), loss_fn=loss_fn) for _ in range(2))
    batches = make_batches(4, 4, 4)
    run(eager, batches)
    state, step = af.build(af.DistState(), af.compiled(scope=scope, fullgraph=fullgraph)(plan))
    graphs, breaks = num_graphs(), num_breaks()
    for batch in batches:
        state, _ = step(state, batch)
    ours.assert_close(plan.model.state_dict(), eager.model.state_dict())
    assert num_graphs() > graphs
    assert (num_breaks() > breaks) == (not fullgraph)


@compiles
@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("scope", ["loss", "blocks", "step"])
@pytest.mark.parametrize(("dynamic", "expected"), [(True, 1), (None, 2), (False, 3)])
def test_dynamic_says_how_many_graphs_three_batch_sizes_take(scope, dynamic, expected):
    plan = af.compiled(scope=scope, dynamic=dynamic)(make_plan(stack(), plain_sgd))
    state, step = af.build(af.DistState(), plan)
    graphs = num_graphs()
    for batch in make_batches(8, 6, 4):
        state, _ = step(state, batch)
    assert num_graphs() - graphs == expected


OF_MODES = {name for mode in MODES for name in torch._inductor.list_mode_options(mode)}


@pytest.mark.parametrize("scope", ["loss", "blocks", "step"])
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_reaches_the_compiler_as_its_options(scope, mode, monkeypatch):
    """What a mode changes cannot be seen on every machine: CUDA graphs are there on CUDA alone."""
    asked = []

    def compile_nothing(fn, **settings):
        if "dynamic" in settings:  # as nothing but what is trained is compiled with
            asked.append(settings["options"])
        return fn

    monkeypatch.setattr(torch, "compile", compile_nothing)
    af.build(af.DistState(), af.compiled(scope=scope, mode=mode)(make_plan(stack(), plain_sgd)))
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


NO_COMPILER = """
import json, sys, torch
import accel_fn as af
from tests import strategies as ours

model = ours.regression_model()
plan = af.compiled(scope=sys.argv[1])(af.Plan(ours.mse, model, ours.adamw(model.parameters())))
try:
    af.build(af.DistState(), plan)
except ValueError as error:
    print(json.dumps(str(error)))
"""


@compiles
@pytest.mark.parametrize(
    "optimizer",
    [ours.adamw, ours.sgd, plain_sgd],
)
def test_what_comes_after_a_compiled_step_comes_after_it(optimizer):
    """A schedule, and an average of the parameters."""
    recipe = af.compose(af.schedule(lambda num_updates: 1 / (num_updates + 1)), af.average(0.5))
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


@pytest.mark.slow
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
        ({"mode": "fast"}, f"compiled: mode must be one of {', '.join(MODES)}, got 'fast'"),
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
        (
            ("loss", "blocks"),
            "have at most one function in compile_loss, got compile_loss.*compile_blo",
        ),
        (("step", "step"), "have at most one function in compile_step, got compile_step"),
    ],
)
def test_compiling_twice_is_refused(scopes, text):
    plan = af.compose(*[af.compiled(scope=scope) for scope in scopes])(make_plan())
    with pytest.raises(ValueError, match=f"build: plan must {text}.*leave out one"):
        af.build(af.DistState(), plan)


def test_a_whole_step_of_several_ranks_is_refused():
    def refused(state):
        recipe = af.compose(af.wrap_ddp(), af.compiled(scope="step"))
        with pytest.raises(ValueError, match="must have a world of one, got 2 ranks") as raised:
            af.build(state, recipe(make_plan()))
        return str(raised.value)

    for text in simulate(refused, world_size=2):
        assert text.endswith('use scope="loss"')


def twice(plan):
    def compute_twice(grad_fn):
        return grad_fn

    return replace(plan, grad_fns=(compute_twice,))


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (twice, "compute_twice"),
        (af.freeze("0.weight", until=3), "frozen"),
        (af.skip_nonfinite(), "finite_norm"),
        (af.accumulate("auto"), "halving"),
        (af.compiled(), "compile_loss"),
    ],
)
def test_a_whole_step_with_what_is_in_no_graph_is_refused(recipe, name):
    plan = af.compose(recipe, af.compiled(scope="step"))(make_plan())
    text = rf"must hold all from micro-batches to the update, got .*{name}.*; leave it out, or"
    with pytest.raises(ValueError, match=text):
        af.build(af.DistState(), plan)


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
        af.build(af.DistState(), plan)


@pytest.mark.parametrize("options", [{"param_dtype": torch.bfloat16}, {"offload": True}])
def test_a_whole_step_with_shards_on_one_rank_is_refused(options):
    plan = af.compose(af.wrap_fsdp(blocks="0", **options), af.compiled(scope="step"))(make_plan())
    [name] = options
    text = rf'wrap_fsdp\({name}\) must not be used with compiled\(scope="step"\), .*; leave it out'
    with pytest.raises(ValueError, match=text):
        af.build(af.DistState(), plan)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (torch.optim.SparseAdam, "SparseAdam does not support dense gradients"),
        (torch.optim.Adafactor, "Could not guard on data-dependent"),
        (torch_optimizer.AdaBelief, "it counts in Python's numbers"),
        (torch_optimizer.Lookahead, "it runs another optimizer"),
    ],
)
def test_an_optimizer_that_fits_into_no_graph_is_refused_by_name(kind, reason):
    def make(parameters):
        around = kind is torch_optimizer.Lookahead
        return kind(torch.optim.SGD(parameters, lr=0.1) if around else parameters)

    plan = af.compiled(scope="step")(make_plan(optimizer=make))
    name = type(plan.optimizer).__name__
    text = rf"must have an optimizer that fits into a graph, got {name}: {reason}.*such as AdamW"
    before = copy.deepcopy(plan.model.state_dict())
    with pytest.raises(ValueError, match=text):
        af.build(af.DistState(), plan)
    ours.assert_identical(plan.model.state_dict(), before)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, "capturable=True or fused=True"), (torch.optim.NAdam, "capturable=True")],
)
def test_an_optimizer_that_counts_on_the_host_is_refused_with_the_options_that_it_has(
    kind, options
):
    """On an accelerator, which "meta" stands for: it is no CPU, and nothing is computed."""
    optimizer = kind(ours.regression_model().parameters())
    text = (
        f'got {kind.__name__}: it counts on the host; make it with {options}, or use scope="loss"'
    )
    with pytest.raises(ValueError, match=f"{re.escape(text)}$"):
        keeps_tensors(optimizer, torch.device("meta"))


def test_a_model_without_repeated_blocks_is_refused():
    text = r"must find modules of one class repeated in .*, got none; use scope=\"loss\""
    with pytest.raises(ValueError, match=text):
        af.build(af.DistState(), af.compiled(scope="blocks")(make_plan(nn.Linear(3, 1).double())))


@compiles
def test_a_loss_that_breaks_the_graph_is_refused_by_the_step():
    def loss_fn(model, batch):
        return ours.mse(model, batch) * float(batch[0].sum() > 0)

    plan = af.compiled(scope="step")(make_plan(optimizer=torch.optim.SGD, loss_fn=loss_fn))
    state, step = af.build(af.DistState(), plan)
    with pytest.raises(
        ValueError, match=r'must hold the step in one graph, got .*; use scope="los'
    ):
        step(state, make_batches(4)[0])


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
@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
        functools.partial(torch.optim.Adam, weight_decay=0.1),
        torch.optim.Adamax,
    ],
    ids=["nesterov", "adam", "adamax"],
)
def test_a_schedule_that_moves_more_than_the_rate_takes_one_graph_more(optimizer):
    """OneCycleLR gives a momentum, or the first beta, another value at every update."""
    ends, batches = [], make_batches(*[8] * 12)
    for recipe in (af.compose(), af.compiled(scope="step")):
        plan = recipe(make_plan(optimizer=lambda p: optimizer(p, lr=0.01)))
        cycle = torch.optim.lr_scheduler.OneCycleLR(plan.optimizer, 0.1, total_steps=13)
        state, step = af.build(af.DistState(), af.schedule(cycle)(plan))
        graphs = num_graphs()
        for batch in batches:
            state, _ = step(state, batch)
        ends.append(plan.model.state_dict())
    assert num_graphs() - graphs == 2
    ours.assert_close(ends[1], ends[0])


@compiles
@pytest.mark.usefixtures("forgetful")
def test_more_graphs_than_torch_keeps_are_an_error_that_says_so():
    plan = af.compiled(scope="step", dynamic=False)(make_plan(optimizer=plain_sgd))
    text = (
        r"make do with the 1 graphs .* another batch size.*; use dynamic=True, batches of one size"
    )
    with torch._dynamo.config.patch(recompile_limit=1):
        state, step, _ = run(plan, make_batches(4))
        with pytest.raises(ValueError, match=text):
            step(state, make_batches(5)[0])


@compiles
def test_parameters_that_come_to_the_optimizer_are_trained_by_a_step_that_is_built_again():
    found = []
    for recipe in (af.compose(), af.compiled(scope="step")):
        model = ours.regression_model()
        optimizer = ours.adamw(model[0].parameters())
        plan = recipe(af.Plan(ours.mse, model, optimizer))
        batches = [(torch.ones(4, 3).double(), torch.zeros(4, 1).double())] * 3
        run(plan, batches)
        optimizer.add_param_group({"params": [*model[2].parameters()]})
        run(plan, batches)
        found.append(model.state_dict())
    ours.assert_close(*found)


@compiles
def test_a_hyperparameter_that_changes_is_followed():
    eager, plan = make_plan(optimizer=ours.sgd), make_plan(optimizer=ours.sgd)
    states = [af.build(af.DistState(), each) for each in (eager, af.compiled(scope="step")(plan))]
    for batch, momentum in zip(make_batches(4, 4, 4), (0.9, 0.9, 0.5), strict=True):
        for index, each in enumerate((eager, plan)):
            state, step = states[index]
            each.optimizer.param_groups[0]["momentum"] = momentum
            states[index] = step(state, batch)[0], step
    ours.assert_close(plan.model.state_dict(), eager.model.state_dict())


GUARDS = [
    ("MODULE_MATCH", "G['__import_torch_dot_optim_dot_adam']", False),
    ("CLOSURE_MATCH", "G['__import_torch'].compiler.is_compiling", False),
    ("CLASS_MATCH", "G['__import_accel_fn_dot__forward'].Tensor", False),
    ("CLOSURE_MATCH", "G['_times']", False),
    ("BUILTIN_MATCH", "G['__builtins_dict___4']['len']", False),
    ("TYPE_MATCH", "G['__import_torch_dot_nn_dot_modules_dot_module']._global_forward_hooks", True),
    ("MODULE_MATCH", "G['__import___main__'].F", True),
    ("CLOSURE_MATCH", "G['__import_torch_optimizer_dot_yogi'].step", True),
    ("CLOSURE_MATCH", "L['module'].loss_fn", True),
    ("GLOBAL_STATE", "", True),
]


@pytest.mark.parametrize(("kind", "name", "kept"), GUARDS)
def test_whatever_is_the_user_s_is_looked_at_in_every_step(kind, name, kept):
    guard = SimpleNamespace(guard_type=kind, orig_guard=SimpleNamespace(name=name))
    assert moving_guards([guard]) == [kept]


@compiles
def test_names_of_torch_and_of_this_library_are_not_looked_at_in_every_step(monkeypatch):
    """As torch calls the guards of them, in this version."""
    left_out = []

    def moving(guards):
        kept = moving_guards(guards)
        left_out.extend(g.orig_guard.name for g, keep in zip(guards, kept, strict=True) if not keep)
        return kept

    monkeypatch.setattr(_compilation, "moving_guards", moving)
    run(af.compiled(scope="step")(make_plan()), make_batches(4, 4))
    assert any("__import_torch_dot_optim" in name for name in left_out)
    assert any("__builtins_dict" in name for name in left_out)
    assert not any("loss" in name for name in left_out)


@compiles
def test_what_a_user_changes_between_steps_is_followed(monkeypatch):
    """A number and a function of the user's own, an attribute of a module, one more of those."""
    here = sys.modules[__name__]
    changes = [
        lambda model: None,
        lambda model: monkeypatch.setattr(here, "FACTOR", 2.0),
        lambda model: monkeypatch.setattr(here, "measured", F.l1_loss),
        lambda model: setattr(model[1], "negative_slope", 0.3),
        lambda model: model.append(nn.Tanh()),
    ]
    ends, (batch,) = [], make_batches(4)
    for recipe in (af.compose(), af.compiled(scope="step")):
        model = nn.Sequential(nn.Linear(3, 2), nn.LeakyReLU(0.1), nn.Linear(2, 1)).double()
        for number, each in enumerate(model.parameters()):
            nn.init.constant_(each, 0.1 - 0.2 * (number % 2))
        state, step = af.build(af.DistState(), recipe(make_plan(model, loss_fn=scaled_loss)))
        losses = []
        for change in changes:
            change(model)
            for _ in range(2):
                state, report = step(state, batch)
                losses.append(float(report.loss))
        monkeypatch.undo()
        ends.append(losses)
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA, for its graphs")
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
        state, step = af.build(af.init(), af.compose(af.place(), recipe)(plan))
        reports = []
        for batch in make_batches(4)[:1] * 12:
            state, report = step(state, batch)
            reports.append(report)
        ends.append([float(report.loss) for report in reports])
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)
    assert calls["capture_begin"] >= 1
    assert calls["replay"] >= 6  # all but the first few of the 12 steps


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CUDA, where counts may be elsewhere"
)
@pytest.mark.parametrize(
    "options", [{"capturable": True}, {"fused": True}], ids=["capturable", "fused"]
)
def test_an_optimizer_refused_for_counting_on_the_host_is_taken_as_the_message_says(options):
    def built(**options):
        optimizer = functools.partial(torch.optim.AdamW, lr=0.05, **options)
        recipe = af.compose(af.place(), af.compiled(scope="step"))
        return af.build(af.init(), recipe(make_plan(optimizer=optimizer)))

    with pytest.raises(
        ValueError, match="it counts on the host; make it with capturable=True or fused"
    ):
        built()
    state, step = built(**options)
    state, report = step(state, make_batches(4)[0])
    assert bool(report.applied)
