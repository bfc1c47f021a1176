"""Measures how long a run waits for a checkpoint of torch.save, torch's DCP, accelerate and
accel_fn."""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import accel_fn as af
from accel_fn.checkpoint.background import finish_writing
from accel_fn.checkpoint.files import memory_of, read_into
from tests.tools.benchmarks.measuring import Block, Work, in_turns, time_block
from tests.tools.benchmarks.results import Row, Table, make_row

WIDTH, MOST_ROUNDS = 2048, 7
ASYNC, OURS_ASYNC = "DCP, async_save", "accel_fn, wait=False"
SAVING = ("torch.save", "DCP", "accelerate", "accel_fn", ASYNC, OURS_ASYNC)
FLOOR = "one read, unchecked"
LOADING = ("accelerate", "torch.load", "DCP", FLOOR, "accel_fn")
LOAD, AGAIN, RESUME = "load", "load again", "load in a new process"
IMPORTED = (
    "accel_fn.checkpoint.save",
    "accel_fn.checkpoint.load",
    "accelerate",
    "torch.utils.serialization.config",  # imported by the first torch.load
    "xxhash",  # imported by accel_fn's first hash
)
TARGETS = {("save", OURS_ASYNC): 0.15, (LOAD, "accel_fn"): 0.40}


class Run:
    """A model and AdamW, shared by all ways to save and load them."""

    def __init__(self, num_layers: int, folder: Path) -> None:
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.folder = folder
        plan = af.Plan(lambda model, batch: model(batch).mean(), self.model, self.optimizer)
        self.state, self.step = af.build(plan, af.DistState())
        self.writing: Any = None
        """DCP's write in the background."""
        self.accelerator: Any = None
        if find_spec("accelerate"):
            from accelerate import Accelerator

            self.accelerator = Accelerator(cpu=True)
            self.accelerator.prepare(self.model, self.optimizer)

    def train(self) -> None:
        """Make one update, so that the optimizer has a state."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def ways_to_save(self) -> dict[str, Work]:
        state, step, folder, theirs = self.state, self.step, self.folder, self.accelerator
        ways: dict[str, Work] = {
            "torch.save": lambda: torch.save(self._dicts(), folder / "torch.pt"),
            "DCP": lambda: dcp.save(self._flat(), checkpoint_id=folder / "dcp"),
            "accelerate": lambda: theirs.save_state(str(folder / "accelerate")),
            "accel_fn": lambda: af.save(step, state, folder / "ours"),
            ASYNC: self._async,
            OURS_ASYNC: lambda: af.save(step, state, folder / "ours_async", wait=False),
        }
        return self._installed(ways)

    def ways_to_load(self) -> dict[str, Work]:
        theirs = self.accelerator
        ways: dict[str, Work] = {
            "accelerate": lambda: theirs.load_state(str(self.folder / "accelerate")),
            "torch.load": self._torch_load,
            "DCP": self._dcp_load,
            FLOOR: self._read,
            "accel_fn": lambda: af.load(self.step, self.state, self.folder / "ours"),
        }
        return self._installed(ways)

    def finish(self) -> None:
        """Wait, outside the clock, until background writes have ended."""
        finish_writing(self.step.notes, self.state, "save")
        if self.writing is not None:
            self.writing.result()

    def _installed(self, ways: dict[str, Work]) -> dict[str, Work]:
        return {name: ways[name] for name in ways if name != "accelerate" or self.accelerator}

    def _dicts(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _flat(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _async(self) -> None:
        self.writing = dcp.async_save(self._flat(), checkpoint_id=self.folder / "dcp_async")

    def _torch_load(self) -> None:
        saved = torch.load(self.folder / "torch.pt", weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def _dcp_load(self) -> None:
        saved = self._flat()
        dcp.load(saved, checkpoint_id=self.folder / "dcp")
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )

    def _held(self) -> Iterator[Tensor]:
        """Return parameters and moments; allocate moments that are missing."""
        for parameter in self.model.parameters():
            moments = self.optimizer.state[parameter]
            yield parameter.detach()
            for name in ("exp_avg", "exp_avg_sq"):
                yield moments.setdefault(name, torch.empty_like(parameter))

    def write(self) -> None:
        """Write the file that "one read, unchecked" reads."""
        with (self.folder / "flat").open("wb") as file:
            for tensor in self._held():
                file.write(memory_of(tensor))

    def _read(self) -> None:
        """Read with the least work possible: no hash, no format, one system call for each
        tensor."""
        with (self.folder / "flat").open("rb", buffering=0) as file:
            start = 0
            for tensor in self._held():
                start += read_into(memory_of(tensor), file.fileno(), start)

    @torch.no_grad()
    def spoil(self) -> None:
        """Overwrite the tensors, so that a load can be checked."""
        for tensor in self._held():
            tensor.fill_(7.0)

    def corner(self) -> list[float]:
        weight = self.model[0].weight
        found = [weight[0, :4], self.optimizer.state[weight]["exp_avg"][0, :4]]
        return torch.cat(found).tolist()  # type: ignore[no-any-return]


def measure(num_layers: int, rounds: int, folder: Path) -> dict[str, dict[str, list[Any]]]:
    """Time every way, in turns: saving in one process, loading in a new one each."""
    saved = _in_child(lambda: _measure_saving(Run(num_layers, folder), rounds))
    measured = {"save": saved["save"], AGAIN: saved[AGAIN]}
    for kind in (LOAD, RESUME):
        measured[kind] = blocks = {name: [] for name in saved["load"]}
        for name in in_turns(saved["load"], rounds):
            run = partial(Run, num_layers, folder)
            found = _in_child(partial(_measure_loading, run, name, trained=kind == LOAD))
            assert found["corner"] == saved["corner"], name
            blocks[name].append(found["block"])
    return measured


def _measure_saving(run: Run, rounds: int) -> dict[str, Any]:
    run.train()
    run.write()
    ways = run.ways_to_save()
    for way in ways.values():
        way()  # the first call also imports and allocates
        run.finish()
    blocks: dict[str, list[Any]] = {name: [] for name in ways}
    for name in in_turns(list(ways), rounds):
        gc.collect()
        os.sync()  # do not wait for what another way has written
        blocks[name].append(asdict(time_block(ways[name])))
        run.finish()
    corner = run.corner()
    return {
        "save": blocks,
        "load": list(run.ways_to_load()),
        "corner": corner,
        AGAIN: _measure_loading_again(run, corner, rounds),
    }


def _measure_loading_again(run: Run, corner: list[float], rounds: int) -> dict[str, list[Any]]:
    """Load repeatedly in one process, so that the allocator keeps buffers between loads."""
    ways = run.ways_to_load()
    blocks: dict[str, list[Any]] = {name: [] for name in ways}
    for name in in_turns(list(ways), rounds):
        run.spoil()
        gc.collect()
        blocks[name].append(asdict(time_block(ways[name])))
        assert run.corner() == corner, name
    return blocks


def _measure_loading(make_run: Callable[[], Run], name: str, *, trained: bool) -> dict[str, Any]:
    """Time a load into a run that has trained, and one into a new run without optimizer state."""
    run = make_run()
    if trained:
        run.train()
    block = time_block(run.ways_to_load()[name])
    return {"block": asdict(block), "corner": run.corner()}


def _in_child(work: Callable[[], Any]) -> Any:
    """Return the result of a call in a new process that has imported everything and holds no
    tensors."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        with os.fdopen(writes, "w") as file:
            json.dump(work(), file)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as file:
        told = file.read()
    assert os.waitpid(pid, 0)[1] == 0
    return json.loads(told)


