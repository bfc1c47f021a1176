"""On a mesh, a process holds its part of parameters, gradients and AdamW state of 20 million parameters."""

import json

import pytest

from tests.support.processes import launch

WIDTH, DEPTH = 512, 10
SCRIPT = """
import json, torch
from torch import nn
import accel_fn as af

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear({width}, 4 * {width}), nn.Linear(4 * {width}, {width})
    def forward(self, inputs):
        return inputs + self.down(self.up(inputs).relu())

def held(tensors):
    storages = [each.to_local().untyped_storage() for each in tensors]
    return sum({{each.data_ptr(): each.nbytes() for each in storages}}.values())

state = af.init(device="cpu", mesh={mesh}, timeout_s=200)
model = nn.Sequential(*[Block() for _ in range({depth})])
names = {{name: each.numel() for name, each in model.named_parameters()}}
replicated = sum(size for name, size in names.items() if name.endswith("down.bias"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
plan = af.Plan(lambda model, batch: model(batch).square().mean(), model, optimizer)
styles = {{"*.up": "colwise", "*.down": "rowwise"}}
state, step = af.build(state, af.compose(af.place(), {wrap}af.wrap_tp(styles))(plan))
batch = af.part(torch.linspace(-1, 1, 4 * {width}).view(4, {width}), state)
state, _ = step(state, batch)
_, grads, _ = step.grads(state, batch)
kept = [value for each in optimizer.state.values() for value in each.values() if value.ndim]
sizes = [held(tensors) for tensors in (model.parameters(), grads.tensors, kept)]
say(json.dumps([sum(names.values()), replicated, sizes]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "wrap"),
    [({"dp": 1, "tp": 2}, ""), ({"dp": 2, "tp": 2}, "af.wrap_fsdp(), ")],
    ids=["tp", "fsdp-tp"],
)
def test_a_rank_of_a_mesh_holds_its_part_of_all(mesh, wrap):
    script = SCRIPT.format(width=WIDTH, depth=DEPTH, mesh=mesh, wrap=wrap)
    world_size = mesh["dp"] * mesh["tp"]
    told = launch(script, num_processes=world_size, timeout_s=300).splitlines()
    assert len(told) == world_size
    for line in told:
        number, replicated, (parameters, gradients, optimizer) = json.loads(line)
        assert number > 20e6
        # The bias of a row-wise layer is whole along tp; float32, and all sizes are even.
        part = 4 * ((number - replicated) // mesh["tp"] + replicated) // mesh["dp"]
        assert part < 4 * number / world_size * 1.001
        assert (parameters, gradients, optimizer) == (part, part, 2 * part)
