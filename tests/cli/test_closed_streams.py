"""accel-fn launch, where a service manager or a shell has closed standard streams: no error is lost."""

import subprocess
import sys

import pytest

from tests.cli.commands import surroundings

FAILS = """
import os, time
print(f"rank {os.environ['RANK']} is up", flush=True)
if os.environ["RANK"] == "1":
    raise SystemExit("the reason of rank 1")
time.sleep(60)
"""


def shell(folder, command, closed):
    return subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *command],
        cwd=folder, env=surroundings(folder), capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "where"), [(">&-", "stderr"), ("2>&-", "stdout"), ("<&- >&- 2>&-", None)]
)
def test_the_error_of_a_rank_is_the_last_line_of_a_launch_and_in_its_logs(tmp_path, closed, where):
    (tmp_path / "script.py").write_text(FAILS)
    command = [sys.executable, "-m", "accel_fn.cli", "launch", "-n", "2", "--log-dir", "logs"]
    done = shell(tmp_path, [*command, "script.py"], closed)
    assert done.returncode == 1
    [report] = (tmp_path / "logs").glob("*/attempt_0/report.txt")
    assert report.read_text().endswith("\nthe reason of rank 1\n")
    [printed] = (tmp_path / "logs").glob("*/attempt_0/1/stdout.log")
    assert printed.read_text() == "rank 1 is up\n"
    assert done.stdout + done.stderr == (report.read_text() if where else "")
    assert getattr(done, where or "stdout") == done.stdout + done.stderr
