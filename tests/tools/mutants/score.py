"""Drawn mutants against the tests that cover them: the score by package, and the survivors by line."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.tools.mutants.covering import Covering
from tests.tools.mutants.draw import Drawn, draw

LIMIT_S = 120.0
KILLS = 2
STARTING_S = 60.0  # imports and collection, which the limit does not count


@dataclass(frozen=True)
class Judged:
    """A mutant, and the tests that failed on it, at most two."""

    file: str
    line: int
    kind: str
    change: str
    killed_by: list[str]
    num_tests: int
    equivalent: str = ""
    """Why no test can notice it: written into the file of results by hand."""

    @property
    def is_dead(self) -> bool:
        return bool(self.killed_by)


class Results:
    """A file of what was judged, a line each, which later draws extend."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.every = [Judged(**json.loads(line)) for line in lines]

    def has(self, file: str, line: int, change: str) -> bool:
        return any((e.file, e.line, e.change) == (file, line, change) for e in self.every)

    def add(self, judged: Judged) -> None:
        self.every.append(judged)
        with self._path.open("a") as file:
            file.write(json.dumps(vars(judged)) + "\n")


def judge_all(root: Path, results: Results, covering: Covering, seed: int, number: int) -> None:
    """Plant each mutant in a copy and run its tests, as many at a time as there are cores."""
    jobs = os.cpu_count() or 1
    drawn = draw(root / "accel_fn", seed, number)
    copies: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        for job in range(jobs):
            copies.put(copy_to(root, Path(folder) / str(job)))

        def judge(each: Drawn) -> Judged | None:
            source = (root / "accel_fn" / each.file).read_bytes()
            if results.has(each.file, each.line, each.shown(source)):
                return None
            copy = copies.get()
            try:
                return judged(each, source, copy, covering)
            finally:
                (copy / "accel_fn" / each.file).write_bytes(source)
                copies.put(copy)

        try:
            for found in pool.map(judge, drawn):
                if found is not None:
                    results.add(found)
                    fate = f"killed by {found.killed_by[0]}" if found.is_dead else "SURVIVED"
                    print(f"{found.file}:{found.line} {found.change}: {fate}", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def judged(mutant: Drawn, source: bytes, copy: Path, covering: Covering) -> Judged:
    """Run the tests that cover a mutant, fastest first, until two fail."""
    (copy / "accel_fn" / mutant.file).write_bytes(mutant.planted(source))
    tests = covering.of(mutant.file, mutant.line, LIMIT_S)
    failed = failures(copy, tests) if tests else []
    shown = mutant.shown(source)
    return Judged(mutant.file, mutant.line, mutant.kind, shown, failed[:KILLS], len(tests))


def failures(copy: Path, tests: list[str]) -> list[str]:
    """The tests of a copy that fail, at most two; a run that ends otherwise counts as one.

    One that is stopped because its time is over does not: a test that hangs ends by its own time-out.
    """
    options = [
        "-q",
        "-rfE",
        "--no-header",
        "--tb=no",
        f"--maxfail={KILLS}",
        "-p",
        "no:cacheprovider",
    ]
    command = [sys.executable, "-B", "-m", "pytest", *options, "--timeout=60", "-m", "", *tests]
    env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    begun = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S + STARTING_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if not found and process.returncode not in (0, 5, -signal.SIGKILL):
        found = [f"a run that ended with {process.returncode} in {time.monotonic() - begun:.0f} s"]
    return found


def copy_to(root: Path, folder: Path) -> Path:
    """Copy everything that the tests read."""
    folder.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "_build")
    for name in ("accel_fn", "tests", "docs", "examples", ".ci"):
        shutil.copytree(root / name, folder / name, ignore=ignored)
    for path in root.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    return folder


def report(results: Results) -> str:
    """The score by package, and the survivors."""
    counted = [each for each in results.every if not each.equivalent]
    every, dead = Counter[str](), Counter[str]()
    for each in counted:
        name = each.file.partition("/")[0].removesuffix(".py")
        every[name] += 1
        dead[name] += each.is_dead
    lines = [f"{name:<14}{dead[name]:>4} of {every[name]:>4} killed" for name in sorted(every)]
    lines.append(f"{'all':<14}{dead.total():>4} of {every.total():>4} killed")
    alive = sorted((each.file, each.line, each.change) for each in counted if not each.is_dead)
    lines += [f"survived: accel_fn/{file}:{line}: {change}" for file, line, change in alive]
    return "\n".join(lines)
