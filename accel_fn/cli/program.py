"""Train a network, save and resume it, and evaluate it after each epoch.

accel-fn launch train.py            # one process for each accelerator, or one on the CPU
accel-fn launch -n 2 --cpu train.py
accel-fn explain train.py:make_plan
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af

NUM_EPOCHS, BATCH_SIZE = 5, 64  # a batch is that of all processes together
FOLDER = "checkpoints"  # a run resumes from the newest; name another folder for a new run


def make_data(num_samples: int, seed: int) -> TensorDataset:
    """Points of a plane, and whether each lies in the unit circle: put your data here."""
    points = torch.randn(num_samples, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points.norm(dim=1) < 1).long())


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean loss over the samples of a batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


def metric_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Metrics of a batch, one value for each sample."""
    return {"accuracy": model(batch[0]).argmax(dim=1) == batch[1]}


def make_plan() -> af.Plan:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # wrap_as_launched, with_amp and accumulate take their settings from `accel-fn launch`.
    recipe = af.compose(af.place(), af.wrap_as_launched(), af.with_amp(), af.accumulate())
    return af.clip(1.0)(recipe(af.Plan(loss_fn, model, optimizer)))


def main() -> None:
    state, step = af.build(make_plan(), af.init())
    loader = af.shard_loader(DataLoader(make_data(6400, seed=0), BATCH_SIZE, shuffle=True), state)
    held_out = af.shard_loader(DataLoader(make_data(1000, seed=1), BATCH_SIZE), state)
    state = af.resume(step, state, FOLDER, extras={"data": loader})
    for epoch in loader.epochs(NUM_EPOCHS, since=state):
        for batch in epoch:
            state, report = step(state, batch)
        af.save(step, state, FOLDER, extras={"data": loader}, keep=3)
        found = af.evaluate(step, state, held_out, metric_fn)
        if state.is_main:
            print(f"step {state.step}: loss {report.loss:.3f}, accuracy {found['accuracy']:.3f}")


if __name__ == "__main__":
    main()
