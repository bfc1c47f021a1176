"""`af.wrap()` under a launch: shards that a setting chooses train as replicas do."""

import json

import pytest
import torch

TRAIN = """
    import json, os
    import torch
    from torch import nn
    import accel_fn as af

    def loss_fn(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def whole(tensor):
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()

    def trained(state, wrap):
        torch.manual_seed(state.rank)  # all start from rank 0's
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        plan = af.Plan(loss_fn, model, torch.optim.AdamW(model.parameters(), lr=0.05))
        recipe = af.compose(af.place(), wrap, af.accumulate(2), af.clip(0.5))
        state, step = af.build(state, recipe(plan))
        for size in (7, 6, 1):
            batch = torch.sin(torch.arange(size * 4.0).double()).view(size, 4)
            part = batch.tensor_split(state.world_size)[state.rank]
            state, _ = step(state, (part[:, :3], part[:, 3:]))
        shards = [hasattr(each, "full_tensor") for each in model.parameters()]
        return shards, torch.cat([whole(each).flatten() for each in model.parameters()]).tolist()

    state = af.init(timeout_s=60)
    shown = [trained(state, af.wrap()), trained(state, af.wrap_ddp())]
    os.write(1, (json.dumps(shown) + "\\n").encode())
"""


@pytest.mark.slow
def test_shards_by_the_setting_of_a_launch_train_as_replicas(launchers, tmp_path):
    options = ["-n", 2, "--cpu", "--wrap", "fsdp", "script.py"]
    ended = launchers.run(tmp_path, *options, script=TRAIN)
    assert ended.exit_code == 0, ended
    first, second = map(json.loads, ended.stdout.splitlines())
    assert first == second
    (sharded, found), (whole, expected) = first
    assert all(sharded)
    assert not any(whole)
    found, expected = torch.tensor([found, expected], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
