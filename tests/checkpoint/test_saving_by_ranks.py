"""save_model on several ranks: complete or absent, refused for parts of a model, and small in memory."""

import os
import subprocess
import sys
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import accel_fn as af
from accel_fn.errors import PeerError
from accel_fn.testing import simulate
from tests.checkpoint.test_weights import FILES, Bag, bag, loaded, names
from tests.support.forked_ranks import run_worlds
from tests.support.processes import ROOT, free_port, launch


def cut(model, mesh):
    """Put the tensors of a model in shards on a mesh."""
    found = Bag()
    for name, value in model.state_dict().items():
        shards = distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
        found.register_parameter(name, nn.Parameter(shards))
    return found


def sharded_bag(state, value, **given):
    return cut(bag(value, **given), af.device_mesh(state)["dp"])


# -- parts of a model


def half(rank, num_layers=4):
    """Return the layers of one of two ranks, named as in the whole model."""
    layers = {f"layer{at}": nn.Linear(2, 2) for at in range(num_layers) if at // 2 == rank}
    return nn.ModuleDict(layers)


HALVES = r"""model must hold the same tensors on every rank, got differences:
  layer0\.weight: on rank 0 of 2 alone
  layer0\.bias: on rank 0 of 2 alone
  layer1\.weight: on rank 0 of 2 alone
  layer1\.bias: on rank 0 of 2 alone
  layer2\.weight: on rank 1 of 2 alone
(  .*\n){3}save the parts, """


def refuse_halves(folder, state):
    with pytest.raises(ValueError, match=f"^save_model: {HALVES}"):
        af.save_model(half(state.rank), folder, state=state)
    with pytest.raises(ValueError, match=f"^whole_state_dict: {HALVES}"):
        af.checkpoint.whole_state_dict(half(state.rank), state)
    af.barrier(state)


def test_halves_of_a_model_are_refused_by_name(tmp_path):
    simulate(partial(refuse_halves, tmp_path), world_size=2)
    assert names(tmp_path) == []


def test_sharded_stages_of_a_pipeline_are_refused_without_a_state(tmp_path):
    def run(state):
        stage = state.rank // 2
        model = Bag(**{f"x{stage}": torch.ones(4)})
        with pytest.raises(ValueError, match=r"x0: on ranks 0, 1 of 4 alone\n  x1: on ranks 2, 3"):
            af.save_model(cut(model, af.device_mesh(state)["dp"]), tmp_path)

    simulate(run, mesh={"pp": 2, "dp": 2})
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.ones(3), r"float32 \[2\] on rank 0 and float32 \[3\] on rank 1"),
        (torch.ones(2).double(), r"float32 \[2\] on rank 0 and float64 \[2\] on rank 1"),
    ],
)
def test_other_shapes_and_dtypes_are_refused(tmp_path, tensor, text):
    def run(state):
        model = Bag(x=tensor if state.rank else torch.ones(2))
        with pytest.raises(ValueError, match=f"x: {text}"):
            af.save_model(model, tmp_path, state=state)

    simulate(run, world_size=2)


def test_arguments_that_differ_are_refused_on_all_ranks(tmp_path):
    def run(state):
        model, rule = sharded_bag(state, 1), "must be the same on every rank"
        with pytest.raises(ValueError, match=f"^save_model: max_shard_size {rule}, got 17 on rank"):
            af.save_model(model, tmp_path, 16 + state.rank)
        error = TypeError if state.rank else PeerError
        with pytest.raises(error, match="dtype must be a floating-point"):
            af.save_model(model, tmp_path, dtype=torch.int8 if state.rank else None)

    simulate(run, world_size=2)
    assert names(tmp_path) == []


def test_with_a_state_every_rank_calls_and_the_main_rank_writes_replicas(tmp_path):
    simulate(lambda state: af.save_model(bag(state.rank), tmp_path, 16, state=state), world_size=3)
    assert loaded(tmp_path) == 0


# -- folders


BLIND = (
    "save_model: folder should be one that all ranks see and can write to, .* in which {ranks} cannot find "
    "or write a file of rank 0; rank 0 writes all "
)


@pytest.mark.parametrize("wait", [True, False])
def test_where_a_rank_does_not_see_the_folder_the_main_rank_writes(tmp_path, wait):
    def run(state):
        folder = tmp_path / ("b" if state.rank == 1 else "a")
        model = sharded_bag(state, 7)
        af.save_model(model, folder, 16, wait=wait)
        af.save_model(model, tmp_path / "other")

    (tmp_path / "b").mkdir()
    with pytest.warns(UserWarning, match=BLIND.format(ranks="rank 1")) as caught:
        simulate(run, world_size=3)
    assert len(caught) == 1
    assert names(tmp_path / "a") == FILES[16]
    assert loaded(tmp_path / "a") == 7
    assert names(tmp_path / "b") == []


def test_one_file_needs_no_folder_that_all_ranks_see(tmp_path):
    def run(state):
        af.save_model(sharded_bag(state, 7), tmp_path / str(state.rank))

    simulate(run, world_size=2)
    assert loaded(tmp_path / "0") == 7
    assert not (tmp_path / "1").exists()


