"""estimate_memory: the bytes of a step, compared with the same step on real tensors."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import accel_fn as af


def make_mlp():
    """Make two linear layers, 16 -> 32 -> 8, and twelve samples."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    return model, (torch.randn(12, 16), torch.randn(12, 8))


def mse(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


class Tied(nn.Module):
    """A model with a shared weight, a frozen one, and buffers."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Embedding(50, 8)
        self.outer = nn.Linear(8, 50, bias=False)
        self.outer.weight = self.inner.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, index):
        return self.outer(self.norm(self.frozen(self.inner(index))))


def make_tied():
    return Tied(), torch.randint(0, 50, (6,))


def make_transformer():
    """Make a transformer whose layers are deep copies of one."""
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    return nn.TransformerEncoder(layer, 2), torch.randn(16, 32, 64)


def num_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def a_real_step(model, batch, loss_fn, make_optimizer):
    """Return the bytes of gradients and optimizer state, and the peak, by torch's profiler."""
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    for turn in range(2):
        optimizer.zero_grad()
        if turn == 0:
            loss_fn(model, batch).backward()
            optimizer.step()
            continue
        state = [
            value
            for held in optimizer.state.values()
            for value in held.values()
            if isinstance(value, torch.Tensor)
        ]
        inputs = batch if isinstance(batch, tuple) else (batch,)
        held = num_bytes([*model.parameters(), *model.buffers(), *inputs, *state])
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            loss = loss_fn(model, batch)
            loss.backward()
            del loss
            optimizer.step()
    found = [each for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(found, key=lambda each: each.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return num_bytes(gradients), num_bytes(state), held + peak


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "NAdam"])
def test_the_bytes_are_those_of_a_real_step(optimizer):
    [found] = af.contrib.estimate.estimate_memory(make_tied, optimizer=optimizer, device="cpu")
    model, batch = make_tied()
    gradients, state, _ = a_real_step(
        model, batch, lambda model, index: model(index).sum(), getattr(torch.optim, optimizer)
    )
    assert found.parameters == num_bytes(model.parameters())
    assert found.buffers == num_bytes(model.buffers())
    assert found.gradients == gradients < found.parameters
    assert found.optimizer == state
    assert found.batch == num_bytes([batch])


@pytest.mark.parametrize(
    ("make", "loss_fn"),
    [(make_mlp, mse), (make_transformer, lambda model, batch: model(batch).sum())],
    ids=["mlp", "transformer"],
)
def test_the_peak_is_what_torch_allocates(make, loss_fn):
    [found] = af.contrib.estimate.estimate_memory(make, loss_fn=loss_fn, device="cpu")
    _, _, peak = a_real_step(*make(), loss_fn, torch.optim.AdamW)
    assert found.peak == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize(
    ("world_size", "num_microbatches", "samples"),
    [(1, 1, 12), (1, 5, 3), (2, 1, 6), (5, 1, 3), (2, 3, 2), (12, 4, 1)],
)
def test_activations_are_what_backward_needs_of_the_largest_microbatch(
    world_size, num_microbatches, samples
):
    """By hand: hidden activations, which ReLU and the second layer share, outputs, and the loss."""
    [found] = af.contrib.estimate.estimate_memory(
        make_mlp,
        loss_fn=mse,
        world_sizes=[world_size],
        num_microbatches=[num_microbatches],
        device="cpu",
    )
    assert found.activations == samples * (32 + 8) * 4 + 4
    assert found.batch == samples * (16 + 8) * 4


def test_on_a_mesh_ranks_along_dp_share_the_batch():
    def estimated(world_size, mesh):
        return af.contrib.estimate.estimate_memory(
            make_mlp, loss_fn=mse, world_sizes=[world_size], mesh=mesh, device="cpu"
        )[0]

    shared = estimated(2, None)
    assert estimated(4, {"dp": -1, "tp": 2}) == replace(shared, world_size=4)
    assert estimated(4, {"dp": -1}) == estimated(4, None)
    assert estimated(2, {"tp": -1}) == replace(estimated(1, None), world_size=2)


def test_activations_under_autocast_are_the_casts_that_backward_needs():
    """By hand: inputs, hidden activations and second weight in bfloat16, the loss's sum in
    float32."""
    [found] = af.contrib.estimate.estimate_memory(make_mlp, precision="bf16", device="cpu")
    casts = 12 * 16 + 12 * 32 + 32 * 8
    assert found.activations == pytest.approx(casts * 2, abs=8)


def test_activations_that_are_recomputed_are_not_held():
    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_mlp()[0]

        def forward(self, inputs):
            return checkpoint(self.inner, inputs, use_reentrant=False)

    batch = make_mlp()[1]
    held, recomputed = (
        af.contrib.estimate.estimate_memory(make, loss_fn=mse, device="cpu")[0]
        for make in (lambda: make_mlp(), lambda: (Recomputed(), batch))
    )
    assert recomputed.activations == held.activations - 12 * 32 * 4


def test_gradients_are_held_through_the_step_where_ranks_or_microbatches_share_them():
    """The activations of this micro-batch outweigh the rest, so the peak is in its forward."""

    def peak(num_samples, world_size, num_microbatches):
        [found] = af.contrib.estimate.estimate_memory(
            lambda: (nn.Linear(10, 1000), torch.randn(num_samples, 10)),
            loss_fn=lambda model, batch: model(batch).square().exp().mean(),
            optimizer="SGD",
            world_sizes=[world_size],
            num_microbatches=[num_microbatches],
            device="cpu",
        )
        assert found.batch == 500 * 10 * 4
        assert found.gradients == 11 * 1000 * 4
        return found.peak

    alone = peak(500, 1, 1)
    assert peak(1000, 2, 1) == peak(1000, 1, 2) == alone + 11 * 1000 * 4


def test_a_model_that_no_machine_holds_is_estimated():
    [found] = af.contrib.estimate.estimate_memory(lambda: nn.Linear(10**6, 10**6, bias=False))
    assert found.parameters == 4 * 10**12
    assert (found.batch, found.activations, found.peak) == (None, None, None)


def test_a_model_made_on_the_meta_device_is_estimated_alike():
    def on_meta():
        with torch.device("meta"):
            model = Tied()
        return model, make_tied()[1]

    assert af.contrib.estimate.estimate_memory(
        on_meta, device="cpu"
    ) == af.contrib.estimate.estimate_memory(make_tied, device="cpu")


def test_a_model_without_values_is_estimated_alike():
    def without_values():
        return af.empty(Tied), make_tied()[1]

    assert af.contrib.estimate.estimate_memory(
        without_values, device="cpu"
    ) == af.contrib.estimate.estimate_memory(make_tied, device="cpu")


class Reads(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) if inputs.sum() > 0 else inputs


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"optimizer": "Adamw"}, "optimizer must be one of torch.optim, got 'Adamw'; did you mean Adam"),
        ({"optimizer": "LBFGS"}, "optimizer must take such parameters and step .*closure.*'LBFGS'"),
        ({"precision": "fp8"}, 'precision must be "no", "bf16" or "fp16", got \'fp8\''),
        ({"world_sizes": [13]}, "world_sizes must make at most 12 parts of the global batch"),
        ({"world_sizes": [0]}, "world_sizes must be an integer >= 1, got 0"),
        ({"world_sizes": [3], "mesh": {"dp": -1, "tp": 2}}, "mesh must have sizes that divide the"),
        ({"world_sizes": [26], "mesh": {"dp": -1, "tp": 2}}, "world_sizes must make at most 12 parts"),
        ({"num_microbatches": [1.5]}, "num_microbatches must be an integer >= 1, got 1.5"),
        ({"make_model": lambda: 3}, "make_model must give .* or one and a batch, or a Plan, got 'int'"),
        ({"make_model": nn.ReLU}, "model must have parameters that require a gradient, got 'ReLU'"),
        (
            {"make_model": lambda: (Reads(4, 1), torch.ones(12, 4))},
            "the step must not read the values of its tensors",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_estimated_is_refused(arguments, text):
    with pytest.raises(ValueError, match=f"estimate_memory: {text}"):
        af.contrib.estimate.estimate_memory(**{"make_model": make_mlp, "device": "cpu"} | arguments)


def test_gradients_of_half_precision_have_sums_in_float32():
    def make():
        dtype = torch.bfloat16
        return nn.Linear(10, 10, bias=False, dtype=dtype), torch.zeros(4, 10, dtype=dtype)

    one, several = af.contrib.estimate.estimate_memory(make, num_microbatches=[1, 2])
    assert (one.gradients, several.gradients) == (100 * 2, 100 * (2 + 4))
    assert several.peak >= one.peak + 100 * 4 - 100 * 2
