"""wrap_tp: what it makes of a model, beside which transforms, and what it refuses."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import language_model as lm
from tests.support import strategies as ours
from tests.support.processes import launch

TWO, SQUARE = {"dp": 1, "tp": 2}, {"dp": 2, "tp": 2}
STYLES = {"0": "colwise", "2": "rowwise"}


def perceptron(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1, bias=bias)).double()


BATCH = (torch.linspace(-1, 1, 12).double().view(4, 3), torch.ones(4, 1).double())


def steps(state, recipe, model, num=3, optimizer=ours.adamw, loss_fn=ours.mse):
    """Train a few steps; return losses, norms and whole parameters."""
    plan = af.Plan(loss_fn, model, optimizer(model.parameters()))
    state, step = af.build(recipe(plan), state, check_loss=False)
    found = []
    for _ in range(num):
        state, report = step(state, af.shard_batch(BATCH, state))
        found.append(float(report.loss))
    return found, ours.whole(model.state_dict())


def assert_one_process(recipe, mesh, alone=lambda plan: plan, make=perceptron, **options):
    losses, expected = steps(af.DistState(), alone, make(), **options)
    for found, actual in simulate(lambda state: steps(state, recipe, make(), **options), mesh=mesh):
        ours.assert_close(actual, expected)
        assert found == pytest.approx(losses, rel=1e-6)


def test_every_parameter_is_on_the_axis_and_those_of_split_layers_are_parts():
    def run(state):
        model = perceptron()
        state, step = af.build(af.wrap_tp(STYLES)(ours.plan(model=model)), state)
        held = {name: tuple(each.to_local().shape) for name, each in model.named_parameters()}
        groups = step.plan.optimizer.param_groups
        assert [id(each) for group in groups for each in group["params"]] == [
            id(each) for each in model.parameters()
        ]
        assert type(model) is nn.Sequential
        assert model.state_dict().keys() == perceptron().state_dict().keys()
        return held

    expected = {"0.weight": (3, 3), "0.bias": (3,), "2.weight": (1, 3), "2.bias": (1,)}
    assert simulate(run, mesh=TWO) == [expected] * 2


def test_tied_parameters_stay_tied():
    def run(state):
        model = lm.language_model()
        plan = af.Plan(
            lm.token_loss, model, ours.adamw(model.parameters()), af.count_labels("labels")
        )
        af.build(af.wrap_tp(lm.STYLES)(plan), state)
        return model.head.weight is model.embedding.weight

    assert simulate(run, mesh=TWO) == [True, True]


BESIDE = [
    af.compose(
        af.accumulate(2),
        af.clip(0.05),
        af.schedule(lambda update: 1 / (1 + update)),
        af.ema(0.9),
    ),
    af.compose(
        af.clip_value(0.01), af.check_replicas(1), af.freeze("0.bias", until=2), af.with_amp("fp16")
    ),
]


@pytest.mark.parametrize("transforms", BESIDE)
def test_it_works_beside(transforms):
    recipe = af.compose(af.wrap_ddp(), af.wrap_tp(STYLES), transforms)
    assert_one_process(recipe, SQUARE, transforms)


class Scaled(nn.Module):
    """A block with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 0.5))
        self.up, self.down = nn.Linear(3, 6), nn.Linear(6, 3)

    def forward(self, hidden):
        return hidden + self.scale * self.down(self.up(hidden).tanh())


def scaled():
    torch.manual_seed(0)
    return nn.Sequential(Scaled(), Scaled(), nn.Linear(3, 1)).double()


@pytest.mark.slow
def test_blocks_with_parameters_of_their_own_are_recomputed():
    recompute = af.checkpoint_activations(blocks=Scaled)
    styles = af.wrap_tp({"*.up": "colwise", "*.down": "rowwise"})
    assert_one_process(af.compose(styles, recompute), TWO, make=scaled)


TRAIN = """
import accel_fn as af
from tests.support import language_model as lm
from tests.transforms import test_wrap_tp as tests

with af.distributed(device="cpu", mesh={"dp": -1, "tp": 2}) as state:
    for wrap in (af.wrap_ddp(), af.wrap_fsdp()):
        tests.compare_compiled(state, wrap)
"""


