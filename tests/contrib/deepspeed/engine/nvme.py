"""Offload to NVMe: to files, in which DeepSpeed keeps tensors of 1 MiB and more."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from unittest import mock

import torch
from torch import nn

import accel_fn as af
from tests.contrib.deepspeed.engine import checkpoints
from tests.contrib.deepspeed.engine.cases import (
    OPTIMIZERS,
    batches,
    count,
    distance,
    loss_fn,
    relative,
    train,
    whole,
)


def cases(folder):
    return {
        "nvme": partial(trains, folder=folder),
        "nvme resume": partial(resumes, folder=folder),
        "nvme moves": partial(moves, folder=folder),
        "nvme parameters": partial(with_float32, trains, folder=folder, parameters=True),
        "nvme parameters resume": partial(with_float32, resumes, folder=folder, parameters=True),
        "nvme parameters refused": partial(refused, folder=folder),
    }


def wide() -> nn.Module:
    """A model whose large shards on two ranks are larger than 1 MiB, and fill no whole blocks."""
    torch.manual_seed(0)
    sizes = (6, 775, 777, 777, 3)
    layers = [each for size in pairwise(sizes) for each in (nn.Linear(*size), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def to_files(folder, *, parameters=False):
    zero = {"stage3_param_persistence_threshold": 0, "sub_group_size": 10**6}
    if parameters:
        zero["offload_param"] = {"device": "nvme", "max_in_cpu": 0, "buffer_size": 2**19}
    return af.wrap_deepspeed(stage=3, offload="nvme", nvme_path=folder, zero_optimization=zero)


def with_float32(case, state, **options):
    """Run a case as on a device with fp16, where DeepSpeed keeps the dtype of parameters in files."""
    from deepspeed.accelerator import get_accelerator

    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True):
        return case(state, **options)


def trains(state, *, folder, parameters=False):
    """How far two ranks are from one, and of which ranks state and parameters are in files."""
    place = folder / f"nvme files {parameters}"
    to = to_files(place, parameters=parameters)
    recipe = af.compose(to, af.clip(0.5), af.accumulate(2))
    ours, _, norms, *_ = train(state, recipe, "momentum", "uneven", model=wide())
    alone, _, others, *_ = train(af.DistState(), af.clip(0.5), "momentum", model=wide())
    af.barrier(state)
    folders = [
        sorted({each.parent.name for each in place.rglob(f"*{name}*.swp")})
        for name in ("momentum_buffer", "_param")
    ]
    return [max(distance(ours, alone), relative(norms, others)), *folders]


def refused(state, *, folder):
    """Parameters in files without fp16, where DeepSpeed would keep them in bfloat16."""
    from deepspeed.accelerator import get_accelerator

    model = wide()
    plan = to_files(folder, parameters=True)(
        af.Plan(loss_fn, model, OPTIMIZERS["sgd"](model.parameters()), count)
    )
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=False):
        try:
            af.build(plan, state)
        except ValueError as error:
            return str(error)
    return "nothing is refused"


def resumes(state, *, folder, parameters=False):
    """Are the bits those of the run that never stopped?"""
    every = batches(5)
    begin, again = (
        to_files(folder / f"{name} {parameters}", parameters=parameters)
        for name in ("first", "second")
    )
    place = folder / f"nvme {parameters}"
    run, step, model = checkpoints.built(state, begin, "amsgrad", wide())
    run = checkpoints.train(run, step, every[:3])
    af.save(step, run, place)
    checkpoints.train(run, step, every[3:])
    uninterrupted = whole(model)
    run, step, model = checkpoints.built(state, again, "amsgrad", wide())
    run = af.load(step, run, place)
    checkpoints.train(run, step, every[3:])
    return all(map(torch.equal, whole(model), uninterrupted))


def moves(state, *, folder):
    """How far a run that goes on under wrap_fsdp is from one that stays."""
    every = batches(5)
    run, step, model = checkpoints.built(state, to_files(folder / "third"), "adamw", wide())
    run = checkpoints.train(run, step, every[:3])
    af.save(step, run, folder / "nvme moves")
    checkpoints.train(run, step, every[3:])
    stayed = whole(model)
    run, step, model = checkpoints.built(state, af.wrap_fsdp(), "adamw", wide())
    run = af.load(step, run, folder / "nvme moves")
    checkpoints.train(run, step, every[3:])
    return distance(whole(model), stayed)
