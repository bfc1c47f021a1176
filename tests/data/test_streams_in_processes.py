"""Streams over real processes: every item comes once, in equally many batches, and training on a
stream that is read round robin equals one process."""

import json
import re

import pytest
from torch.utils.data import DataLoader

from tests.support import strategies as ours
from tests.support.forked_ranks import run_worlds
from tests.support.processes import from_lists, launch
from tests.support.streams import SelfSplitting, Sharded, global_batches, items_of, joined, samples

pytestmark = pytest.mark.slow

LENGTHS = [70, 3, 0, 11, 9, 2]
NUM_ROWS, BATCH_SIZE = 21, 6  # the last batch has three samples, one for each of three ranks

SCRIPT = """
import json
from torch.utils.data import DataLoader
import accel_fn as af
from tests.support import strategies as ours
from tests.data.test_streams_in_processes import BATCH_SIZE, LENGTHS, NUM_ROWS
from tests.support.streams import Counting, SelfSplitting, Sharded, ids, samples

def loaders(state):
    for num_workers in (0, 2):
        options = {"batch_size": 7, "num_workers": num_workers}
        yield af.shard_loader(DataLoader(Counting(45, shuffle=True), **options), state)
        yield af.shard_loader(DataLoader(Sharded(LENGTHS), **options), state)
        yield af.shard_loader(DataLoader(SelfSplitting(LENGTHS), **options), state, split="workers")

def main():
    state = af.init(device="cpu", timeout_s=60)
    read = [ids(af.prefetch(loader, state)) for loader in loaders(state)]
    model = ours.regression_model()
    plan = af.Plan(ours.mse, model, ours.adamw(model.parameters()))
    trained, step = af.build(af.compose(af.wrap_ddp(), af.clip(0.5))(plan), state)
    rows = DataLoader(samples(range(NUM_ROWS)), batch_size=BATCH_SIZE)
    for epoch in af.shard_loader(rows, state).epochs(2, since=state):
        for batch in epoch:
            trained, _ = step(trained, tuple(batch))
    parameters = {name: value.tolist() for name, value in model.state_dict().items()}
    say(json.dumps([state.rank, read, parameters]))

main()
"""


@pytest.mark.parametrize("num_processes", [2, 3])
def test_streams_are_shared_and_trained_on_as_by_one_process(num_processes):
    lines = launch(SCRIPT, num_processes=num_processes).splitlines()
    ranks = [rest for _, *rest in sorted(json.loads(line) for line in lines)]
    assert len(ranks) == num_processes
    assert Sharded(LENGTHS).items() == SelfSplitting(LENGTHS).items()
    for number, parts in enumerate(zip(*[read for read, _ in ranks], strict=True)):
        whole = list(range(45)) if number % 3 == 0 else Sharded(LENGTHS).items()
        assert items_of(parts) == sorted(whole)
        if number % 3 == 0:  # round robin
            sizes = [len(batch) for batch in global_batches(whole, 7)]
            assert [len(batch) for batch in joined(parts)] == sizes
            assert all(part for batches in parts for part in batches)

    rows = DataLoader(samples(range(NUM_ROWS)), batch_size=BATCH_SIZE)
    batches = [tuple(batch) for _ in range(2) for batch in rows]
    _, expected = ours.trained_by_hand(ours.regression_model(), batches, max_norm=0.5)
    for _, parameters in ranks:
        ours.assert_close(from_lists(parameters), expected)


FAILING = """
import torch
from torch.utils.data import DataLoader
import accel_fn as af
from tests.support.streams import Sharded

state = af.init(device="cpu", timeout_s=600)

def collate(items):
    if state.rank == 1 and max(items) > 60:
        mark()
        raise ValueError("cannot collate")
    return torch.tensor(items)

source = DataLoader(Sharded([50, 50]), batch_size=8, collate_fn=collate)
for batch in af.shard_loader(source, state):
    pass
"""


def test_a_collate_fn_that_fails_on_one_rank_of_a_split_stream_ends_the_others_at_once(tmp_path):
    waiting, failing = run_worlds({"failing": FAILING}, tmp_path)["failing"]
    assert "ValueError: cannot collate" in failing.stderr
    # the error arrives by a message, or, if no message was under way yet, by the failed rank's exit
    text = r"rank 1: (ValueError\('|has left by ValueError: )cannot collate"
    assert re.search(text, waiting.stderr)
    assert (waiting.exit_code, failing.exit_code) == (1, 1)
    assert waiting.seconds < 150  # the group's timeout is 600
