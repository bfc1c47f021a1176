"""Workers of a process that is killed end with it, however early the kill comes."""

import signal

import pytest

from tests.cli.commands import run_python
from tests.cli.launchers import gone

pytestmark = pytest.mark.slow

SCRIPT = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
import accel_fn as af


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(8)


def kill_whom_it_reads_for(worker):
    Path("pid").write_text(str(os.getpid()))
    reader = multiprocessing.parent_process()
    os.kill(reader.pid, signal.SIGKILL)
    reader.join()
    while os.getppid() == reader.pid:
        time.sleep(0.01)


if __name__ == "__main__":
    data = Stream() if sys.argv[1] == "stream" else TensorDataset(torch.arange(8))
    given = DataLoader(
        data,
        batch_size=2,
        num_workers=1,
        worker_init_fn=kill_whom_it_reads_for,
        multiprocessing_context=sys.argv[2],
    )
    list(af.shard_loader(given, af.DistState()))
"""


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_worker_ends_that_has_just_started_when_its_process_is_killed(tmp_path, kind, context):
    """Torch's worker looks up its parent after that; it would live as long as the process that
    adopted it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_python(tmp_path, "script.py", kind, context, timeout_s=100)
    assert done.returncode == -signal.SIGKILL
    gone([int((tmp_path / "pid").read_text())])
