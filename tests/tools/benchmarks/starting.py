"""Times the start of a user's script, from the command to its first line, by torchrun and
accel_fn."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import accel_fn
from tests.tools.benchmarks.measuring import Block, in_turns, machine_busy_s
from tests.tools.benchmarks.results import Table, make_row

START = "start, a script on 2 ranks"
NUM_RANKS = 2
TARGET = 1.0
# write each line at once
_SCRIPT = r"import os, time; os.write(1, f'{time.monotonic()}\n'.encode())"
_OPTIONS = {
    "torchrun": ("-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS)),
    "accel_fn": ("-m", "accel_fn", "launch", "-n", str(NUM_RANKS), "--cpu"),
}


def compare_starting(name: str, rounds: int) -> list[Table]:
    """Time both commands in turns, after one run that reads the files from the disk."""
    blocks: dict[str, list[Block]] = {each: [] for each in _OPTIONS}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(_SCRIPT)
        for options in _OPTIONS.values():
            start(options, folder)
        for each in in_turns(list(_OPTIONS), rounds):
            blocks[each].append(start(_OPTIONS[each], folder))
    targets = {"accel_fn": TARGET}
    base = blocks["torchrun"]
    rows = [make_row(each, blocks[each], base, 1, 0.0, targets.get(each)) for each in blocks]
    every = [block.is_disturbed for of_one in blocks.values() for block in of_one]
    return [Table(name, tuple(rows), disturbed=sum(every) / len(every), clock="wall")]


def start(options: tuple[str, ...], folder: str) -> Block:
    """Run the script to its end; the wall time ends when its last rank reaches the first line."""
    env = {**os.environ, "PYTHONPATH": str(Path(accel_fn.__file__).parents[1])}
    command = [sys.executable, *options, "script.py"]
    busy, used, began = machine_busy_s(), _used_s(), time.monotonic()
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=env, cwd=folder
    )
    whole = time.monotonic() - began
    others = machine_busy_s() - busy - (_used_s() - used)
    lines = [float(line) for line in done.stdout.split()]
    assert len(lines) == NUM_RANKS
    waited = max(lines) - began
    return Block(waited, waited, others * waited / whole)


def _used_s() -> float:
    """Return the CPU time of this process and of all children that it has waited for."""
    return sum(os.times()[:4])
