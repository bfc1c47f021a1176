"""Trains on two devices; the result is compared with one device's, which it writes if it is alone."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn

import accel_fn as af
from tests.gpu.parts import distance, reason, whole


class Words(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, 32, sparse=sparse)
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)]
        )
        self.head = nn.Linear(32, 1)

    def forward(self, words):
        return self.head(self.blocks(self.table(words)))


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def loss_over_ranks(state):
    def joined(model, batch):
        return F.mse_loss(af.gather(model(batch[0]), state), af.gather(batch[1], state))

    return joined


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


RECIPES = {
    "ddp": lambda: af.wrap_ddp(),
    "ddp, guards": lambda: af.compose(
        af.wrap_ddp(),
        af.accumulate(2),
        af.clip(0.5),
        af.skip_nonfinite(),
        af.schedule(lambda num_updates: 0.9**num_updates),
    ),
    "ddp, auto": lambda: af.compose(af.wrap_ddp(), af.accumulate("auto")),
    "ddp, replicas compared": lambda: af.compose(af.wrap_ddp(), af.check_replicas(1)),
    "fsdp": lambda: af.compose(af.wrap_fsdp(), af.clip(0.5)),
    "fsdp, accumulate": lambda: af.compose(af.wrap_fsdp(), af.accumulate(2)),
    "fsdp, checkpoint": lambda: af.compose(af.wrap_fsdp(), af.checkpoint_activations()),
    "fsdp, fp16": lambda: af.compose(af.wrap_fsdp(), af.with_amp("fp16", init_scale=1024.0)),
}


def train(state, loss, recipe, sizes=(17, 30, 2, 16), make=adamw, **options):
    model = Words(**options)
    plan = af.compose(af.place(), recipe)(af.Plan(loss, model, make(model.parameters())))
    state, step = af.build(plan, state)
    generator = torch.Generator().manual_seed(1)
    for size in sizes * 3:
        words = torch.randint(64, (size,), generator=generator)
        targets = torch.randn(size, 1, generator=generator)
        mine = slice(None)
        if state.world_size > 1:  # uneven parts
            mine = slice(0, size // 3) if state.is_main else slice(size // 3, None)
        state, _ = step(state, (words[mine], targets[mine]))
    return whole(model)


def show_devices(state):
    tensor = torch.ones(1, device=state.device)
    sent = af.on_main(lambda: tensor, state)
    print(
        f"rank {state.rank} on {state.device}: on_main gives a tensor on {sent.device}, a host tensor is "
        f"reduced on {af.reduce_sum(torch.ones(1), state).device}",
        flush=True,
    )
    try:
        train(state, loss_fn, af.wrap_ddp(), make=lambda p: torch.optim.SGD(p, 0.1), sparse=True)
        af.print_on_main("sparse tables are trained", state=state)
    except ValueError as error:
        af.print_on_main(reason(error), state=state)


def main():
    state = af.init(timeout_s=60)
    found = {name: train(state, loss_fn, recipe()) for name, recipe in RECIPES.items()}
    for name, wrap in (("ddp", af.wrap_ddp), ("fsdp", af.wrap_fsdp)):
        found[f"gather, {name}"] = train(state, loss_over_ranks(state), wrap(), sizes=(18, 30, 16))
    if state.world_size == 1:
        torch.save(found, sys.argv[1])
        return
    expected = torch.load(sys.argv[1])
    for name, parameters in found.items():
        error = distance(parameters, expected[name])
        verdict = "" if error < (1e-3 if "fp16" in name else 1e-5) else "DIFFERS"
        af.print_on_main(f"{name:24} {error:.1e} {verdict}", state=state)
    show_devices(state)


if __name__ == "__main__":
    main()