def compare_compiled(state, wrap):
    """Compare blocks that are compiled with one process without a compiler."""
    batch = lm.batches(6)[0]

    def train(state, recipe):
        model = lm.language_model()
        optimizer = ours.adamw(model.parameters())
        plan = af.Plan(lm.token_loss, model, optimizer, af.count_labels("labels"))
        state, step = af.build(recipe(plan), state)
        for _ in range(3):
            state, report = step(state, af.shard_batch(batch, state))
        return float(report.loss), ours.whole(model.state_dict())

    recipe = af.compose(wrap, af.wrap_tp(lm.STYLES), af.compiled(scope="blocks"))
    loss, actual = train(state, recipe)
    expected_loss, expected = train(af.DistState(), lambda plan: plan)
    ours.assert_close(actual, expected)
    assert loss == pytest.approx(expected_loss)


@pytest.mark.slow
def test_compiled_blocks_work_over_processes():
    launch(TRAIN, num_processes=2)


def test_on_one_rank_it_does_nothing():
    assert_one_process(af.wrap_tp(STYLES), {"dp": 1, "tp": 1})
    assert_one_process(af.compose(af.wrap_ddp(), af.wrap_tp(STYLES)), {"dp": 2, "tp": 1})


def split_by_hand(state, axis="tp"):
    model = perceptron()
    mesh = af.device_mesh(state)[axis]
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh, styles, src_data_rank=None)


def test_a_model_that_was_split_by_hand_is_taken_as_it_is():
    losses, expected = steps(af.DistState(), lambda plan: plan, perceptron())
    recipe = af.compose(af.wrap_ddp(), af.wrap_tp())
    for found, actual in simulate(
        lambda state: steps(state, recipe, split_by_hand(state)), mesh=SQUARE
    ):
        ours.assert_close(actual, expected)
        assert found == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 1}, TWO], ids=str)
def test_a_model_that_fsdp_has_sharded_is_refused(mesh):
    words = "build: wrap_tp's model must not be sharded by FSDP before, got '0.weight'; build once"

    def run(state):
        model = perceptron()
        af.build(af.wrap_fsdp()(ours.plan(model=model)), state)
        with pytest.raises(af.errors.PlanError, match=words):
            af.build(af.compose(af.wrap_ddp(), af.wrap_tp(STYLES))(ours.plan(model=model)), state)

    simulate(run, mesh=mesh)


def refused(recipe, words, mesh=TWO, **given):
    """Build on every rank, which must raise these words."""

    def build(state):
        model = given["make"]() if "make" in given else perceptron()
        optimizer = given.get("optimizer", ours.sgd)(model.parameters())
        with pytest.raises(ValueError, match=re.escape(words)):
            af.build(recipe(af.Plan(ours.mse, model, optimizer)), state)
        return True

    assert all(simulate(build, mesh=mesh) if mesh else simulate(build, world_size=2))


def with_table():
    return nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))


