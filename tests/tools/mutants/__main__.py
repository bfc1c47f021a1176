"""`python -m tests.tools.mutants`: plant each bug in a copy of the library, and write what notices it to
docs."""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.tools.mutants.covering import Covering, record
from tests.tools.mutants.plans import PLANS, noticed_by
from tests.tools.mutants.score import Results, copy_to, judge_all, report
from tests.tools.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "mutants.md"
FENCES = ("<!-- table: python -m tests.tools.mutants -->\n", "<!-- end of table -->\n")
DRAWN = Path(__file__).with_name("drawn.jsonl")
COVERING = ROOT / "runs" / "mutants"
APART = ("--ignore=tests/examples", "--ignore=tests/contrib/transformers")
DETECTORS = ("build", "assert_equivalent", "accel-fn test", "tests", "fuzz")
TIMEOUT_S = 600
HEAVY = (
    "hypothesis",
    "torch",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "transformers",
    "sklearn",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.mutants", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no bug after so long")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="bugs whose name contains this; writes no page")
    parser.add_argument("--seed", type=int, help="draw bugs over all files by this seed instead")
    parser.add_argument("--number", type=int, default=300, help="how many are drawn")
    parser.add_argument("--record", action="store_true", help="record anew which tests run a line")
    parser.add_argument("--report", action="store_true", help="print the results so far, no more")
    given, tests = parser.parse_known_args()
    if given.seed is not None or given.report:
        return drawn(given, tests)
    if tests:
        parser.error(f"unrecognized arguments: {' '.join(tests)}")
    chosen = [each for each in MUTANTS if given.only in each.name]
    results = plant_all(chosen, given.jobs, time.monotonic() + given.minutes * 60)
    users = {name: noticed_by(name) for name in PLANS if given.only in name}
    if not given.only:
        write(results, users)
    missed = [each.name for each in chosen if not any(results.get(each.name, {}).values())]
    missed += [name for name, by in users.items() if not by]
    print(f"{len(chosen) + len(users) - len(missed)} of {len(chosen) + len(users)} noticed")
    for name in missed:
        print(f"not noticed: {name}" if name in results or name in users else f"not run: {name}")
    return int(bool(missed))


def drawn(given: argparse.Namespace, tests: list[str]) -> int:
    """Judge bugs that are drawn by a seed, and print the score by package and what survived."""
    results = Results(DRAWN)
    if not given.report:
        if given.record or not (COVERING / "covering.json").exists():
            print("recording which tests run which lines; this takes as long as the tests, twice")
            record(ROOT, COVERING, tests or ["--numprocesses=4", "--dist=loadfile", *APART])
        judge_all(ROOT, results, Covering(COVERING), given.seed, given.number)
    print(report(results))
    return 0


def plant_all(chosen: list[Mutant], jobs: int, deadline: float) -> dict[str, dict[str, bool]]:
    """Plant all bugs, some at a time, each in its own copy; leave out those for which there is no
    time."""
    for name in HEAVY:
        # import before the fork, since imports take most of the time of a run
        importlib.import_module(name)
    results: dict[str, dict[str, bool]] = {}
    waiting, running = chosen[::-1], dict[Path, tuple[Mutant, float, BaseProcess, Connection]]()
    with tempfile.TemporaryDirectory() as folder:
        copies = [copy_to(ROOT, Path(folder) / str(job)) for job in range(jobs)]
        while running or (waiting and time.monotonic() < deadline):
            while copies and waiting and time.monotonic() < deadline:
                copy, mutant = copies.pop(), waiting.pop()
                running[copy] = (mutant, time.monotonic(), *start(mutant, copy))
            for copy, (mutant, begun, process, ours) in list(running.items()):
                if process.is_alive() and time.monotonic() - begun < TIMEOUT_S:
                    continue
                process.kill()
                process.join()
                results[mutant.name] = found = received(ours)
                found["fuzz"] &= bool(mutant.kind)
                shutil.copy(ROOT / "accel_fn" / mutant.file, copy / "accel_fn" / mutant.file)
                copies.append(copy)
                del running[copy]
                by = ", ".join(name for name in DETECTORS if found[name]) or "nothing"
                print(f"{mutant.name}: {by} ({time.monotonic() - begun:.0f} s)", flush=True)
            time.sleep(0.1)
    return results


