"""docs/machines.md: the script that resumes after a restart works."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.cli.commands import ROOT, run_command

PAGE = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_run_that_is_killed_and_restarted_ends_as_one_that_was_not(tmp_path: Path) -> None:
    script = next(text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    killed = script.replace("import torch\n", "import os\nimport torch\n", 1) + (
        "        if state.step == 5 and state.rank and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        f"            os.kill(os.getpid(), {signal.SIGKILL:d})\n"
    )
    ends = []
    for name, text in (("whole", script), ("killed", killed)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(text)
        options = ["-n", "2", "--cpu", "--max-restarts", "1"]
        done = run_command(folder, "launch", *options, "train.py", timeout_s=250)
        assert done.returncode == 0, done.stderr
        (file,) = folder.glob("saved/step_00000008/tensors_00000.bin")
        ends.append((done.stderr, file.read_bytes()))
    (quiet, whole), (told, kept) = ends
    assert quiet == ""
    restarted = r"accel-fn launch: restart 1 of 1: rank 1 .*: SIGKILL: .*\n"
    assert re.fullmatch(rf"{restarted}the run resumes at step 5, from .*step_00000005\n", told)
    assert kept == whole
