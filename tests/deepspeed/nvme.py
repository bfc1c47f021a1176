"""Offload to NVMe: to files, in which DeepSpeed keeps tensors of 1 MiB and more."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import accel_fn as af
from tests.deepspeed import checkpoints
from tests.deepspeed.cases import batches, distance, relative, train, whole


def cases(folder):
    return {
        "nvme": partial(trains, folder=folder),
        "nvme resume": partial(resumes, folder=folder),
        "nvme moves": partial(moves, folder=folder),
    }


def wide() -> nn.Module:
    """A model whose shards on two ranks are larger than 1 MiB."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 768), nn.Tanh(), nn.Linear(768, 768), nn.Tanh(), nn.Linear(768, 3)
    )


def to_files(folder):
    sharded = {"stage3_param_persistence_threshold": 0}
    return af.wrap_deepspeed(stage=3, offload="nvme", nvme_path=folder, zero_optimization=sharded)


def trains(state, *, folder):
    """How far two ranks are from one, and of how many ranks the optimizer's state is in files."""
    place = folder / "nvme files"
    recipe = af.compose(to_files(place), af.clip(0.5), af.accumulate(2))
    ours, _, norms, *_ = train(state, recipe, "momentum", "uneven", model=wide())
    alone, _, others, *_ = train(af.DistState(), af.clip(0.5), "momentum", model=wide())
    af.barrier(state)
    folders = sorted({each.parent.name for each in place.rglob("*momentum_buffer*.swp")})
    return [max(distance(ours, alone), relative(norms, others)), folders]


def resumes(state, *, folder):
    """Are the bits those of the run that never stopped?"""
    every = batches(5)
    run, step, model = checkpoints.built(state, to_files(folder / "first"), "adamw", wide())
    run = checkpoints.train(run, step, every[:3])
    af.save(folder / "nvme", run, step)
    checkpoints.train(run, step, every[3:])
    uninterrupted = whole(model)
    run, step, model = checkpoints.built(state, to_files(folder / "second"), "adamw", wide())
    run = af.load(folder / "nvme", run, step)
    checkpoints.train(run, step, every[3:])
    return all(map(torch.equal, whole(model), uninterrupted))


def moves(state, *, folder):
    """How far a run that goes on under wrap_fsdp is from one that stays."""
    every = batches(5)
    run, step, model = checkpoints.built(state, to_files(folder / "third"), "adamw", wide())
    run = checkpoints.train(run, step, every[:3])
    af.save(folder / "nvme moves", run, step)
    checkpoints.train(run, step, every[3:])
    stayed = whole(model)
    run, step, model = checkpoints.built(state, af.wrap_fsdp(), "adamw", wide())
    run = af.load(folder / "nvme moves", run, step)
    checkpoints.train(run, step, every[3:])
    return distance(whole(model), stayed)