def plant(mutant: Mutant, copy: Path) -> None:
    file = copy / "accel_fn" / mutant.file
    text = file.read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, f"{mutant.name}: {mutant.file} holds it otherwise"
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def start(mutant: Mutant, copy: Path) -> tuple[BaseProcess, Connection]:
    """Plant a bug in a copy, and start a process that sends the result of each detector."""
    plant(mutant, copy)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=detect, args=(mutant, copy, theirs), daemon=False)
    process.start()
    theirs.close()
    return process, ours


def received(ours: Connection) -> dict[str, bool]:
    """Return the results; a detector whose process ended or hung before it sent one counts as
    noticing."""
    found = dict[str, bool]()
    try:
        while ours.poll():
            found |= ours.recv()
    except EOFError:
        pass
    return {**dict.fromkeys(DETECTORS, True), **found}


def detect(mutant: Mutant, copy: Path, theirs: Connection) -> None:
    """Run all detectors in this copy, of which nothing is imported yet."""
    for name in [each for each in sys.modules if each.split(".")[0] in {"accel_fn", "tests"}]:
        del sys.modules[name]
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ.update(PYTHONPATH=str(copy), OMP_NUM_THREADS="1", HYPOTHESIS_PROFILE="mutants")
    sys.dont_write_bytecode = True
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    warnings.simplefilter("ignore")
    probe = importlib.import_module("tests.tools.mutants.probe")
    assert probe.__file__.startswith(str(copy))
    theirs.send(probe.notices())
    imported = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    some = ("-q", "-x", "-p", "no:cacheprovider", *imported, *mutant.tests.split())
    theirs.send({"tests": pytest.main(list(some)) == pytest.ExitCode.TESTS_FAILED})
    theirs.send({"fuzz": bool(mutant.kind) and is_found_by_fuzzing(mutant.kind, copy)})
    theirs.close()
    os._exit(0)


def is_found_by_fuzzing(kind: str, copy: Path) -> bool:
    """Does the fuzzer of a copy find a bug in two minutes of programs of a kind?"""
    options = ["--only", kind, "--minutes", "2", "--first"]
    command = [sys.executable, "-m", "tests.tools.fuzz", *options]
    env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=copy, env=env)
    return ran.returncode == 1 and "# program" in ran.stdout


def write(results: dict[str, dict[str, bool]], users: dict[str, str]) -> None:
    """Write the tables into the page."""
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(FENCES[0])
    _, tail = rest.split(FENCES[1])
    body = f"{library_table(results)}\n## In a user's plan\n\n{plan_table(users)}"
    PAGE.write_text(f"{head}{FENCES[0]}\n{body}\n{FENCES[1]}{tail}", encoding="utf-8")


def library_table(results: dict[str, dict[str, bool]]) -> str:
    head = "## In the library\n\n| bug | planted in | noticed first by | " + " | ".join(DETECTORS)
    lines = [f"{head} |", "|" + "---|" * (3 + len(DETECTORS))]
    for mutant in MUTANTS:
        found = results.get(mutant.name, {})
        marks = ["yes" if found.get(name) else "" for name in DETECTORS]
        first = next((name for name in DETECTORS if found.get(name)), "nothing")
        first = first if found else "not run"
        lines.append(f"| {mutant.name} | `{mutant.file}` | {first} | " + " | ".join(marks) + " |")
    return "\n".join(lines) + "\n"


def plan_table(users: dict[str, str]) -> str:
    rows = [f"| {name} | {by or 'nothing'} |" for name, by in users.items()]
    return "\n".join(["| mistake | noticed by |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
