"""Each of W processes holds 1/W of parameters, gradients and optimizer state of 100 million
parameters."""

import json

import pytest
import torch

from tests.support.processes import launch

WIDTH = 1024
SCRIPT = """
import ctypes, json, re, torch
from pathlib import Path
from torch import nn
import accel_fn as af

def resident():
    if state.device.type == "cuda":
        return torch.cuda.memory_allocated()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the allocator only keeps
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def held(tensors):
    local = [getattr(each, "to_local", lambda: each)() for each in tensors]
    storages = [each.untyped_storage() for each in local]
    return sum({{each.data_ptr(): each.nbytes() for each in storages}}.values())

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear({width}, 4 * {width}), nn.Linear(4 * {width}, {width})
    def forward(self, inputs):
        return inputs + self.down(self.up(inputs).relu())

state = af.init(device={device!r}, timeout_s=200)
before = resident()
model = nn.Sequential(*[Block() for _ in range({depth})])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
plan = af.Plan(lambda model, batch: model(batch).square().mean(), model, optimizer)
state, step = af.build(af.compose(af.place(), af.wrap_fsdp())(plan), state)
state, _ = step(state, torch.ones(2, {width}))
_, grads, _ = step.grads(state, torch.ones(2, {width}))
kept = [value for each in optimizer.state.values() for value in each.values() if value.ndim]
sizes = [held(tensors) for tensors in (model.parameters(), grads.tensors, kept)]
say(json.dumps([sum(each.numel() for each in model.parameters()), sizes, resident() - before]))
"""


def check_part(world_size, depth, device):
    """Check every rank's parameters, gradients and optimizer state, and its memory in total."""
    script = SCRIPT.format(width=WIDTH, depth=depth, device=device)
    told = launch(script, num_processes=world_size, timeout_s=300).splitlines()
    assert len(told) == world_size
    for line in told:
        number, (parameters, gradients, optimizer), resident = json.loads(line)
        assert number > depth * 8.39e6  # a hundred million with twelve blocks
        part = 4 * number / world_size  # float32; rows of 1024 and 4096 are split evenly
        assert parameters == part
        assert gradients == part
        assert optimizer == 2 * part
        assert resident < 4 * part + 150e6  # modules that torch loads, and one whole block


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "depth"), [(2, 12)])
def test_a_rank_holds_its_part_of_all(world_size, depth):
    check_part(world_size, depth, "cpu")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.device_count() not in (2, 4, 8), reason="needs 2, 4 or 8 CUDA devices"
)
def test_an_accelerator_holds_its_part_of_all():
    check_part(torch.cuda.device_count(), 12, None)
