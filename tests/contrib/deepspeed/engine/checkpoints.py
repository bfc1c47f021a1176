"""Law 9: stop and resume, at one stage, and from one strategy to another."""

from __future__ import annotations

from functools import partial

import torch

import accel_fn as af
from tests.contrib.deepspeed.engine.cases import (
    OPTIMIZERS,
    batches,
    count,
    distance,
    loss_fn,
    make_model,
    rows_of,
    whole,
    zero,
)

STRATEGIES = {
    "wrap_ddp": lambda: af.wrap_ddp(),
    "wrap_fsdp": lambda: af.wrap_fsdp(),
    **{f"stage {stage}": partial(zero, stage) for stage in range(4)},
}


def cases(folder):
    found = {}
    for optimizer in ("sgd", "momentum", "adamw"):
        for stage in range(4):
            found[f"resume {stage} {optimizer}"] = partial(
                resumes, folder=folder, stage=stage, optimizer=optimizer
            )
    for first, second in (
        ("stage 1", "stage 3"),
        ("stage 3", "stage 2"),
        ("stage 2", "wrap_fsdp"),
        ("wrap_fsdp", "stage 3"),
        ("stage 3", "wrap_ddp"),
        ("wrap_ddp", "stage 1"),
        ("stage 0", "stage 2"),
    ):
        found[f"{first} to {second}"] = partial(moves, folder=folder, first=first, second=second)
    for stage in (1, 2, 3):
        found[f"one process {stage}"] = partial(to_one_process, folder=folder, stage=stage)
    for stage in range(4):
        found[f"weights {stage}"] = partial(weights, folder=folder, stage=stage)
        found[f"load_model {stage}"] = partial(loads_weights, folder=folder, stage=stage)
    for stage in (2, 3):
        found[f"resume {stage} offload"] = partial(
            resumes, folder=folder, stage=stage, optimizer="adamw", offload="cpu"
        )
        found[f"other program {stage}"] = partial(of_another_program, folder=folder, stage=stage)
    found["counts"] = partial(counts, folder=folder)
    return found


def built(state, strategy, optimizer, model=None):
    """A program with a schedule, whose model each rank draws anew."""
    model = make_model() if model is None else model
    with torch.no_grad():  # so that a load has something to do
        for each in model.parameters():
            each.mul_(2)
    made = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
    recipe = af.compose(strategy, af.clip(0.5), af.accumulate(2), af.schedule(scheduler))
    return *af.build(recipe(af.Plan(loss_fn, model, made, count)), state), model


def train(state, step, every):
    for batch in every:
        part = batch if state.world_size == 1 else rows_of(batch, state, 11)
        state, _ = step(state, part)
    return state


def home(folder, name):
    return folder / name.replace(" ", "_")


def resumes(state, *, folder, stage, optimizer, offload=None):
    """Are the bits those of the run that never stopped?"""
    place = home(folder, f"resume {stage} {optimizer} {offload}")
    every = batches(5)
    whole_run, step, model = built(state, zero(stage, offload), optimizer)
    whole_run = train(whole_run, step, every[:3])
    af.save(step, whole_run, place, wait=offload is None)
    train(whole_run, step, every[3:])
    uninterrupted = whole(model)
    if offload is not None:
        af.load(step, whole_run, place)  # waits for what is written in the background
    resumed, step, model = built(state, zero(stage, offload), optimizer)
    resumed = af.load(step, resumed, place)
    train(resumed, step, every[3:])
    pairs = zip(whole(model), uninterrupted, strict=True)
    return [resumed.step, all(torch.equal(one, other) for one, other in pairs)]


def moves(state, *, folder, first, second):
    """How far a run that goes on under another strategy is from one that stays."""
    place = home(folder, f"{first} to {second}")
    every = batches(5)
    begun, step, model = built(state, STRATEGIES[first](), "adamw")
    begun = train(begun, step, every[:3])
    af.save(step, begun, place)
    train(begun, step, every[3:])
    stayed = whole(model)
    moved, step, model = built(state, STRATEGIES[second](), "adamw")
    moved = af.load(step, moved, place)
    train(moved, step, every[3:])
    return distance(whole(model), stayed)


def to_one_process(state, *, folder, stage):
    place = home(folder, f"one process {stage}")
    every = batches(5)
    begun, step, model = built(state, zero(stage), "adamw")
    begun = train(begun, step, every[:3])
    af.save(step, begun, place)
    train(begun, step, every[3:])
    stayed = whole(model)
    alone, step, model = built(af.DistState(), af.compose(), "adamw")
    alone = af.load(step, alone, place)
    train(alone, step, every[3:])
    af.barrier(state)
    return distance(whole(model), stayed)


def weights(state, *, folder, stage):
    """save_model writes whole tensors, and whole_state_dict gives them."""
    place = home(folder, f"weights {stage}")
    begun, step, model = built(state, zero(stage), "momentum")
    train(begun, step, batches(1))
    if stage == 3:
        af.save_model(model, place)
    else:
        af.on_main(lambda: af.save_model(model, place), state)
    other = make_model()
    af.load_model(other, place)
    here = whole(model)
    equal = all(map(torch.equal, other.parameters(), here))
    gathered = af.checkpoint.whole_state_dict(model, state)
    names = [name for name, _ in model.named_parameters()]
    if state.is_main:
        equal = equal and all(torch.equal(gathered[n], p) for n, p in zip(names, here, strict=True))
    train(begun, step, batches(2)[1:])  # the engine goes on
    return equal


def loads_weights(state, *, folder, stage):
    """Weights that are loaded once the engine has its own copy."""
    place = home(folder, f"load_model {stage}")
    af.on_main(lambda: af.save_model(make_model(), place), state)
    _, _, model = built(state, zero(stage), "sgd")
    try:
        af.load_model(model, place)
    except ValueError as error:
        return str(error)
    return "loaded"


def counts(state, *, folder):
    """Parameters of one group that were updated another number of times."""
    place = home(folder, "counts")
    begun, step, model = built(state, af.wrap_ddp(), "adamw")
    begun = train(begun, step, batches(1))
    optimizer = step.plan.optimizer
    optimizer.state[model[0].bias]["step"] += 1
    af.save(step, begun, place)
    resumed, step, _ = built(state, zero(2), "adamw")
    try:
        af.load(step, resumed, place)
    except RuntimeError as error:
        return str(error)
    return "nothing is refused"


def of_another_program(state, *, folder, stage):
    """A checkpoint of another model is refused, and the run goes on as if nothing had been."""
    place = home(folder, f"other program {stage}")
    other = torch.nn.Linear(6, 3)
    plan = af.Plan(loss_fn, other, torch.optim.AdamW(other.parameters()), count)
    af.save(*reversed(af.build(af.wrap_ddp()(plan), state)), place)
    every = batches(5)
    ends = []
    for loads in (False, True):
        begun, step, model = built(state, zero(stage), "adamw")
        begun = train(begun, step, every[:2])
        if loads:
            try:
                af.load(step, begun, place)
            except RuntimeError as error:
                refusal = str(error).splitlines()[0]
        train(begun, step, every[2:])
        ends.append(whole(model))
    return [refusal.endswith("must be of this program, got differences:"), distance(*ends)]
