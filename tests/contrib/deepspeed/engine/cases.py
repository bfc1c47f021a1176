"""Programs for two processes with DeepSpeed, and the same trainings on one."""

from __future__ import annotations

import torch
from torch import nn

import accel_fn as af
from accel_fn.core.dtensor import whole as whole_of
from tests import reference

ROWS = 16
PARTS = {"even": 8, "uneven": 11, "empty": 16}
"""By name of a cut: the number of rows of rank 0; rank 1 has the others."""


def cpu_adam(parameters):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, 0.01, weight_decay=0.01)


OPTIMIZERS = {
    "cpu adam": cpu_adam,
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(
        parameters, 0.1, momentum=0.9, weight_decay=0.01
    ),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, 0.01, amsgrad=True),
}


def zero(stage, offload=None):
    """wrap_deepspeed that shards small parameters, too."""
    sharded = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return af.wrap_deepspeed(stage=stage, offload=offload, zero_optimization=sharded)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def batches(num: int = 4) -> list[tuple[torch.Tensor, ...]]:
    """Rows of four labels each, most of which count; those of row 3 do not."""
    generator = torch.Generator().manual_seed(1)

    def batch():
        x = torch.randn(ROWS, 6, generator=generator)
        y = torch.randn(ROWS, 3, generator=generator)
        mask = (torch.rand(ROWS, 3, generator=generator) < 0.7).float()
        mask[3] = 0
        return x, y, mask

    return [batch() for _ in range(num)]


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    x, y, mask = batch
    return ((model(x) - y).square() * mask).sum() / mask.sum()


def count(batch: tuple[torch.Tensor, ...]) -> float:
    return batch[2].sum().item()


def rows_of(batch, state, num_first):
    """The rows of this rank."""
    rows = slice(num_first) if state.rank == 0 else slice(num_first, None)
    mine = tuple(each[rows] for each in batch)
    return mine if len(mine[0]) else None


def train(state, transform, optimizer="sgd", cut=None, num=4, model=None):
    """Train; return the parameters, losses and norms, and the step."""
    model = make_model() if model is None else model
    plan = transform(af.Plan(loss_fn, model, OPTIMIZERS[optimizer](model.parameters()), count))
    state, step = af.build(plan, state)
    losses, norms = [], []
    for batch in batches(num):
        part = batch if cut is None else rows_of(batch, state, PARTS[cut])
        state, report = step(state, part)
        losses.append(report.loss.item())
        norms.append(None if report.grad_norm is None else report.grad_norm.item())
    return whole(model), losses, norms, state, step


def whole(model):
    """Copies of the parameters, gathered where they are sharded."""
    parameters = list(model.parameters())
    if not hasattr(parameters[0], "ds_id"):
        return [whole_of(each).clone() for each in parameters]
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        return [each.detach().clone() for each in parameters]


def by_hand(optimizer="sgd", num=4, max_norm=None):
    """The loop by hand on one process: parameters and losses."""
    model = make_model()
    made = OPTIMIZERS[optimizer](model.parameters())
    losses = reference.train(model, loss_fn, made, batches(num), max_norm=max_norm)
    return [each.detach().clone() for each in model.parameters()], losses


def distance(first, second) -> float:
    """The largest difference of parameters, relative to the largest element."""
    pairs = zip(first, second, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def relative(first, second) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(first, second, strict=True))


def add_at(found, stage, name, case, **options):
    """Add the case of a stage under its name."""
    found[f"{name} {stage}"] = lambda state: case(state, stage=stage, **options)
