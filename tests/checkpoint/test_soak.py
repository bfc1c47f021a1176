"""Long runs: many checkpoints, steps and builds keep memory, threads and files constant."""

from __future__ import annotations

import json
import shutil

import pytest

import accel_fn as af
from tests.checkpoint.test_checkpoint import make
from tests.checkpoint.test_checkpoint_files import put, with_manifest
from tests.support.forked_ranks import run_worlds
from tests.tools import soak


@pytest.mark.slow
def test_a_thousand_checkpoints_are_listed_and_the_latest_reads_one(tmp_path, capfd):
    state, step = make()
    first = af.save(step, state, tmp_path)
    for number in range(1, 1000):
        path = shutil.copytree(first, tmp_path / f"step_{number:08d}")
        with_manifest(path, put("step", number))
    found = af.checkpoint.list_checkpoints(tmp_path)
    assert [each.step for each in found] == [*range(1000)]
    assert not any(each.damage for each in found)
    (tmp_path / "step_00000998" / "manifest.json").write_text("damaged")
    capfd.readouterr()
    assert af.latest(tmp_path) == tmp_path / "step_00000999"
    assert capfd.readouterr().err == ""  # it would name those that it skips
    shutil.rmtree(tmp_path / "step_00000998")
    af.load(step, state, tmp_path, at=500)
    assert af.save(step, state, tmp_path, keep=2).name == "step_00000000"
    # The new one, and the one that was loaded: the run has left all others.
    assert [each.step for each in af.checkpoint.list_checkpoints(tmp_path)] == [0, 500]


SOAK = """
    import gc, json, os, threading
    import torch
    import accel_fn as af
    from tests.support import strategies as ours

    def built(state):
        model = ours.regression_model()
        plan = af.Plan(ours.mse, model, ours.adamw(model.parameters()))
        recipe = af.compose(af.wrap_ddp(), af.accumulate(2), af.clip(1.0), af.ema(0.9))
        return af.build(recipe(plan), state)

    def held():
        "Bytes in memory, threads and open files, once garbage is gone."
        gc.collect()
        pages = int(open("/proc/self/statm").read().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), threading.active_count(), len(os.listdir("/proc/self/fd"))

    def soak(state, num_steps, every):
        state, step = built(state)
        batch = torch.ones(4, 3).double(), torch.zeros(4, 1).double()
        for _ in range(num_steps):
            state, _ = step(state, batch)
            if state.step % every == 0:
                af.save(step, state, {folder!r}, keep=2, wait=False)
        af.load(step, state, {folder!r})

    world = af.init(device="cpu", timeout_s=300)
    soak(world, 2_000, 200)
    before = [held()]
    soak(world, 20_000, 200)
    before.append(held())
    for _ in range(20):
        soak(world, 2, 2)
    before.append(held())
    for _ in range(200):
        soak(world, 2, 2)
    before.append(held())
    say(json.dumps(before))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_memory_threads_and_files_are_flat(tmp_path, num_processes):
    """The runs have 20,000 steps, 200 builds, and saves in the background."""
    script = SOAK.format(folder=str(tmp_path / "run"))
    ranks = run_worlds({"script": script}, tmp_path, num_processes=num_processes, timeout_s=1700)
    for rank in ranks["script"]:
        assert rank.exit_code == 0, rank.stderr
        for before, after in zip(*[iter(json.loads(rank.stdout))] * 2, strict=True):
            assert after[0] - before[0] < 6 * 2**20  # 300 bytes per step, 30 KB per build
            assert after[1:] == before[1:]


def test_an_end_that_is_a_bit_off_is_noticed_where_bits_are_kept():
    expected, off = (3, [[1.0, [2.0]]]), (3, [[1.0, [2.0 + 2**-51]]])
    assert soak.difference(expected, expected, exact=True) == ""
    assert soak.difference(off, expected, exact=False) == ""
    assert "parameters 4.44089e-16 off" in soak.difference(off, expected, exact=True)
    assert "step 2, not 3" in soak.difference((2, expected[1]), expected, exact=False)
