"""Every transform, alone and in pairs: the step on the device is the step on the CPU, without waits."""

import itertools
import re
from collections import Counter

import pytest
import torch

import accel_fn as af
from tests.gpu.parts import GUARDS, TRANSFORMS
from tests.sim.programs import OPTIMIZERS, STEADY, assert_equal, make_model, train

EVERY = {
    **TRANSFORMS,
    "average.uniform": lambda: af.swa(),
    "freeze": lambda: af.freeze("first", until=3),
    "ddp": lambda: af.wrap_ddp(),
    "check_replicas": lambda: af.check_replicas(1),
    "log_to": lambda: af.log_to(lambda step, values: None, every=1),
}
OFFLOADED = [
    ("fsdp(offload)", "fp16", "clip", "schedule", "average"),
    ("fsdp(offload)", "accumulate(2)", "clip", "skip_nonfinite", "schedule"),
    ("fsdp(offload)", "bf16", "accumulate(2)", "skip_spikes", "average"),
]
NAMES = [
    (),
    *((name,) for name in EVERY),
    *itertools.combinations(EVERY, 2),
    *OFFLOADED,
]
NUM_PARAMETERS = len([*make_model().parameters()])


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
    transforms = [EVERY[name]() for name in names]
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
