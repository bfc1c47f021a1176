"""Workers whose batches do not fit into /dev/shm, or cannot be sent: an error, and no wait for ever."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader

import accel_fn as af
from accel_fn.errors import WorkerError
from tests.cli.commands import surroundings

SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
import accel_fn as af

class Data(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, number):
        return torch.full((1_000_000,), float(number))

class Stream(IterableDataset):
    def __iter__(self):
        for number in range(16):
            yield torch.full((1_000_000,), float(number))

def stack(items):
    return torch.stack(items)

if __name__ == "__main__":
    data = Stream() if "stream" in sys.argv else Data()
    own = stack if "own" in sys.argv else None
    given = DataLoader(data, batch_size=8, num_workers=1, collate_fn=own)
    for batch in af.shard_loader(given, af.init()):
        print("read", flush=True)
"""
SMALL = [
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"',
    "sh",
]
ROOM = "/dev/shm has 4.0 MiB for all workers: enlarge it (docker run --shm-size=8g), or use smaller batches"


def may_mount():
    if os.getuid() or not shutil.which("unshare"):
        return False
    return subprocess.run([*SMALL, "true"], capture_output=True, timeout=60).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="this user may mount no small /dev/shm")
@pytest.mark.parametrize("kind", ["own", "default", "own stream"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_batch_larger_than_shared_memory_is_an_error_with_the_repair(tmp_path, kind, num_ranks):
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = ["-m", "accel_fn", "launch", "--cpu", "-n", str(num_ranks)]
    done = subprocess.run(
        [*SMALL, sys.executable, *launch, "script.py", *kind.split()],
        cwd=tmp_path, env=surroundings(tmp_path), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 1
    assert ROOM in done.stderr
    assert "read" not in done.stdout
    if "own" in kind:
        size = r"30\.5|15\.3"
        words = rf"shard_loader: worker 0 \(process \d+\) must be able to send .*, got one of ({size}) MiB"
        assert re.search(words, done.stderr), done.stderr


class NoRoom:
    """Stands for a tensor that does not fit: the error is raised where it would be copied."""

    def __reduce__(self):
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"
        )


def beside_no_room(items):
    return torch.stack(items), NoRoom()


def unlike_any(items):
    return lambda: items


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("collate_fn", "words"),
    [
        (
            beside_no_room,
            r"got one of 0\.0 MiB and unable to allocate .*; /dev/shm has .* enlarge it",
        ),
        (unlike_any, r"got one of 0\.0 MiB and .*pickle.*unlike_any"),
    ],
)
def test_a_batch_that_cannot_be_sent_is_an_error_of_its_worker(collate_fn, words):
    given = DataLoader(torch.arange(4.0), batch_size=2, num_workers=1, collate_fn=collate_fn)
    start = r"shard_loader: worker 0 \(process \d+\) must be able to send its batches, "
    with pytest.raises(WorkerError, match=f"(?s){start}{words}"):
        list(af.shard_loader(given, af.DistState()))
