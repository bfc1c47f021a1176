"""The benchmarks print a table, and fail if a loop trains differently."""

import math
import re
import subprocess
import sys

import pytest

from tests.support.compilers import compiles
from tests.support.processes import ROOT
from tests.tools.benchmarks.importing import ImportCost
from tests.tools.benchmarks.jobs import JOBS, JOBS_OF_TWO
from tests.tools.benchmarks.report import render_page
from tests.tools.benchmarks.results import Row, Table
from tests.transforms.test_signatures_of_transforms import SIGNATURES

EVERYWHERE = {
    "place",
    "when",
    "wrap_as_launched",
    "wrap_ddp",
    "wrap_deepspeed",
    "wrap_cp",
    "reproducible",
    "with_amp",
    "accumulate",
    "clip",
    "clip_value",
}
"""Cells that other rows or columns are made of, and what needs a library that is not installed, or a mesh."""


def test_every_other_transform_has_a_row_of_its_own():
    measured = {job.partition("(")[0] for job in (*JOBS, *JOBS_OF_TWO)}
    assert measured | EVERYWHERE == SIGNATURES.keys()


def measured(scenario):
    """Return the ratios of one scenario by name; the run fails if ours trains differently."""
    command = [sys.executable, "-m", "tests.tools.benchmarks", "--quick", "--only", scenario]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=250)
    assert done.returncode == 0, done.stderr
    head, _, row = done.stdout.partition("## All ratios")[2].strip().splitlines()[:3]
    names, figures = ([each.strip() for each in line.split("|")[1:-1]] for line in (head, row))
    ratios = dict(zip(names, figures, strict=True))
    assert ratios.pop("") == scenario
    return ratios


@compiles
def test_a_table_is_measured_and_printed():
    ratios = measured("tiny, fused, plain")
    for name in ("accel_fn", "accel_fn compiled"):
        assert 0 < float(ratios[name]) < math.inf


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario", ["tiny, fused, ema", "two ranks, middle, fused, check_replicas(8)"]
)
def test_a_row_of_a_transform_is_measured_and_printed(scenario):
    assert 0 < float(measured(scenario)["accel_fn"]) < math.inf


def test_folded_tables_of_the_page_have_titles_of_their_own():
    peers = [Row(each) for each in ("by hand", "accelerate", "Fabric", "accel_fn compiled")]
    steps = [
        Table(name, (*peers, Row("accel_fn")), 0.0) for name in ("tiny, plain", "middle, plain")
    ]
    data = [Table("data, a batch", (Row(base), Row("accel_fn")), 0.0) for base in ("torch", "1 ms")]
    imported = ImportCost(0.4, 70.0, 600.0, brings_torch=False)
    page = render_page([*steps, *data], imported, rounds=1, commit="abc")
    titles = re.findall(r"<summary>(.*)</summary>", page)
    assert titles == ["Data (1.0 is torch)", "Data (1.0 is 1 ms)", "Import"]
    assert "missed" not in page