def test_a_rank_that_cannot_write_leaves_the_old_set_on_all_ranks(tmp_path, monkeypatch):
    af.save_model(bag(1), tmp_path, 16)
    fsync = os.fsync

    def full(file):
        if "00002-of-00002.new" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError("no space left")
        fsync(file)

    monkeypatch.setattr(os, "fsync", full)

    def run(state):
        with pytest.raises((OSError, PeerError), match="no space left"):
            af.save_model(sharded_bag(state, 2), tmp_path, 16)
        model = sharded_bag(state, 2)
        af.save_model(model, tmp_path, 16, wait=False)
        with pytest.raises(
            (RuntimeError, PeerError), match="written in the background, but that fail"
        ):
            af.save_model(model, tmp_path, 16)

    simulate(run, world_size=2)
    assert names(tmp_path) == FILES[16]
    assert loaded(tmp_path) == 1


KILLED = """
import os, signal, sys
import accel_fn as af
from tests.checkpoint.test_saving_by_ranks import sharded_bag

with af.distributed(device="cpu", timeout_s=20) as state:
    model = sharded_bag(state, 2)
    left = {place} if state.rank == {rank} else -1

    def count(event, arguments):
        global left
        if event in ("open", "os.rename", "os.remove", "os.link") and {folder!r} in str(arguments[0]):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(count)
    af.save_model(model, {folder!r}, 8, wait={wait}, state=state)
    af.barrier(state)  # a thread that writes waits for a lost rank until a collective has failed
say("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "wait", "places"),
    [
        (0, True, range(32)),
        (1, True, range(7)),
        (0, False, range(1, 35, 3)),
        (1, False, range(0, 10, 2)),
    ],
    ids=["main rank", "other rank", "main rank in the background", "other rank in the background"],
)
def test_a_kill_before_any_file_operation_leaves_a_whole_set(tmp_path, rank, wait, places):
    scripts, folders = {}, {}
    for place in places:
        name = f"killed_at_{place}"
        folders[name] = tmp_path / f"{name}_folder"
        af.save_model(bag(1), folders[name], 8)
        given = {"place": place, "rank": rank, "folder": str(folders[name]), "wait": wait}
        scripts[name] = KILLED.format(**given)
    ends = run_worlds(scripts, tmp_path, num_at_once=2)
    killed = [ranks[rank].exit_code == -9 for ranks in ends.values()]
    assert killed == sorted(killed, reverse=True)
    assert killed[0]
    assert not killed[-1]  # so every moment was tried
    found = [loaded(folder) for folder in folders.values()]
    assert found == sorted(found)
    assert {found[0], found[-1]} == {1, 2}
    for folder in folders.values():
        af.save_model(bag(3), folder, 8)
        assert names(folder) == FILES[8]


# -- real ranks


REAL = """
import warnings
import accel_fn as af
from tests.checkpoint import test_saving_by_ranks as tests

with af.distributed(device="cpu", timeout_s=60) as state:
    tests.refuse_halves({folder!r}, state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = {folder!r} + f"/{{state.rank}}"
        af.save_model(tests.sharded_bag(state, 7), folder, 16)
    say(state.rank, len([each for each in caught if "rank 1 cannot find" in str(each.message)]))
"""


def test_real_ranks_refuse_halves_and_see_that_a_folder_is_not_shared(tmp_path):
    launch(REAL.format(folder=str(tmp_path)), expect=["0 1", "1 0"])
    assert loaded(tmp_path / "0") == 7
    assert not (tmp_path / "1").exists()


MEMORY = """
import sys, threading, time
import torch
from torch import nn
import torch.distributed.fsdp
import accel_fn as af

WIDTH, DEPTH, PARTS = 1024, 48, 2

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(PARTS))
    def forward(self, inputs):
        return inputs + self.down(torch.tanh(self.up(inputs)))

def loss_fn(model, batch):
    return model(batch).mean()

with af.distributed(device="cpu", timeout_s=60) as state:
    model = nn.Sequential(*[Block() for _ in range(DEPTH)])
    plan = af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1))
    state, step = af.build(af.wrap_fsdp()(plan), state, checks=())
    shards = sum(each.to_local().nbytes for each in model.parameters())
    af.save_model(nn.Linear(2, 2), sys.argv[1] + str(state.rank))  # imports
    wait, base, peak, stop = eval(sys.argv[2]), anonymous(), 0, False
    def watch():
        global peak
        while not stop:
            peak = max(peak, anonymous())
            time.sleep(0.001)
    thread = threading.Thread(target=watch)
    thread.start()
    began = time.perf_counter()
    af.save_model(model, sys.argv[1], "50MB", wait=wait)
    seconds = time.perf_counter() - began
    stop = True
    thread.join()
    print((peak - base) / shards, 4 * WIDTH * WIDTH / shards, seconds)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads memory from /proc")
@pytest.mark.parametrize(("wait", "most"), [(True, 0.3), (False, 1.3)])
def test_a_rank_holds_its_shards_and_one_tensor(tmp_path, wait, most):
    """Of 100 M parameters on two ranks; with a fixed allocator, which gives memory back at once."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    world |= {
        "LOCAL_WORLD_SIZE": "2",
        "MALLOC_MMAP_THRESHOLD_": "262144",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-W", "ignore", "-c", MEMORY, str(tmp_path / "model"), str(wait)]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                rank.kill()
    for line in said:
        above, tensor, _ = map(float, line.split())
        assert above <= most + tensor