def compare_saving(name: str, num_layers: int, rounds: int) -> list[Table]:
    """Measure in a separate process, whose memory is managed like a user's."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(num_layers), str(min(rounds, MOST_ROUNDS)), folder]
        done = subprocess.run(
            [sys.executable, "-m", "tests.tools.benchmarks.saving", *arguments],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    measured = json.loads(done.stdout.splitlines()[-1])
    tables = []
    for kind, names in (("save", SAVING), (LOAD, LOADING), (AGAIN, LOADING), (RESUME, LOADING)):
        blocks = {each: [Block(**b) for b in of_one] for each, of_one in measured[kind].items()}
        tables.append(_table(f"{name}, {kind}", kind, names, blocks))
    return tables


def _table(name: str, kind: str, names: tuple[str, ...], blocks: dict[str, list[Block]]) -> Table:
    """Make the table of wall times, since that is how long a run waits."""
    waited = {each: [Block(b.wall, b.wall, b.others) for b in blocks[each]] for each in blocks}
    first = next(iter(waited.values()))
    rows = [
        make_row(each, waited[each], first, 1, 0.0, TARGETS.get((kind, each)))
        if each in waited
        else Row(each, "not installed")
        for each in names
    ]
    every = [block.is_disturbed for of_one in blocks.values() for block in of_one]
    return Table(name, tuple(rows), disturbed=sum(every) / len(every), clock="wall")


SIZES = {"checkpoint, 20 M parameters": 5, "checkpoint, 100 M parameters": 24}


def main(num_layers: str, rounds: str, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in IMPORTED:
        if find_spec(name):
            importlib.import_module(name)
    print(json.dumps(measure(int(num_layers), int(rounds), Path(folder))))


if __name__ == "__main__":
    main(*sys.argv[1:])
