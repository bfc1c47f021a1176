"""Windows of augmented samples, read ahead by workers and a thread, in real processes."""

import json

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import accel_fn as af
from tests.support import strategies as ours
from tests.support.processes import launch

pytestmark = pytest.mark.slow

TRAIN = """
import json
import accel_fn as af
from torch.utils.data import DataLoader
from tests.support import strategies as ours
from tests.data.test_windows_in_processes import K, loader_of

if __name__ == "__main__":
    state = af.init(device="cpu", timeout_s=60)
    model = ours.regression_model()
    recipe = af.compose(af.place(), af.wrap_ddp(), af.accumulate(K, split=None), af.clip(0.5))
    state, step = af.build(state, recipe(af.Plan(ours.mse, model, ours.adamw(model.parameters()))))
    loader = af.prefetch(af.window(loader_of(state, num_workers=2), K), state, depth=3)
    for part in (3, None):  # leaves the first epoch, and goes on from where it stood
        for epoch in loader.epochs(2, since=state):
            for batch in epoch:
                state, report = step(state, batch)
                if state.step == part:
                    break
            if state.step == part:
                break
    parameters = {name: value.tolist() for name, value in model.state_dict().items()}
    say(json.dumps([state.step, parameters]))
"""
K, NUM_SAMPLES = 2, 31


class Augmented(Dataset):
    """A data set of inputs with noise from the global generator, and targets."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(NUM_SAMPLES, 3, generator=generator).double()

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        inputs = self.inputs[index]
        return inputs + torch.randn(3, dtype=torch.float64), inputs.sum().reshape(1)


def loader_of(state, **options):
    data = af.seed_samples(Augmented(), state)
    return af.shard_loader(DataLoader(data, batch_size=4, shuffle=True, **options), state)


def test_windows_read_ahead_train_what_the_reference_trains_on_joined_batches():
    num_processes = 3
    state = af.DistState(world_size=num_processes)
    loader, samples = af.window(loader_of(state), K), af.seed_samples(Augmented(), state)
    joined = []
    for epoch in range(2):
        for number in range(len(loader)):
            indices = loader.global_indices(epoch, number).tolist()
            rows = [samples[epoch, index] for index in indices]
            joined.append(tuple(map(torch.stack, zip(*rows, strict=True))))
    assert sum(len(batch[0]) for batch in joined) == 2 * NUM_SAMPLES
    _, expected = ours.trained_by_hand(ours.regression_model(), joined, max_norm=0.5)
    lines = launch(TRAIN, num_processes=num_processes).splitlines()
    assert len(lines) == num_processes
    for line in lines:
        num_steps, parameters = json.loads(line)
        assert num_steps == len(joined) == 8
        found = {n: torch.tensor(v, dtype=torch.float64) for n, v in parameters.items()}
        ours.assert_close(found, expected)
