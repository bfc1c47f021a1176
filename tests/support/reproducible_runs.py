"""Runs under reproducible on any number of ranks, and the fingerprints of what they train."""

import hashlib

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

WORLDS = (1, 2, 4, 8)


class Net(nn.Module):
    """A model with two heads; only some samples use the second one."""

    def __init__(self, between=()):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 6), *between, nn.Tanh(), nn.Dropout(0.4))
        self.heads = nn.ModuleList(nn.Linear(6, 1) for _ in range(2))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)

    def forward(self, inputs):
        hidden = self.first(inputs)
        outputs = self.heads[0](hidden)
        if (inputs[:, 0] > 0.5).any():
            outputs = outputs + self.heads[1](hidden)
        return outputs


def batches(num=20, size=24):
    """Return batches; no sample of the first ones needs the second head."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(num):
        inputs = torch.randn(size, 3, generator=generator)
        if index < 2:
            inputs = -inputs.abs()
        found.append((inputs, torch.randn(size, 1, generator=generator)))
    return found


def built(state, recipe, model=None, loss_fn=ours.mse):
    """Build with `reproducible`, unless the recipe holds it."""
    model = Net() if model is None else model
    plan = recipe(af.Plan(loss_fn, model, torch.optim.AdamW(model.parameters(), lr=0.05)))
    return af.build(plan if plan.strategy else af.reproducible()(plan), state)


def train(state, step, data):
    """Train on a rank; return the state and all reports. The rank's part is copied, as by a
    loader."""
    said = []
    for batch in data:
        part = tuple(each.tensor_split(state.world_size)[state.rank].clone() for each in batch)
        state, report = step(state, part)
        said += [report.loss, report.grad_norm, report.applied, torch.tensor(report.weight)]
    return state, [each.clone() for each in said if each is not None]


def sha256(tensors):
    digest = hashlib.sha256()
    for each in tensors:
        digest.update(f"{each.dtype} {list(each.shape)}".encode())
        digest.update(each.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def kept(state, step):
    """Return parameters, buffers, the state of optimizer and transforms, and the loss scale."""
    keeping = [
        each.state_dict() for each in (*step.plan.accept, *step.plan.after_update) if keeps(each)
    ]
    numbers = [
        each for each in tree_leaves(keeping) if isinstance(each, torch.Tensor | int | float)
    ]
    scale = [] if state.scaler is None else [state.scaler.scale]
    return [*ours.kept_tensors(step).values(), *map(torch.as_tensor, numbers), *scale]


def keeps(transform):
    return hasattr(transform, "state_dict")


def fingerprint(state, recipe, data=None, **settings):
    """Hash everything that is kept, with losses, norms and verdicts."""
    state, step = built(state, recipe, **settings)
    state, said = train(state, step, batches() if data is None else data)
    return sha256([*kept(state, step), *said])


def fingerprints(recipe, worlds=WORLDS, **settings):
    return {
        each
        for world_size in worlds
        for each in simulate(
            lambda state: fingerprint(state, recipe, **settings), world_size=world_size
        )
    }


def follow_loss(plan):
    """Make a schedule: the learning rate falls with every loss that is no better than those
    before."""
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(plan.optimizer, patience=0)
    return af.schedule(scheduler, metric=lambda report: report.loss)(plan)


RECIPES = {
    "accumulate": af.accumulate(2),
    "fp16": af.with_amp("fp16", init_scale=2.0**10),
    "bf16": af.with_amp("bf16"),
    "norm": af.skip_nonfinite(),
    "spikes": af.skip_spikes(window=4),
    "value": af.clip_value(0.1),
    "average": af.ema(0.9),
    "uniform average": af.swa(),
    "replicas": af.check_replicas(2),
    "plateau": follow_loss,
    "schedule": af.schedule(lambda num_updates: 1.0 / (1 + num_updates)),
    "freeze": af.freeze("heads", until=3),
    "checkpoint_activations": af.checkpoint_activations(blocks="first"),
}


def spoilt(num_batches, size, bad_row):
    """Make a row of the second batch non-finite and one of the fourth huge, if rows are named."""
    data = batches(num_batches, size)
    if bad_row is not None:
        data[1][1][bad_row % size] = 1e30
        data[3][1][bad_row % size] = 1e4
    return data
