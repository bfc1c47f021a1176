"""Kinds of programs that take shards for whole parameters: right with replicas, and with shards refused."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.func import functional_call, grad, vmap
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from tests.field.catalogue import kind
from tests.field.program import Case, figures, mse, network, samples, sgd, two_loops, update


class Blocks(nn.Module):
    """Two layers outside of blocks, and two blocks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 1)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.double()

    def forward(self, x):
        x = self.first(x).tanh()
        for block in self.blocks:
            x = block(x).tanh()
        return self.last(x)


def trained_by(state, case, wraps, model, loss_fn, optimizer=None, after=None, **options):
    """Train a model by a plan, with a call of the loop's own after every step."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)
    plan = af.Plan(loss_fn, model, optimizer or sgd(model), **options)
    state, step = af.build(af.compose(wraps, af.accumulate(case.k))(plan), state)
    losses = []
    for batch in af.shard_loader(loader, state):
        state, report = step(state, batch)
        losses.append(report.loss)
        if after is not None:
            after(model)
    return figures(model, losses)


def on_shards(case, loss_fn, make_model=Blocks, **repair):
    """Return the loop by hand, the one on shards, and the one that the error names."""
    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)
    by_hand, _ = two_loops(case, make_model, loss_fn, loader)
    repaired = af.wrap_fsdp(**repair)
    return (
        by_hand,
        lambda state: trained_by(state, case, af.wrap_fsdp(), make_model(), loss_fn),
        lambda state: trained_by(state, case, repaired, make_model(), loss_fn),
    )


ON_SHARDS = {"strategy": ("wrap_fsdp",), "world_size": (2, 3)}
WHOLE = r'wrap_fsdp\(blocks=""\)'


@kind("refused", WHOLE, **ON_SHARDS)
def gradients_by_sample(case: Case):
    """A penalty on the gradient of each sample, by `torch.func` over all parameters."""

    def loss_fn(model, batch):
        def one(parameters, x, y):
            return F.mse_loss(functional_call(model, parameters, (x,)), y)

        slopes = vmap(grad(one), (None, 0, 0))(dict(model.named_parameters()), *batch)
        penalty = sum(each.flatten(1).square().sum(1) for each in slopes.values())
        return mse(model, batch) + 0.01 * penalty.mean()

    return on_shards(case, loss_fn, Blocks if case.seed % 2 else network, blocks="")


@kind("refused", WHOLE, **ON_SHARDS)
def meta_learning(case: Case):
    """Each sample adapts the parameters by a step of its own, whose gradient has a graph (MAML)."""

    def loss_of(model, parameters, x, y):
        return F.mse_loss(functional_call(model, parameters, (x[None],)), y[None])

    def adapted(model, x, y):
        parameters = dict(model.named_parameters())
        loss = loss_of(model, parameters, x, y)
        slopes = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        pairs = zip(parameters.items(), slopes, strict=True)
        return loss_of(model, {name: p - 0.1 * slope for (name, p), slope in pairs}, -x, y)

    def loss_fn(model, batch):
        return torch.stack([adapted(model, *each) for each in zip(*batch, strict=True)]).mean()

    return on_shards(case, loss_fn, Blocks if case.seed % 2 else network, blocks="")


@kind("refused", WHOLE, **ON_SHARDS)
def meta_learning_by_functions(case: Case):
    """The same in `torch.func`, where FSDP would forget the adapted parameters without an error."""

    def loss_of(parameters, model, x, y):
        return F.mse_loss(functional_call(model, parameters, (x[None],)), y[None])

    def loss_fn(model, batch):
        parameters = dict(model.named_parameters())

        def adapted(x, y):
            slopes = grad(loss_of)(parameters, model, x, y)
            moved = {name: p - 0.1 * slopes[name] for name, p in parameters.items()}
            return loss_of(moved, model, -x, y)

        return vmap(adapted)(*batch).mean()

    return on_shards(case, loss_fn, Blocks if case.seed % 2 else network, blocks="")


@kind("refused", WHOLE, **ON_SHARDS)
def scaled_weights(case: Case):
    """The loss calls the model with other parameters, made of its own."""

    def loss_fn(model, batch):
        scaled = {name: 1.1 * each for name, each in model.named_parameters()}
        return F.mse_loss(functional_call(model, scaled, (batch[0],)), batch[1])

    return on_shards(case, loss_fn, blocks="")


@kind("refused", r"full_tensor\(\)", **ON_SHARDS)
def loss_by_a_number_of_weights(case: Case):
    """The loss is scaled by the norm of a block's weight, as a number: that of a rank's own rows."""

    def loss_fn(model, batch):
        weight = model.blocks[1].weight
        return mse(model, batch) / (1 + float(weight.detach().norm()))

    return on_shards(case, loss_fn, blocks="")


@kind("equal")
def complex_weights(case: Case):
    """A model of complex parameters with a real output."""

    class Waves(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.into = nn.Parameter(torch.randn(4, 5, dtype=torch.complex128))
            self.out = nn.Parameter(torch.randn(5, 1, dtype=torch.complex128))

        def forward(self, x):
            # The sine of a sum grows with its imaginary part: small weights keep it tame.
            return ((0.1 * x.to(self.into.dtype) @ self.into).sin() @ self.out).real

    loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)
    return two_loops(case, Waves, mse, loader)


class ByParameter(Optimizer):
    """An optimizer whose update of a parameter is a function of its gradient."""

    def __init__(self, parameters, change):
        super().__init__(parameters, {"lr": 0.1})
        self.change = change

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(group["lr"] * self.change(each.grad))


def by_parameter(case: Case, change):
    """Return the loop by hand, the one on shards, and the one with replicas."""

    def by_hand():
        model = Blocks()
        optimizer = ByParameter(model.parameters(), change)
        loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)
        losses = [update(model, mse(model, batch), optimizer) for batch in loader]
        return figures(model, losses)

    def run(state, wraps):
        model = Blocks()
        return trained_by(state, case, wraps, model, mse, ByParameter(model.parameters(), change))

    return by_hand, lambda state: run(state, af.wrap_fsdp()), lambda s: run(s, af.wrap_ddp())


@kind("refused", "wrap_ddp", **ON_SHARDS)
def optimizer_that_flattens(case: Case):
    """An optimizer of somebody's own sees a parameter as a vector, as Prodigy does."""
    return by_parameter(case, lambda grad: (grad.flatten() / grad.norm()).view_as(grad))


