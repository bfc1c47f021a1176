"""Which tests run a line of the library, and how long they take: recorded once, and kept."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

from coverage import CoverageData

CONFIG = """\
[run]
source = accel_fn
parallel = true
patch = subprocess
dynamic_context = test_function
context = ${PYTEST_CURRENT_TEST-}
data_file = {folder}/coverage
disable_warnings = no-data-collected
"""


class Covering:
    """The test functions that run each line, and their seconds, as recorded in a folder."""

    def __init__(self, folder: Path) -> None:
        found = json.loads((folder / "covering.json").read_text())
        self._tests: list[str] = found["tests"]
        self._lines: dict[str, dict[str, list[int]]] = found["lines"]
        self.seconds: dict[str, float] = found["seconds"]

    def of(self, file: str, line: int, limit_s: float) -> list[str]:
        """The tests of a line, or of its file where none runs the line in a test, fastest first."""
        lines = self._lines.get(file, {})
        numbers = lines.get(str(line)) or sorted({n for each in lines.values() for n in each})
        ordered = sorted((self._tests[n] for n in numbers), key=self._seconds)
        chosen, total = [], 0.0
        for test in ordered:
            total += self._seconds(test)
            if chosen and total > limit_s:
                break
            chosen.append(test)
        return chosen

    def _seconds(self, test: str) -> float:
        return self.seconds.get(test, 60.0)


def record(root: Path, folder: Path, options: list[str]) -> None:
    """Run the tests under coverage, and keep which of them run each line."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "coveragerc"
    config.write_text(CONFIG.replace("{folder}", str(folder)))
    coverage = [sys.executable, "-m", "coverage"]
    given = f"--rcfile={config}"
    times = folder / "times.xml"
    subprocess.run([*coverage, "erase", given], cwd=root, check=True)
    run = [*coverage, "run", given, "-m", "pytest", "-q", f"--junitxml={times}", *options]
    subprocess.run(run, cwd=root, check=False)
    subprocess.run([*coverage, "combine", "--quiet", given], cwd=root, check=True)
    tests, lines = _lines_of(folder / "coverage", root / "accel_fn")
    found = {"tests": tests, "lines": lines, "seconds": _seconds_of(times)}
    (folder / "covering.json").write_text(json.dumps(found))


def _lines_of(file: Path, library: Path) -> tuple[list[str], dict[str, dict[str, list[int]]]]:
    data = CoverageData(str(file))
    data.read()
    numbers: dict[str, int] = {}
    lines: dict[str, dict[str, list[int]]] = {}
    for path in data.measured_files():
        if not Path(path).is_relative_to(library):
            continue
        of_file: dict[str, list[int]] = {}
        for line, contexts in data.contexts_by_lineno(path).items():
            named = {name for name in map(_function, contexts) if name}
            of_file[str(line)] = sorted(numbers.setdefault(name, len(numbers)) for name in named)
        lines[Path(path).relative_to(library).as_posix()] = of_file
    return [*numbers], lines


def _function(context: str) -> str:
    """The test of a context: `tests.a.test_b.test_c`, or of a process that a test started."""
    static, _, dynamic = context.rpartition("|")
    name = dynamic or static
    if "::" in name:
        path, _, function = name.partition("::")
        return f"{path}::{function.split('[')[0].split(' ')[0]}"
    module, _, function = name.rpartition(".")
    if not module.startswith("tests."):
        return ""
    return _id(module, function)


def _id(module: str, function: str) -> str:
    """The name by which pytest knows a test of a module, or of a class in it."""
    *parts, last = module.split(".")
    if last.startswith("Test"):
        return f"{'/'.join(parts)}.py::{last}::{function}"
    return f"{module.replace('.', '/')}.py::{function}"


def _seconds_of(times: Path) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for case in ET.parse(times).iter("testcase"):
        test = _id(case.get("classname", ""), case.get("name", "").split("[")[0])
        seconds[test] += float(case.get("time", 0))
    return dict(seconds)
