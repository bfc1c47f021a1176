"""Every transform, alone and in pairs: the step on the device is the step on the CPU, without waits."""

import itertools
import re
from collections import Counter

import pytest
import torch

import accel_fn as af
from tests.sim.programs import OPTIMIZERS, STEADY, assert_equal, make_model, train

TRANSFORMS = {
    "fp16": lambda: af.with_amp("fp16", init_scale=2.0**10),
    "bf16": lambda: af.with_amp("bf16"),
    "accumulate(2)": lambda: af.accumulate(2),
    "accumulate(auto)": lambda: af.accumulate("auto"),
    "clip": lambda: af.clip(0.1),
    "clip_value": lambda: af.clip_value(0.05),
    "skip_nonfinite": lambda: af.skip_nonfinite(),
    "skip_spikes": lambda: af.skip_spikes(),
    "schedule": lambda: af.schedule(lambda number: 0.9**number),
    "average": lambda: af.average(0.9),
    "average.uniform": lambda: af.average.uniform(),
    "freeze": lambda: af.freeze("first", until=3),
    "checkpoint": lambda: af.checkpoint_activations(),
    "checkpoint(offload)": lambda: af.checkpoint_activations(offload=True),
    "fsdp": lambda: af.wrap_fsdp(param_dtype=torch.float32),
    "fsdp(offload)": lambda: af.wrap_fsdp(offload=True),
    "ddp": lambda: af.wrap_ddp(),
    "reproducible": lambda: af.reproducible(2),
    "check_replicas": lambda: af.check_replicas(1),
}
OFFLOADED = [
    ("fsdp(offload)", "fp16", "clip", "schedule", "average"),
    ("fsdp(offload)", "accumulate(2)", "clip", "skip_nonfinite", "schedule"),
    ("fsdp(offload)", "bf16", "accumulate(2)", "skip_spikes", "average"),
]
NAMES = [
    (),
    *((name,) for name in TRANSFORMS),
    *itertools.combinations(TRANSFORMS, 2),
    *OFFLOADED,
]
NUM_PARAMETERS = len([*make_model().parameters()])
GUARDS = {"fp16", "skip_nonfinite", "skip_spikes"}


def settings(names):
    """Of some transforms: the dtype that they ask for, and whether an update may be skipped."""
    half = {"fp16", "bf16", "fsdp"} & {*names}
    return {
        "dtype": torch.float32 if half else torch.float64,
        "overflows": bool(GUARDS & {*names}),
    }


def tolerance(names, optimizer):
    if {"fp16", "bf16"} & {*names}:
        return 2e-3  # autocast has another list of operations for the CPU
    if "fsdp" in names:
        return 1e-6  # in float32
    if "schedule" in names and GUARDS & {*names} and optimizer == "fused":
        return 1e-7  # the learning rate is a tensor in float32, chosen on the device
    return 1e-12


def named_waits(names, optimizer):
    """How often a step of these transforms waits at most, by file: what their `Cost` names."""
    named = Counter()
    if "fsdp(offload)" in names:  # of `fp16`, verdict and factor are on the device
        named["_fsdp_param_group.py"] = NUM_PARAMETERS
        named["update.py"] = 2 * ("fp16" in names)
    elif GUARDS & {*names} and optimizer == "foreach":
        named["update.py"] = 1
    if "checkpoint(offload)" in names:  # for the inputs of two blocks
        parts = 2 if {"accumulate(2)", "reproducible"} & {*names} else 1
        named["activation_checkpointing.py"] = 2 * parts
    named["virtual_ranks.py"] = "reproducible" in names
    return named


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("names", NAMES, ids="+".join)
def test_a_step_is_that_of_the_cpu_and_waits_where_its_cost_names_it(names, optimizer):
    transforms = [TRANSFORMS[name]() for name in names]
    options = {"optimizer": optimizer, **settings(names)}
    try:
        expected = train("cpu", transforms, **options)
    except af.AccelError as refused:
        with pytest.raises(type(refused), match=re.escape(str(refused))):
            train("sim", transforms, **options)
        return
    found = train("sim", transforms, **options)
    assert_equal(found, expected, atol=tolerance(names, optimizer))
    assert found.hazards == []
    named = named_waits(names, optimizer)
    assert found.waits <= Counter({place: number * STEADY for place, number in named.items()})
