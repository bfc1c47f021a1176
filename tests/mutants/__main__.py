"""`python -m tests.mutants`: plant each bug in a copy of the library, and write who notices it to docs."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.plans import PLANS, noticed_by
from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "mutants.md"
FENCES = ("<!-- table: python -m tests.mutants -->\n", "<!-- end of table -->\n")
DETECTORS = ("build", "assert_equivalent", "accel-fn test", "tests")
TIMEOUT_S = 400


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no bug after so long")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="bugs whose name contains this; writes no page")
    given = parser.parse_args()
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


def plant_all(chosen: list[Mutant], jobs: int, deadline: float) -> dict[str, dict[str, bool]]:
    """Run all, some at a time, each in a copy; those that the time does not reach are left out."""
    results: dict[str, dict[str, bool]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            copies.put(copy_to(Path(folder) / str(job)))

        def run(mutant: Mutant) -> None:
            if time.monotonic() > deadline:
                return
            copy, start = copies.get(), time.monotonic()
            try:
                results[mutant.name] = found = plant(mutant, copy)
            finally:
                copies.put(copy)
            by = [name for name in DETECTORS if found[name]]
            print(f"{mutant.name}: {', '.join(by) or 'nothing'} ({time.monotonic() - start:.0f} s)")
            sys.stdout.flush()

        list(pool.map(run, chosen))
    return results


def copy_to(folder: Path) -> Path:
    """A copy of all that the tests read."""
    folder.mkdir()
    for name in ("accel_fn", "tests", "docs", "examples", ".ci"):
        ignored = shutil.ignore_patterns("__pycache__", "_build")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    return folder


def plant(mutant: Mutant, copy: Path) -> dict[str, bool]:
    """Which detectors notice a bug that is planted in this copy; it is taken out afterwards."""
    file = copy / "accel_fn" / mutant.file
    sound = file.read_text(encoding="utf-8")
    assert sound.count(mutant.old) == 1, f"{mutant.name}: {mutant.file} holds it otherwise"
    file.write_text(sound.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        probe = run_in(copy, "-m", "tests.mutants.probe")
        found = dict.fromkeys(DETECTORS[:3], True)  # it ended otherwise: noticed
        if probe is not None and probe.returncode == 0:
            found = json.loads(probe.stdout)
        some = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", *mutant.tests.split())
        tests = run_in(copy, "-m", "pytest", *some)
        return {**found, "tests": tests is None or tests.returncode == 1}
    finally:
        file.write_text(sound, encoding="utf-8")


def run_in(copy: Path, *command: str) -> subprocess.CompletedProcess[str] | None:
    """Run Python in a copy of the library; None if it does not end in time."""
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(
            [sys.executable, *command],
            cwd=copy,
            env={**env, "OMP_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "mutants"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return None


def write(results: dict[str, dict[str, bool]], users: dict[str, str]) -> None:
    """Put the tables into the page."""
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
        lines.append(f"| {mutant.name} | `{mutant.file}` | {first} | " + " | ".join(marks) + " |")
    return "\n".join(lines) + "\n"


def plan_table(users: dict[str, str]) -> str:
    rows = [f"| {name} | {by or 'nothing'} |" for name, by in users.items()]
    return "\n".join(["| mistake | noticed by |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
