"""`python -m tests.tools.golden record FILE` before a change, and `compare FILE` after it, on one machine."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

import torch

from tests.tools.golden.runs import Run, bits, table


def main() -> int:
    """Write the bits of all runs to a file, or print the runs whose bits are not those of a file."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.golden", description=__doc__)
    parser.add_argument("job", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="runs whose name contains this")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # bits depend on the number of threads
    every = [each for each in table() if given.only in str(each)]
    found = {str(each): made for each, made in zip(every, map(_bits, every), strict=True)}
    if given.job == "record":
        given.file.write_text(json.dumps(found, indent=0))
        print(f"{len(found)} runs recorded")
        return 0
    before = json.loads(given.file.read_text())
    differing = [name for name in found if before.get(name) != found[name]]
    for name in differing:
        print(f"differs: {name}: {before.get(name, 'not recorded')}, now {found[name]}")
    print(f"{len(found)} runs, {len(differing)} differ")
    return int(bool(differing))


def _bits(run: Run) -> str:
    if sys.stderr.isatty():
        print(f"\r\033[K{run}", end="", file=sys.stderr, flush=True)
    try:
        return bits(run)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"


if __name__ == "__main__":
    sys.exit(main())