REFUSED = {
    "no mesh": (
        af.wrap_tp(STYLES),
        "build: wrap_tp's mesh must have an axis 'tp', got 'dp 2'; use init(mesh={\"dp\": -1, \"tp\": 2}), "
        "or start it by: accel-fn launch -n 2 --mesh dp=-1,tp=2 ",
        {"mesh": None},
    ),
    "twice": (
        af.compose(af.wrap_tp(STYLES), af.wrap_tp(STYLES)),
        "build: plan must have at most one function in shard_model",
        {},
    ),
    "auto microbatches": (
        af.compose(af.accumulate("auto"), af.wrap_tp(STYLES)),
        'build: accumulate("auto") must not be used with wrap_tp',
        {},
    ),
    "compiled step": (
        af.compose(af.wrap_tp(STYLES), af.compiled(scope="step")),
        "build: wrap_tp must not be used with compiled(scope='step')",
        {},
    ),
    "compiled loss": (
        af.compose(af.wrap_tp(STYLES), af.compiled()),
        "build: wrap_tp must not be used with compiled(), whose graph",
        {},
    ),
    "compiled blocks with parameters of their own": (
        af.compose(
            af.wrap_tp({"*.up": "colwise", "*.down": "rowwise"}), af.compiled(scope="blocks")
        ),
        "parameters of its own beside layers, which no graph takes as plain tensors, got 0.scale",
        {"make": scaled},
    ),
    "recomputed layers": (
        af.compose(af.wrap_tp(STYLES), af.checkpoint_activations(blocks=nn.Linear)),
        "build: checkpoint_activations(blocks) must match modules around split layers, got '0'",
        {},
    ),
    "sparse gradients": (
        af.wrap_tp({"1": "colwise"}),
        "build: wrap_tp's model must have dense gradients, got '0'",
        {"make": with_table},
    ),
    "Muon": (
        af.wrap_tp(STYLES),
        "build: wrap_tp's optimizer must update elements one by one",
        {
            "make": partial(perceptron, bias=False),
            "optimizer": lambda parameters: torch.optim.Muon(
                [each for each in parameters if each.ndim == 2]
            ),
        },
    ),
    "options of DDP": (
        af.compose(af.wrap_ddp(comm_hook="bf16"), af.wrap_tp(STYLES)),
        "build: wrap_ddp(comm_hook) must not be used with wrap_tp(",
        {"mesh": SQUARE},
    ),
    "replicated shards": (
        af.compose(af.wrap_fsdp(replicate=2), af.wrap_tp(STYLES)),
        "build: wrap_fsdp(replicate) must be 1 with wrap_tp(",
        {"mesh": SQUARE},
    ),
    "offload on one rank of dp": (
        af.compose(af.wrap_fsdp(offload=True), af.wrap_tp(STYLES)),
        "build: wrap_fsdp(offload) must have two ranks along dp or more with wrap_tp(",
        {},
    ),
    "no replicas": (
        af.wrap_tp(STYLES),
        "build: plan must average gradients over the 2 ranks",
        {"mesh": SQUARE},
    ),
    "local_sgd": (
        af.compose(af.local_sgd(2), af.wrap_tp(STYLES)),
        "build: local_sgd(2) must have a mesh of dp alone, got dp 2 x tp 2",
        {"mesh": SQUARE},
    ),
    "reproducible": (
        af.compose(af.reproducible(num_virtual_ranks=4), af.wrap_tp(STYLES)),
        "must have a mesh of dp alone, got dp 2 x tp 2",
        {"mesh": SQUARE},
    ),
    "deepspeed": (
        af.compose(af.wrap_deepspeed(stage=1), af.wrap_tp(STYLES)),
        "must have a mesh of dp alone, got dp 2 x tp 2",
        {"mesh": SQUARE},
    ),
    "a style that fits nothing": (
        af.wrap_tp({"up": "colwise"}),
        "build: wrap_tp's styles must match modules of the model, got 'up'",
        {},
    ),
}


@pytest.mark.parametrize(("recipe", "words", "given"), REFUSED.values(), ids=REFUSED)
def test_is_refused_on_all_ranks(recipe, words, given):
    refused(recipe, words, **given)


def test_a_model_that_is_split_over_another_axis_is_refused():
    def run(state):
        first = state.rank // 2 * 2
        text = (
            f"build: wrap_tp's model must be split over the ranks along tp, [{first}, {first + 1}], got "
            f"0.weight over {[state.rank % 2, state.rank % 2 + 2]}; give it whole, from from_pretrained "
            "without distributed_config for example: wrap_tp() splits it by the same plan"
        )
        plan = ours.plan(model=split_by_hand(state, "dp"))
        with pytest.raises(ValueError, match=re.escape(text)):
            af.build(af.compose(af.wrap_ddp(), af.wrap_tp())(plan), state)

    simulate(run, mesh=SQUARE)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"styles": "colwise"},
            'wrap_tp: styles must be "auto" or a dict, got \'colwise\'; such as {"layers.*.up": "colwise", '
            '"layers.*.down": "rowwise"}',
        ),
        ({"axis": "dp"}, "wrap_tp: axis must be one of pp, cp, tp, got 'dp'"),
        (
            {"styles": {0: "colwise"}},
            "wrap_tp: styles must be \"auto\" or map names of modules to styles, got {0: 'colwise'}",
        ),
        ({"styles": 2}, 'wrap_tp: styles must be "auto" or map names of modules to styles, got 2'),
    ],
)
def test_arguments_are_checked(given, words):
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        af.wrap_tp(**given)
