"""All ranks evaluate the model that rank 0 saves, and training does not notice."""

import tempfile

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from accel_fn.testing import internals, simulate
from tests.support.cases import pinned

# newer versions of torch have another name for it, older ones not
pytestmark = [
    pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:step. model should write the same in its forward"),
    pytest.mark.filterwarnings("ignore:step. model should have no BatchNorm"),
]

WRAPS = {
    "ddp": af.wrap_ddp(),
    "ddp without broadcasts": af.wrap_ddp(broadcast_buffers=False),
    "fsdp": af.wrap_fsdp(blocks=nn.Linear),
}
everywhere = pytest.mark.parametrize(
    ("wrap", "world_size"),
    pinned([("ddp", 2), ("fsdp", 2)], WRAPS, [1, 2]),
)
GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(28, 3, generator=GENERATOR).double()
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True).square())


class Tracking(nn.Module):
    """Scales by what its training batches have left in buffers of several dtypes."""

    def __init__(self, is_writing):
        super().__init__()
        self.is_writing = is_writing  # in evaluation mode too
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("counts", torch.zeros((), dtype=torch.int64))
        self.register_buffer("columns", torch.ones(4, 2).double().t())
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("own", torch.zeros(2), persistent=False)

    def forward(self, inputs):
        if self.training:
            self.flags |= inputs.mean(0) > 0
            self.counts += int((inputs > 0).sum())
            self.columns += inputs.mean()
            self.own += inputs.mean()
        elif self.is_writing:
            self.counts = self.counts + 1
            self.columns.mul_(2)
        return inputs * (1 + self.flags + 0.1 * self.counts) * self.columns.sum()


def make_model(is_writing=False):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, momentum=0.5)
    return nn.Sequential(Tracking(is_writing), nn.Linear(3, 4), norm, nn.Linear(4, 1)).double()


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def metric_fn(model, batch):
    return {"error": (model(batch[0]) - batch[1]).abs().squeeze(1)}


def built(state, *transforms, model=None, lr=1e-4):
    model = model or make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return af.build(af.compose(*transforms)(af.Plan(loss_fn, model, optimizer)), state)


def loader_of(state, shuffle=False):
    return af.shard_loader(DataLoader(DATA, batch_size=10, shuffle=shuffle), state)


def trained(state, step, num_epochs=1, after=lambda state: None):
    for epoch in loader_of(state, shuffle=True).epochs(num_epochs):
        for batch in epoch:
            state, _ = step(state, batch)
            after(state)
    return state


def kept(step):
    """A copy of all that a rank keeps of the model, with non-persistent buffers, and the optimizer."""
    model, optimizer = step.plan.model, step.plan.optimizers["optimizer"]
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [each["momentum_buffer"] for each in optimizer.state.values()]
    return [getattr(each, "_local_tensor", each).detach().clone() for each in tensors]


def figures(state, step):
    """What the ranks find together, in three ways; the model comes back in training mode."""
    loader = loader_of(state)
    found = [
        af.evaluate(step, state, loader)["loss"],
        af.evaluate(step, state, loader, metric_fn)["error"],
    ]
    step.plan.model.eval()
    found += [float(step.forward(state, batch)) for batch in loader]
    step.plan.model.train()
    return found


def saved(step, state, folder):
    """Save the model, on every rank where it is sharded."""
    if not any(hasattr(each, "to_local") for each in step.plan.model.parameters()):
        af.on_main(lambda: af.save_model(step.plan.model, folder), state)
    else:
        af.save_model(step.plan.model, folder)


def figures_of(folder):
    """The figures of one process that loads the saved model."""
    model = make_model()
    af.load_model(model, folder)
    return figures(*built(af.DistState(), model=model))


