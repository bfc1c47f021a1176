"""How long a run waits for a checkpoint: by torch.save, by torch's DCP, accelerate and accel_fn."""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import accel_fn as af
from tests.benchmarks.measuring import Block, time_block
from tests.benchmarks.results import Row, Table, make_row

WIDTH, MOST_ROUNDS = 2048, 7
ASYNC, OURS_ASYNC = "DCP, async_save", "accel_fn, wait=False"
SAVING = ("torch.save", "DCP", "accelerate", "accel_fn", ASYNC, OURS_ASYNC)
LOADING = ("accelerate", "torch.load", "DCP", "accel_fn")
TARGETS = {("save", OURS_ASYNC): 0.15, ("load", "accel_fn"): 0.40}

Then = Callable[[], object]
"""What is waited for outside the clock."""


class Run:
    """A model and AdamW, and ways to save and load them. All ways share them."""

    def __init__(self, num_layers: int, folder: Path) -> None:
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.folder = folder
        plan = af.Plan(lambda model, batch: model(batch).mean(), self.model, self.optimizer)
        self.state, self.step = af.build(af.DistState(), plan)
        self.accelerator: Any = None
        if find_spec("accelerate"):
            from accelerate import Accelerator

            self.accelerator = Accelerator(cpu=True)
            self.accelerator.prepare(self.model, self.optimizer)

    def train(self) -> None:
        """One update, so that the optimizer has a state."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def ways_to_save(self) -> dict[str, Callable[[], Then | None]]:
        ways: dict[str, Callable[[], Then | None]] = {
            "torch.save": lambda: torch.save(self._dicts(), self.folder / "torch.pt"),
            "DCP": lambda: dcp.save(self._flat(), checkpoint_id=self.folder / "dcp") and None,
            "accel_fn": lambda: af.save(self.folder / "ours", self.state, self.step) and None,
            ASYNC: self._async,
            OURS_ASYNC: self._ours_async,
        }
        if self.accelerator is not None:
            ways["accelerate"] = lambda: (
                self.accelerator.save_state(str(self.folder / "accelerate")) and None
            )
        return {name: ways[name] for name in SAVING if name in ways}

    def ways_to_load(self) -> dict[str, Callable[[], Then | None]]:
        ways: dict[str, Callable[[], Then | None]] = {
            "torch.load": self._torch_load,
            "DCP": self._dcp_load,
            "accel_fn": lambda: af.load(self.folder / "ours", self.state, self.step) and None,
        }
        if self.accelerator is not None:
            ways["accelerate"] = lambda: (
                self.accelerator.load_state(str(self.folder / "accelerate")) and None
            )
        return {name: ways[name] for name in LOADING if name in ways}

    def _dicts(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _flat(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _async(self) -> Then:
        found: Any = dcp.async_save(self._flat(), checkpoint_id=self.folder / "dcp_async")
        return found.result  # type: ignore[no-any-return]

    def _ours_async(self) -> Then:
        af.save(self.folder / "ours_async", self.state, self.step, wait=False)
        return partial(self.step.notes["background"].finish, self.state, "save")

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

    def corner(self) -> list[float]:
        weight = self.model[0].weight
        found = [weight[0, :4], self.optimizer.state[weight]["exp_avg"][0, :4]]
        return torch.cat(found).tolist()  # type: ignore[no-any-return]


def measure(num_layers: int, rounds: int, folder: Path) -> dict[str, dict[str, list[Any]]]:
    """Blocks of every way, in turns: saving in one process, loading in a new one each."""
    saved = _in_child(lambda: _measure_saving(Run(num_layers, folder), rounds))
    names = list(saved["load"])
    blocks: dict[str, list[Any]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found = _in_child(lambda name=name: _measure_loading(num_layers, folder, name))
            assert found["corner"] == saved["corner"], name
            blocks[name].append(found["block"])
    return {"save": saved["save"], "load": blocks}


def _measure_saving(run: Run, rounds: int) -> dict[str, Any]:
    run.train()
    ways = run.ways_to_save()
    for way in ways.values():
        (way() or bool)()  # the first time is another
    names = list(ways)
    blocks: dict[str, list[Any]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()
            os.sync()  # what others have written is not waited for here
            then: list[Then] = []
            blocks[name].append(asdict(time_block(partial(_call, ways[name], then))))
            then[0]()
    return {"save": blocks, "load": list(run.ways_to_load()), "corner": run.corner()}


def _measure_loading(num_layers: int, folder: Path, name: str) -> dict[str, Any]:
    """As a run that is resumed: a new model, an optimizer that has made no update."""
    run = Run(num_layers, folder)
    block = time_block(partial(_call, run.ways_to_load()[name], []))
    return {"block": asdict(block), "corner": run.corner()}


def _in_child(work: Callable[[], Any]) -> Any:
    """What it gives, in a process that has imported all and has nothing in memory yet."""
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


def _call(way: Callable[[], Then | None], then: list[Then]) -> None:
    then.append(way() or bool)


def compare_saving(name: str, num_layers: int, rounds: int) -> list[Table]:
    """Measured in a process of its own, whose memory is managed as any user's is."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(num_layers), str(min(rounds, MOST_ROUNDS)), folder]
        done = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.saving", *arguments],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    measured = json.loads(done.stdout.splitlines()[-1])
    tables = []
    for kind, names in (("save", SAVING), ("load", LOADING)):
        blocks = {each: [Block(**b) for b in of_one] for each, of_one in measured[kind].items()}
        tables.append(_table(f"{name}, {kind}", kind, names, blocks))
    return tables


def _table(name: str, kind: str, names: tuple[str, ...], blocks: dict[str, list[Block]]) -> Table:
    """Of wall time: it is what a run waits for."""
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
    for name in ("accel_fn.checkpoint._saving", "accel_fn.checkpoint._loading", "accelerate"):
        if find_spec(name):
            importlib.import_module(name)
    print(json.dumps(measure(int(num_layers), int(rounds), Path(folder))))


if __name__ == "__main__":
    main(*sys.argv[1:])
