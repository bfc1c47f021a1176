"""Scenarios of several ranks: torch's launcher starts the processes, and barriers enclose the
clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.tools.benchmarks.comparing import compare
from tests.tools.benchmarks.conditions import settle
from tests.tools.benchmarks.jobs import SCENARIOS_OF_TWO
from tests.tools.benchmarks.measuring import Block, Station, Work, machine_busy_s
from tests.tools.benchmarks.results import Table
from tests.tools.benchmarks.tasks import IN_TWO_RANKS, Scenario

ROOT = Path(__file__).parents[3]


def compare_in_world(scenarios: list[Scenario], rounds: int, patience_s: float) -> list[Table]:
    """Return the tables of several ranks, measured in new processes."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "tables.json"
        wanted = {
            "names": [scenario.name for scenario in scenarios],
            "rounds": rounds,
            "patience_s": patience_s,
            "answer": str(answer),
        }
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        program = [str(scenarios[0].world_size), "-m", "tests.tools.benchmarks.worlds"]
        env = {"OMP_NUM_THREADS": "1", **os.environ}
        if sys.platform == "linux":
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        command = [sys.executable, *launcher, *program, json.dumps(wanted)]
        subprocess.run(command, check=True, cwd=ROOT, env=env)
        return [Table.from_json(fields) for fields in json.loads(answer.read_text())]


def together() -> Station:
    return Station(dist.get_rank(), time_block_together, largest_of_all)


def largest_of_all(figure: float) -> float:
    tensor = torch.tensor(figure, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def time_block_together(work: Work) -> Block:
    """Time one block on all ranks; return the CPU time of all and the wall time of the first, on
    each."""
    dist.barrier()
    busy, wall, cpu = machine_busy_s(), time.perf_counter(), time.process_time()
    work()
    dist.barrier()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    of_first = torch.tensor([wall, machine_busy_s() - busy], dtype=torch.float64)
    total_cpu = torch.tensor(cpu, dtype=torch.float64)
    dist.all_reduce(total_cpu)
    dist.broadcast(of_first, 0)
    wall, busy = of_first.tolist()
    return Block(float(total_cpu), wall, busy - float(total_cpu))


def main(wanted: dict[str, Any]) -> None:
    """Run one rank."""
    settle()
    dist.init_process_group("gloo")
    station = together()
    tables = []
    for scenario in [*IN_TWO_RANKS, *SCENARIOS_OF_TWO]:
        if scenario.name not in wanted["names"]:
            continue
        if station.rank == 0:
            print(f"  {scenario.name} ...", flush=True)
        tables.append(compare(scenario, station, wanted["rounds"], wanted["patience_s"]))
    if station.rank == 0:
        Path(wanted["answer"]).write_text(json.dumps([asdict(table) for table in tables]))
    dist.barrier()
    os._exit(0)  # Gloo can abort at its teardown while replicas are alive


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