@pytest.mark.slow
@everywhere
def test_every_way_to_evaluate_gives_the_figures_of_the_saved_model(wrap, world_size):
    with tempfile.TemporaryDirectory() as own, tempfile.TemporaryDirectory() as mean:

        def run(state):
            state, step = built(state, WRAPS[wrap], af.ema(0.5))
            state = trained(state, step)
            found = figures(state, step)
            saved(step, state, own)
            with af.averaged(step):
                averaged = figures(state, step)
                saved(step, state, mean)
            return found, averaged, step.plan.model[2].running_mean.tolist()

        ranks = simulate(run, world_size=world_size)
        expected = figures_of(own), figures_of(mean)
    assert world_size == 1 or ranks[0][2] != ranks[1][2]
    assert expected[0] != pytest.approx(expected[1], rel=1e-6)
    for found, averaged, _ in ranks:
        assert found == pytest.approx(expected[0], rel=1e-12)
        assert averaged == pytest.approx(expected[1], rel=1e-12)


@everywhere
def test_training_with_evaluation_is_training_without_to_the_bit(wrap, world_size):
    def run(state, is_evaluated):
        state, step = built(state, WRAPS[wrap], af.ema(0.5), model=make_model(is_writing=True))

        def after(state):
            if is_evaluated and state.world_size > 1:
                before = kept(step)
                figures(state, step)
                with af.averaged(step):
                    figures(state, step)
                assert all(map(torch.equal, kept(step), before))

        state = trained(state, step, after=after)
        return kept(step)

    plain = simulate(lambda state: run(state, False), world_size=world_size)
    found = simulate(lambda state: run(state, True), world_size=world_size)
    for mine, expected in zip(found, plain, strict=True):
        assert all(map(torch.equal, mine, expected))


def test_ranks_that_local_sgd_lets_differ_are_not_evaluated():
    def run(state):
        state, step = built(state, af.local_sgd(every=2))
        loader = loader_of(state)
        batch = next(iter(loader))
        figures(state, step)
        state, _ = step(state, batch)
        text = "state must be one at which local_sgd has averaged the ranks, got 1 of 2 updates after it; "
        repair = "where their number is a multiple of 2"
        with pytest.raises(ValueError, match=f"evaluate: {text}evaluate {repair}"):
            af.evaluate(step, state, loader)
        assert step.forward(state, batch) > 0
        step.plan.model.eval()
        with pytest.raises(ValueError, match=f"step.forward: {text}step.forward {repair}"):
            step.forward(state, batch)
        step.plan.model.train()
        state, _ = step(state, batch)
        return figures(state, step)

    first, second = simulate(run, world_size=2)
    assert first == second


def test_buffers_of_other_shapes_are_refused_on_all_ranks():
    def run(state):
        model = make_model()
        state, step = built(state, af.wrap_ddp(), model=model)
        if not state.is_main:
            model[0].flags = torch.zeros(5, dtype=torch.bool)
        text = (
            "evaluate: model must have the same buffers on all ranks, got "
            r"0.flags \[5\] torch.bool on rank 1 and 0.flags \[3\] torch.bool on rank 0"
        )
        with pytest.raises(RuntimeError, match=text):
            af.evaluate(step, state, loader_of(state))
        return len(model[0].flags)

    assert simulate(run, world_size=2) == [3, 5]


class Plain(nn.Linear):
    """A model whose only buffer is not saved."""

    def __init__(self):
        super().__init__(3, 1)
        self.register_buffer("rank", torch.zeros(1), persistent=False)


@pytest.mark.parametrize(
    ("make", "wrap", "more"),
    [
        (make_model, af.wrap_ddp(), 2),  # an exchange and a broadcast
        (Plain, af.wrap_ddp(), 0),
        (
            lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 1)),
            None,
            0,
        ),
    ],
    ids=["statistics", "nothing saved", "reproducible"],
)
def test_only_replicas_whose_buffers_may_differ_pay(make, wrap, more):
    def run(state):
        wrap_ = wrap or af.reproducible(num_virtual_ranks=2)
        state, step = built(state, wrap_, model=make().double())
        batch = next(iter(loader_of(state)))
        calls = []
        for is_training in (True, False):
            if not is_training:
                step.plan.model.eval()
            before = internals.num_calls()
            step.forward(state, batch)
            calls.append(internals.num_calls() - before)
        return calls[1] - calls[0]

    assert simulate(run, world_size=2) == [more] * 2
