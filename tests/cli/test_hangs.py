"""A launch with a timeout: every rank reports before the launcher ends the world."""

import re

import pytest

SCRIPT = """
import time, torch
import accel_fn as af

state = af.init()
if state.is_main:
    af.gather(torch.ones(3, 2), state)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_launch_with_a_timeout_ends_with_a_report_of_every_rank(launchers, tmp_path):
    arguments = ["-n", 2, "--cpu", "--timeout-s", 4, "script.py"]
    ended = launchers.run(tmp_path, *arguments, script=SCRIPT)
    assert ended.exit_code == 124, ended.stderr
    assert sorted(re.findall(r"accel_fn: rank (\d) of 2 \(", ended.stderr)) == ["0", "1"]
    where = re.escape(str(tmp_path / "script.py"))
    waits = rf"  rank 0: in collective 1, gather of float32 \[3, 2\], at {where}:7 in <module>\n"
    sleeps = rf"  rank 1: at {where}:8 in <module>; no collective\n"
    assert len(re.findall(waits + sleeps, ended.stderr)) == 2
    stack = rf'MainThread, innermost call last:\n  File "{where}", line [78], in <module>\n'
    assert len(re.findall(stack, ended.stderr)) == 2  # nothing of the launcher's above
    assert "timeout_s=4\n" in ended.stderr
