"""A notebook whose process has used the device launches no ranks beside it."""

import re

from tests.cli.notebooks import run_cells

LAUNCHES = (
    "import torch\nimport accel_fn as af",
    "af.launch(lambda: 3)",
    "from tests.sim import device",
    "weight = torch.ones(2).to('sim')",
    "af.launch(lambda: 3)",
    "af.launch(lambda: 3, cpu=True)",
)


def test_launch_refuses_a_notebook_that_has_used_the_device_and_names_its_cells(tmp_path):
    *_, [before], _, _, [refused], [on_cpu] = run_cells(tmp_path, *LAUNCHES, allow_errors=True)
    assert [each.data["text/plain"] for each in (before, on_cpu)] == ["[3, 3]", "[3, 3]"]
    assert refused.ename == "WorldError"
    assert re.fullmatch(
        r"launch: the process of the notebook must not have used sim, whose memory it keeps from "
        r"the ranks; cells that may have used it: In \[3\], In \[4\]; restart the kernel and use "
        r"sim in fn alone, or pass cpu=True",
        refused.evalue,
    )
