"""What a rank does in tests/cli/test_many_launches.py: `one_rank.py END`."""

import os
import signal
import subprocess
import sys


def work(end):
    """Return the rank, or let rank 1 fail."""
    rank = os.environ["RANK"]
    if end == "joins a world":
        import torch

        import accel_fn as af

        state = af.init(device="cpu")
        shared = torch.ones(10).share_memory_()
        assert af.reduce_sum(int(shared.sum()), state) == 20
    if end == "leaves a child":
        subprocess.Popen(["sleep", "600"])
    if rank == "1" and end == "raises":
        raise ValueError("boom")
    if rank == "1" and end == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return int(rank)


if __name__ == "__main__":
    work(sys.argv[1])
