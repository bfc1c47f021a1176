"""predict over real processes, and with sharded parameters, gives the rows of this process."""

import json

import pytest
import torch
from torch.utils.data import default_collate

from tests.observe.test_evaluate_in_processes import samples
from tests.support import strategies as ours
from tests.support.processes import launch

pytestmark = pytest.mark.slow

PREDICT = """
import json, torch
import accel_fn as af
from tests.support import strategies as ours
from tests.observe.test_evaluate_in_processes import samples
from tests.observe.test_predict_in_processes import tagged
from torch.utils.data import DataLoader

state = af.init(device="cpu", timeout_s=60)
model = ours.token_model()
recipe = af.compose(af.place(), af.{wrap}(), af.accumulate(2))
plan = af.Plan(ours.token_loss, model, ours.sgd(model.parameters()), af.count_labels("labels"))
state, step = af.build(recipe(plan), state)
loader = DataLoader(samples(), batch_size=8, shuffle=True, num_workers={workers})
loader = af.prefetch(af.shard_loader(loader, state), state)
found = [af.predict(step, state, loader, tagged)]

own = [samples()[n] for n in range(21) if n % (state.world_size + 1) == state.rank]
batches = [torch.utils.data.default_collate([each]) for each in own]
found.append(af.predict(step, state, batches, tagged))
say(json.dumps([state.rank, [[each["logits"].tolist(), each["tags"]] for each in found]]))
"""


def tagged(model, batch):
    """Return the logits of every token, and the labels that count, of which rows have 1 to 6."""
    tags = [[int(label) for label in row if label != -100] for row in batch["labels"]]
    return {"logits": model(batch["inputs"]), "tags": tags}


@pytest.mark.parametrize(
    ("wrap", "num_processes", "workers"), [("wrap_ddp", 2, 2), ("wrap_fsdp", 3, 0)]
)
def test_processes_give_the_rows_of_one(wrap, num_processes, workers):
    """Of batches of their own, each process has one sample, and the last process has the fewest."""
    with torch.no_grad():
        whole = tagged(ours.token_model(), default_collate(samples()))
    shares = [range(rank, 21, num_processes + 1) for rank in range(num_processes)]
    in_order = [each[k] for k in range(len(shares[0])) for each in shares if k < len(each)]
    output = launch(PREDICT.format(wrap=wrap, workers=workers), num_processes=num_processes)
    results = [json.loads(line) for line in output.splitlines()]
    assert sorted(rank for rank, _ in results) == list(range(num_processes))
    for _, found in results:
        for (logits, tags), order in zip(found, (range(21), in_order), strict=True):
            assert tags == [whole["tags"][number] for number in order]
            torch.testing.assert_close(
                torch.tensor(logits, dtype=torch.float64),
                whole["logits"][list(order)],
                rtol=1e-12,
                atol=1e-12,
            )
