"""evaluate and gather over real processes give the figures and predictions of this process."""

import json

import pytest
import torch
from torch.utils.data import default_collate

from tests.support import strategies as ours
from tests.support.processes import launch

pytestmark = pytest.mark.slow

EVALUATE = """
import json, torch
import accel_fn as af
from tests.support import strategies as ours
from tests.observe.test_evaluate_in_processes import samples, detect, metric_fn
from torch.utils.data import DataLoader

state = af.init(device="cpu", timeout_s=60)
model = ours.token_model()
recipe = af.compose(af.place(), af.wrap_ddp(), af.accumulate(2))
plan = af.Plan(ours.token_loss, model, ours.sgd(model.parameters()), af.count_labels("labels"))
state, step = af.build(recipe(plan), state)
loader = DataLoader(samples(), batch_size=8, num_workers={workers})
loader = af.prefetch(af.shard_loader(loader, state), state)

found = {{**af.evaluate(step, state, loader), **af.evaluate(step, state, loader, metric_fn)}}
rows = [row for batch in loader for row in af.gather(detect(batch), state)]
assert all(isinstance(row["labels"], torch.Tensor) and isinstance(row["id"], int) for row in rows)
seen = [[row["id"], row["labels"].tolist()] for row in rows]

def fails(model, batch):
    if state.rank == state.world_size - 1:
        raise OSError("gone")
    return metric_fn(model, batch)

try:
    af.evaluate(step, state, loader, fails)
except (OSError, RuntimeError) as error:
    found["failure"] = str(error)
found["classes"] = found["classes"].tolist()
say(json.dumps([state.rank, found, seen]))
"""


def samples():
    """Make 21 samples with one to six labels each; the last of three batches has five."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(21):
        labels = torch.full((6,), -100)
        count = 1 + index % 6
        labels[:count] = torch.randint(0, ours.NUM_CLASSES, (count,), generator=generator)
        inputs = torch.randn(6, ours.NUM_FEATURES, generator=generator).double()
        found.append({"inputs": inputs, "labels": labels, "id": index})
    return found


def detect(batch):
    """Return one dict per sample, with as many boxes as the sample has labels."""
    rows = zip(batch["labels"], batch["id"].tolist(), strict=True)
    return [{"labels": labels[labels != -100], "id": index} for labels, index in rows]


def metric_fn(model, batch):
    guesses, labels = model(batch["inputs"]).argmax(dim=-1), batch["labels"]
    counted = labels != -100
    right = (guesses == labels) & counted
    classes = torch.bincount(labels[counted], minlength=ours.NUM_CLASSES)
    return {
        "accuracy": (right.sum(), counted.sum()),
        "all right": (right == counted).all(dim=1),
        "classes": (classes, counted.sum()),
    }


@pytest.mark.parametrize(("num_processes", "workers"), [(2, 2), (3, 0)])
def test_processes_give_the_figures_and_predictions_of_one(num_processes, workers):
    whole = default_collate(samples())
    model = ours.token_model()
    with torch.no_grad():
        loss = float(ours.token_loss(model, whole))
        metrics = metric_fn(model, whole)
    total, count = metrics["accuracy"]
    output = launch(EVALUATE.format(workers=workers), num_processes=num_processes)
    results = [json.loads(line) for line in output.splitlines()]
    assert sorted(rank for rank, _, _ in results) == list(range(num_processes))
    for rank, found, seen in results:
        assert found["loss"] == pytest.approx(loss, rel=1e-12)
        assert found["accuracy"] == int(total) / int(count)
        assert found["all right"] == float(metrics["all right"].double().mean())
        assert found["classes"] == (metrics["classes"][0] / count.double()).tolist()
        assert seen == [[row["id"], row["labels"].tolist()] for row in detect(whole)]
        last = num_processes - 1
        expected = f"evaluate: failed on rank {last}: OSError('gone')"
        assert found["failure"] == ("gone" if rank == last else expected)