@kind("refused", "wrap_ddp", **ON_SHARDS)
def optimizer_that_reads_a_norm(case: Case):
    """An optimizer of somebody's own divides by a norm that it has read."""
    return by_parameter(case, lambda grad: grad / (1e-3 + grad.norm().item()))


@kind("refused", "wrap_ddp", **ON_SHARDS)
def optimizer_of_its_own_part(case: Case):
    """An optimizer of somebody's own takes the norm of what the rank holds."""

    def change(grad):
        own = grad.to_local() if hasattr(grad, "to_local") else grad
        return grad / (1e-3 + float(own.norm()))

    return by_parameter(case, change)


@kind("equal", **ON_SHARDS)
def optimizer_by_norms(case: Case):
    """An optimizer of somebody's own computes with norms as tensors, which torch adds up over shards."""
    return by_parameter(case, lambda grad: grad / (1e-3 + grad.norm()))[:2]


@kind("refused", r"full_tensor\(\)", **ON_SHARDS)
def gradients_by_a_number(case: Case):
    """A gradient transform divides by a norm that it has read."""

    def by_hand():
        model = Blocks()
        optimizer, losses = sgd(model), []
        for batch in DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size):
            optimizer.zero_grad()
            loss = mse(model, batch)
            loss.backward()
            for each in model.parameters():
                each.grad /= 1e-3 + float(each.grad.norm())
            optimizer.step()
            losses.append(loss.detach())
        return figures(model, losses)

    def normed(grad, is_repaired):
        norm = grad.norm()
        norm = norm.full_tensor() if is_repaired else norm
        return grad / (1e-3 + float(norm))

    def run(state, is_repaired=False):
        def change(state, grads):
            return grads.map(lambda grad: normed(grad, is_repaired))

        return trained_by(state, case, af.wrap_fsdp(), Blocks(), mse, gradients=(change,))

    return by_hand, run, lambda state: run(state, is_repaired=True)


@kind("equal")
def rows_put_back(case: Case):
    """After every step, the loop puts rows of a weight back, as of tokens that are not trained."""
    saved = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)

    @torch.no_grad()
    def put_back(model):
        weight = model.first.weight
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        whole[[0, 3]] = saved
        if whole is not weight:
            layout = weight.device_mesh, weight.placements
            weight.copy_(distribute_tensor(whole, *layout, src_data_rank=None))
        model.last.weight.clamp_(-0.1, 0.1)

    def by_hand():
        model = Blocks()
        optimizer, losses = sgd(model), []
        for batch in DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size):
            losses.append(update(model, mse(model, batch), optimizer))
            put_back(model)
        return figures(model, losses)

    def run(state):
        wraps = getattr(af, case.strategy)()
        return trained_by(state, case, wraps, Blocks(), mse, after=put_back)

    return by_hand, run


@kind("refused", r"af\.ema\(decay\)", **ON_SHARDS)
def averaged_model(case: Case):
    """The loop averages parameters by torch's own AveragedModel, which copies the model."""
    average = get_ema_avg_fn(0.9)

    def by_hand():
        model = Blocks()
        optimizer, averaged = sgd(model), AveragedModel(model, avg_fn=average)
        for batch in DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size):
            update(model, mse(model, batch), optimizer)
            averaged.update_parameters(model)
        return figures(averaged.module)

    def run(state):
        model = Blocks()
        plan = af.Plan(mse, model, sgd(model))
        af.build(af.wrap_fsdp()(plan), state)
        AveragedModel(model, avg_fn=average)
        raise AssertionError("the copy was not refused")

    def repaired(state):
        model = Blocks()
        wraps = af.compose(af.wrap_fsdp(), af.accumulate(case.k), af.ema(0.9))
        state, step = af.build(wraps(af.Plan(mse, model, sgd(model))), state)
        loader = DataLoader(TensorDataset(*samples(case)), batch_size=case.batch_size)
        for batch in af.shard_loader(loader, state):
            state, _ = step(state, batch)
        with af.averaged(step):
            return figures(model)

    return by_hand, run, repaired
