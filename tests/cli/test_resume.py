"""Runs that are killed at random instants resume from their checkpoints and lose nothing."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
import traceback

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from tests.support.processes import free_port, launch

pytestmark = pytest.mark.slow

_NUM_KILLS = 50


def data(dtype=torch.float32):
    """Make samples of ten kinds: inputs, kinds and numbers."""
    generator = torch.Generator().manual_seed(0)
    kinds = torch.randint(10, (150,), generator=generator)
    centres = torch.randn(10, 16, generator=generator, dtype=dtype)
    inputs = centres[kinds] + torch.randn(150, 16, generator=generator, dtype=dtype)
    return TensorDataset(inputs, kinds, torch.arange(150))


def build(state, *layers, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 12), *layers, nn.Tanh(), nn.Linear(12, 10)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return af.build(af.wrap_ddp()(af.Plan(loss_fn, model, optimizer)), state)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def train(state, folder, num_workers, started=lambda: None, *, num_epochs=2):
    """Train with every source of randomness; return a hash of what this rank has at the end."""
    state, step = build(state, nn.BatchNorm1d(12), nn.Dropout(0.3))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(state.rank)
    loader = DataLoader(data(), 8, shuffle=True, num_workers=num_workers)
    loader = af.shard_loader(loader, state)
    if af.latest(folder):
        state = af.load(step, state, folder)
    started()
    last = 19 * num_epochs
    for epoch in loader.epochs(num_epochs, since=state):
        for inputs, kinds, _ in epoch:
            factor = 1 + 0.1 * random.random() + 0.1 * np.random.rand()
            state, _ = step(state, (inputs * factor, kinds))
            if state.step % 3 == 0 or state.step == last:
                wait = (
                    state.step % 2 == 1 or state.step == last
                )  # every other save is in the background
                af.save(step, state, folder, keep=3, keep_every=12, wait=wait)
    assert state.step == last
    return hash_of(step)


def hash_of(step):
    found = hashlib.sha256()
    tensors = list(step.plan.model.state_dict().values())
    for kept in step.plan.optimizer.state_dict()["state"].values():
        tensors += kept.values()
    for tensor in [*tensors, torch.get_rng_state()]:
        found.update(tensor.numpy().tobytes())
    found.update(repr(random.getstate()).encode() + np.random.get_state()[1].tobytes())
    found.update(repr(np.random.get_state()[2:]).encode())
    return found.hexdigest()


# Two processes, forked from this one after its imports, so that many kills take little time.


class World:
    """Ranks that run a function, in processes of their own."""

    def __init__(self, world_size, work):
        port, self.pids = free_port(), []
        self.started, tell = os.pipe()
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
                os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                self._become(work, lambda: os.write(tell, b"."))
            self.pids.append(pid)
        os.close(tell)

    def _become(self, work, started):
        try:
            with af.distributed(device="cpu", timeout_s=20, seed=3) as state:
                work(state, started)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def kill(self, first, *, wait, delay_s, second_delay_s):
        """Kill one rank, then the others, as a launcher would."""
        if wait:
            os.read(self.started, 1)
        time.sleep(delay_s)
        os.kill(self.pids[first], signal.SIGKILL)
        time.sleep(second_delay_s)
        for rank, pid in enumerate(self.pids):
            if rank != first:
                os.kill(pid, signal.SIGKILL)

    def end(self):
        """Wait for the ranks; return their exit codes."""
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        os.close(self.started)
        return codes


def run_world(folder, num_workers, num_epochs=2):
    """Start a world that trains; each rank writes its hash at the end."""

    def work(state, started):
        found = train(state, folder / "run", num_workers, started, num_epochs=num_epochs)
        (folder / f"hash.{state.rank}").write_text(found)

    folder.mkdir(exist_ok=True)
    return World(2, work)


def hashes(folder):
    return [(folder / f"hash.{rank}").read_text() for rank in (0, 1)]


def kill_often(folder, num_kills, num_workers=0):
    """Kill run after run until one reaches its end; return what was killed, and the hashes."""
    draws = random.Random(num_kills + num_workers)
    assert run_world(folder / "never", num_workers).end() == [0, 0]
    expected = hashes(folder / "never")
    kills, while_saving, worst, found = 0, 0, 0, []
    while kills < num_kills:
        place, killed = folder / f"run{len(found)}", 0
        while True:
            world = run_world(place, num_workers)
            first = draws.randrange(2)
            if killed < num_kills:
                wait = draws.random() < 0.8
                delay_s, second_delay_s = draws.uniform(0, 0.25), draws.choice([0, 0.03])
                world.kill(first, wait=wait, delay_s=delay_s, second_delay_s=second_delay_s)
            codes = world.end()
            assert codes[first] in (0, -signal.SIGKILL), codes
            if codes == [0, 0]:
                break
            killed += codes[first] < 0
            while_saving += any((place / "run").glob(".new_step*"))
        kills, worst = kills + killed, max(worst, killed)
        found.append(hashes(place) == expected)
    assert run_world(place, num_workers).end() == [0, 0]  # one more start, from the last checkpoint
    found.append(hashes(place) == expected)
    return {"kills": kills, "while saving": while_saving, "worst": worst, "equal": found}


def run_apart(folder, call, timeout_s=500):
    """Return the result of a function of this module, called in a new process."""
    script = f"""
        import json
        from pathlib import Path
        from tests.cli import test_resume
        folder = Path({str(folder)!r})
        say(json.dumps(test_resume.{call}))
    """
    return json.loads(launch(script, num_processes=1, timeout_s=timeout_s))


@pytest.mark.timeout(600 + 10 * _NUM_KILLS)
def test_a_run_that_is_killed_at_fifty_instants_ends_as_one_that_is_not(tmp_path):
    """Parameters, buffers, optimizer and generators of each rank are equal to the bit."""
    found = run_apart(tmp_path, f"kill_often(folder, {_NUM_KILLS})", 30 + 10 * _NUM_KILLS)
    assert found["kills"] >= _NUM_KILLS
    assert found["while saving"] >= 5, found
    assert found["worst"] >= 3, found
    assert found["equal"] == [True] * len(found["equal"]), found


# -- other world sizes


# -- under the launcher


"""Epochs of a run long enough to be killed often."""
