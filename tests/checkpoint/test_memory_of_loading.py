"""The most memory that a rank holds while a model is made empty, sharded and loaded."""

import json
import os
import subprocess
import sys
import tempfile

import pytest

from tests.support.processes import ROOT, free_port

WIDTH, NUM_BLOCKS = 1024, 48
"""100 million parameters: 48 blocks of two matrices of 2**20."""

SCRIPT = """
import json, sys, threading, time

import safetensors.torch
import torch
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.functional as F
from torch import nn

import accel_fn as af


torch.set_num_threads(1)
folder, way = sys.argv[1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear({width}, {width}, bias=False)
        self.down = nn.Linear({width}, {width}, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def model():
    return nn.Sequential(*[Block() for _ in range({blocks})])


def loss_fn(model, batch):
    return F.mse_loss(model(batch), batch)


if way == "write":
    af.save_model(model(), folder, max_shard_size="100MB", dtype=torch.bfloat16)
    sys.exit()
state = af.init(device="cpu", timeout_s=120)
peak, done = 0, threading.Event()


def anonymous():
    # Pages of mapped files do not count.
    return next(int(line.split()[1]) for line in open("/proc/self/status") if "RssAnon" in line)


def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.001)


before = anonymous()
thread = threading.Thread(target=watch)
thread.start()
mine = af.empty(model)
plan = af.Plan(loss_fn, mine, torch.optim.AdamW(mine.parameters()))
state, step = af.build(af.wrap_fsdp()(plan), state)
if way == "files":
    af.load_model(mine, folder, dtype=torch.bfloat16)
else:
    af.load_model(mine, init=lambda module: module.reset_parameters())
done.set()
thread.join()
shards = sum(each.to_local().nbytes for each in mine.parameters())
assert not any(each.to_local().isnan().any() for each in mine.parameters())
print(json.dumps([shards / 2**20, (peak - before) / 2**10]))
"""


@pytest.fixture(scope="module")
def folder():
    """Return a folder with the weights, in several files."""
    with tempfile.TemporaryDirectory() as path:
        run(path, "write")
        yield path


def run(folder, way, num_ranks=1):
    """Run the script; return what the ranks print."""
    script = SCRIPT.format(width=WIDTH, blocks=NUM_BLOCKS)
    # glibc raises the threshold after large blocks are freed: then what is freed stays in the process.
    world = {
        "MALLOC_MMAP_THRESHOLD_": "262144",
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "localhost",
    }
    world |= {
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, folder, way],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    said = [rank.communicate(timeout=280)[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("way", ["files", "init"])
def test_a_rank_holds_its_shards_and_one_tensor(folder, way):
    largest = WIDTH**2 * 4 / 2**20
    for said in run(folder, way, num_ranks=2):
        shards, peak = json.loads(said)
        assert shards == pytest.approx(2 * NUM_BLOCKS * largest / 2)
        assert shards < peak < 1.3 * shards + largest
