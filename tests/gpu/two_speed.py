"""Trains GPT-2 124M on two devices with torch's DDP or FSDP, or with accel_fn's."""

from __future__ import annotations

import sys

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import accel_fn as af
from tests.gpu.parts import (
    IS_REHEARSAL,
    by_hand,
    gpt2,
    lm_batches,
    lm_loss,
    measured,
    num_targets,
    stepping,
)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def by_torch(state, sharded):
    model = gpt2().to(state.device)
    if sharded:
        for block in model.transformer.h:
            fully_shard(block)
        wrapped = fully_shard(model)
    else:
        ids = None if IS_REHEARSAL else [state.device.index]
        wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    return by_hand(wrapped, model, adamw(model), state.device)


def ours(state, sharded):
    model = gpt2()
    wrap = af.wrap_fsdp() if sharded else af.wrap_ddp()
    recipe = af.compose(af.place(), af.with_amp("bf16"), wrap, af.clip(1.0))
    return stepping(af.Plan(lm_loss, model, adamw(model), num_targets), state, recipe)


RUNS = {
    "torch-ddp": lambda state: by_torch(state, sharded=False),
    "ddp": lambda state: ours(state, sharded=False),
    "torch-fsdp": lambda state: by_torch(state, sharded=True),
    "fsdp": lambda state: ours(state, sharded=True),
}


def main():
    state = af.init()
    result = measured(RUNS[sys.argv[1]](state), lm_batches(4, seed=state.rank))
    af.print_on_main(f"{sys.argv[1]:12} {result}", state=state)


if __name__ == "__main__":
    main()
