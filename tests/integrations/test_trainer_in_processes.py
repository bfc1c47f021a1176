"""The Trainer over accel_fn's step on two processes against itself on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import tiny
from tests.support.processes import launch

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
from pathlib import Path
import numpy as np, torch
import accel_fn as af
from accel_fn.integrations.transformers import Trainer
from tests.integrations import tiny

folder, given = Path({folder!r}), {given!r}
if {sharded}:
    given["recipe"] = af.wrap_fsdp()
resume = given.pop("resume", None)
data = tiny.samples(193)  # the last batch is one sample: rank 1 has none
seen = []

def metrics(found):
    seen.append((found.predictions, found.label_ids))
    hits = np.argmax(found.predictions, axis=1) == found.label_ids
    return {{"accuracy": float(hits.mean())}}

parts = {{"train_dataset": data, "eval_dataset": data[:33], "compute_metrics": metrics}}
made = tiny.trainer(Trainer, folder, **parts, **given)
made.train(resume_from_checkpoint=resume)
made.save_model(str(folder / "whole"))
if made.is_world_process_zero():
    rows, labels = seen[-1]
    torch.save({{"log": tiny.logged(made), "rows": rows, "labels": labels}}, folder / "found.pt")
"""


def found(
    folder: Path, *, num_processes: int, sharded: bool = False, **given: Any
) -> dict[str, Any]:
    """What a training on so many processes has logged, predicted and saved."""
    script = SCRIPT.format(folder=str(folder), given=given, sharded=sharded)
    launch(script, num_processes=num_processes)
    model = tiny.model().from_pretrained(folder / "whole")
    loaded: dict[str, Any] = torch.load(folder / "found.pt", weights_only=False)
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    return {**loaded, "weights": weights}


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipping that binds": {"max_grad_norm": 0.05},
    "shards": {"sharded": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "best model": {
        "load_best_model_at_end": True,
        "save_strategy": "epoch",
        "save_total_limit": 1,
        "sharded": True,
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_one(name: str, tmp_path: Path) -> None:
    one = found(tmp_path / "1", num_processes=1, **RUNS[name])
    two = found(tmp_path / "2", num_processes=2, **RUNS[name])
    torch.testing.assert_close(two["weights"], one["weights"], rtol=0, atol=1e-5)
    assert len(two["log"]) == len(one["log"])
    for mine, other in zip(two["log"], one["log"], strict=True):
        assert mine == pytest.approx(other, rel=1e-4)
    assert (two["labels"] == one["labels"]).all()
    assert two["rows"] == pytest.approx(one["rows"], abs=1e-5)


@pytest.mark.parametrize("sharded", [False, True], ids=["replicas", "shards"])
def test_a_run_resumes_on_another_number_of_processes(sharded: bool, tmp_path: Path) -> None:
    steps: dict[str, Any] = {"save_strategy": "steps", "save_steps": 10, "sharded": sharded}
    whole = found(tmp_path / "1", num_processes=1, **steps)
    found(tmp_path / "2", num_processes=2, **steps)
    checkpoint = str(tmp_path / "2" / "checkpoint-10")
    state = json.loads((tmp_path / "2" / "checkpoint-10" / "trainer_state.json").read_text())
    assert state["global_step"] == 10
    resumed = found(tmp_path / "3", num_processes=1, resume=checkpoint, **steps)
    torch.testing.assert_close(resumed["weights"], whole["weights"], rtol=0, atol=1e-5)


def test_streams_and_batch_samplers_are_refused_on_several_ranks(tmp_path: Path) -> None:
    script = f"""
import pytest
from torch.utils.data import DataLoader, IterableDataset
from accel_fn.integrations.transformers import Trainer
from tests.integrations import tiny

class Stream(IterableDataset):
    def __iter__(self):
        return iter(tiny.samples(40))

made = tiny.trainer(Trainer, {str(tmp_path)!r}, train_dataset=Stream(), max_steps=2)
with pytest.raises(TypeError, match="Trainer: train_dataset and eval_dataset must have numbered"):
    made.train()
loader = DataLoader(tiny.samples(4), batch_sampler=[[0, 1], [2, 3]])
words = "Trainer: a DataLoader .* must have a batch_size on several ranks, got a batch_sampler list; give"
with pytest.raises(TypeError, match=words):
    made.accelerator.prepare(loader)
"""
    launch(script)
