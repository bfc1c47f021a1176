"""Reference for local SGD: one loop by hand for each rank, and the means over the ranks."""

import torch

from tests import reference
from tests.support import strategies as ours


def trained_apart_by_hand(parts, every, optimizer=ours.adamw, max_norm=None):
    """Train the reference loop for each rank, average by hand; return what each rank holds after
    each batch."""
    models = [ours.regression_model() for _ in parts]
    optimizers = [optimizer(model.parameters()) for model in models]
    items = [0] * len(parts)
    traces = [[] for _ in parts]
    for number in range(len(parts[0])):
        for rank, (model, made) in enumerate(zip(models, optimizers, strict=True)):
            items[rank] += len(parts[rank][number][0])
            if len(parts[rank][number][0]):
                batch = [parts[rank][number]]
                reference.train(model, ours.mse, made, batch, max_norm=max_norm)
                continue
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            made.step()
        if (number + 1) % every == 0:
            averaged_by_hand(models, optimizers, items)
            items = [0] * len(parts)
        for trace, model, made in zip(traces, models, optimizers, strict=True):
            trace.append(copied(held(model, made)))
    return traces


def averaged_by_hand(models, optimizers, items):
    weights = torch.tensor(items if sum(items) else [1] * len(items)).double()
    all_held = [held(*each) for each in zip(models, optimizers, strict=True)]
    for name in all_held[0]:
        stacked = torch.stack([each[name] for each in all_held]).double()
        mean = torch.tensordot(weights / weights.sum(), stacked, dims=1)
        for each in all_held:
            each[name].copy_(mean)


def held(model, optimizer):
    """Return parameters, buffers and optimizer state by name."""
    tensors = {name: value.detach() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        kept = optimizer.state[parameter].items()
        tensors |= {f"{name} {key}": each for key, each in kept if isinstance(each, torch.Tensor)}
    return tensors


def copied(tensors):
    return {name: value.clone() for name, value in tensors.items()}
