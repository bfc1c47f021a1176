"""Lists which optimizers fit into the graph of a compiled step.

`python -m tests.support.optimizers_compiled` writes the table of docs/tested-optimizers.md.
"""

from __future__ import annotations

import re

import torch

import accel_fn as af
from tests.support.optimizers import (
    MAX_NORM,
    ROWS,
    Row,
    assert_alike,
    batches,
    trained,
    trained_by_hand,
    write_table,
)

FENCES = (
    "<!-- table: python -m tests.support.optimizers_compiled -->\n",
    "<!-- end of table -->\n",
)
HEAD = ["| optimizer | in a graph | why not |", "|---|---|---|"]

# A compiled graph rounds less often where these optimizers compute in less than float64: a product
# of momenta in float32, once in each of four updates; an orthogonal matrix in bfloat16, in five
# rounds. The tolerance is relative to how far training moved the parameters.
RTOL = {"torch.optim.NAdam": 4 * 2.0**-24, "torch.optim.Muon": 5 * 2.0**-8}


def outcome(row: Row) -> str:
    """Return an empty text if training in a graph equals training by hand, else the reason why
    not."""
    recipe = af.compose(af.clip(MAX_NORM), af.compiled(scope="step"))
    try:
        (parameters,) = trained(row, recipe, torch.float64, [batches(torch.float64)])
    except ValueError as error:
        reason = re.search(
            r"(?:into a graph|from gradients alone), got \w+[:,] (.*?); use", str(error)
        )
        if reason is None:
            raise
        return reason.group(1)
    expected = trained_by_hand(row, torch.float64, MAX_NORM)
    assert_alike(row, parameters, expected, RTOL.get(row.name))
    return ""


def line(name: str) -> str:
    """Format a row of the table."""
    reason = outcome(ROWS[name])
    return f"| `{name}` | {'no' if reason else 'yes'} | {reason.replace('|', '/')} |"


def table() -> str:
    """Format the table, one row per optimizer."""
    return "\n".join([*HEAD, *map(line, ROWS)]) + "\n"


if __name__ == "__main__":
    write_table(table, FENCES)
