"""The benchmarks: one table, as the command prints it."""

import math
import subprocess
import sys

from tests.benchmarks.jobs import JOBS, JOBS_OF_TWO
from tests.compilers import compiles
from tests.processes import ROOT
from tests.unit.test_signatures_of_transforms import SIGNATURES

EVERYWHERE = {
    "place",
    "wrap",
    "wrap_ddp",
    "reproducible",
    "with_amp",
    "accumulate",
    "clip",
    "clip_value",
}
"""What other rows are made of, or columns."""


def test_every_other_transform_has_a_row_of_its_own():
    measured = {job.partition("(")[0] for job in (*JOBS, *JOBS_OF_TWO)}
    assert measured | EVERYWHERE == SIGNATURES.keys()


@compiles
def test_a_table_is_measured_and_told():
    command = [sys.executable, "-m", "tests.benchmarks", "--quick", "--only", "tiny, fused, plain"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=250)
    assert done.returncode == 0, done.stderr
    head, _, row = done.stdout.partition("## All ratios")[2].strip().splitlines()[:3]
    names, figures = ([each.strip() for each in line.split("|")[1:-1]] for line in (head, row))
    ratios = dict(zip(names, figures, strict=True))
    assert ratios.pop("") == "tiny, fused, plain"
    for name in ("accel_fn", "accel_fn compiled"):
        assert 0 < float(ratios[name]) < math.inf
