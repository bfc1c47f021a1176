"""The Trainer over accel_fn's step on two processes against itself on one."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import EarlyStoppingCallback

import accel_fn as af
from accel_fn.contrib.transformers import Trainer
from tests.contrib.transformers import tiny
from tests.support.processes import ROOT, launch

pytestmark = pytest.mark.slow

DATA = tiny.samples(193)  # the last batch is one sample: rank 1 has none


class Generating(Trainer, transformers.Seq2SeqTrainer):
    """Ours in front of that which generates in evaluation."""


def cross_entropy(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """Divide a sum by the labels that count."""
    return F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def accuracy(seen: list[Any], found: Any) -> dict[str, float]:
    """The part of labels that is predicted, by tokens or by logits."""
    rows, labels = found.predictions, found.label_ids
    if rows.ndim == labels.ndim:  # -100 is the padding of a batch, 0 that of Seq2SeqTrainer
        rows, labels = (np.where(each == -100, 0, each) for each in (rows, labels))
        best = rows
    else:  # how far a batch is padded, and so the logits of padding, depends on its part
        rows, labels = rows[labels != -100], labels[labels != -100]
        best = np.argmax(rows, axis=-1)
    seen.append((rows, labels))
    return {"accuracy": float((best == labels).mean())}


def work(folder: Path, given: dict[str, Any]) -> None:
    """Train, and write what this rank has found and what all have saved."""
    seen: list[Any] = []
    given = {"train_dataset": DATA, "eval_dataset": DATA[:33], **given}
    kind, resume = given.pop("kind", Trainer), given.pop("resume", None)
    made = tiny.trainer(kind, folder, compute_metrics=partial(accuracy, seen), **given)
    made.train(resume_from_checkpoint=resume)
    made.save_model(str(folder / "whole"))
    state = made.state
    found = {
        "log": tiny.logged(made),
        "steps": (state.global_step, state.max_steps, state.best_global_step),
        "rows": seen[-1][0],
        "labels": seen[-1][1],
    }
    torch.save(found, folder / f"{os.environ.get('RANK', 0)}.pt")


def found(folder: Path, name: str, *, num_processes: int, **more: Any) -> dict[str, Any]:
    """What a training on so many processes has logged, predicted and saved."""
    script = f"""
from pathlib import Path
from {__name__} import HALF_PRECISION, RUNS, work

work(Path({str(folder)!r}), (RUNS | HALF_PRECISION)[{name!r}] | {more!r})
"""
    launch(script, num_processes=num_processes, imports=(__name__,))
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_processes)]
    for rank in ranks:
        assert str(rank["log"]) == str(ranks[0]["log"])  # as text: a norm may be nan
        assert rank["steps"] == ranks[0]["steps"]
    weights = load_file(folder / "whole" / "model.safetensors")
    return {**ranks[0], "weights": torch.cat([weights[name].flatten() for name in sorted(weights)])}


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipping that binds": {"max_grad_norm": 0.05},
    "shards": {"recipe": af.wrap_fsdp()},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "best model": {
        "load_best_model_at_end": True,
        "save_strategy": "epoch",
        "save_total_limit": 1,
        "recipe": af.wrap_fsdp(),
    },
    "loss function": {
        # No label counts of rank 1 in the second batch, whose own loss there is 0 / 0.
        "train_dataset": [
            {**row, "labels": -100 if number in range(24, 32) or number % 5 == 2 else row["labels"]}
            for number, row in enumerate(DATA)
        ],
        "train_sampling_strategy": "sequential",
        "compute_loss_func": cross_entropy,
    },
    "early stopping": {
        "num_train_epochs": 5,
        "eval_dataset": [{**row, "labels": 1 - row["labels"]} for row in DATA[:33]],
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "callbacks": [EarlyStoppingCallback(early_stopping_patience=2)],
    },
    "language model": {
        "make_model": tiny.llama,
        "train_dataset": tiny.translations(81),
        "eval_dataset": tiny.translations(33),
        "data_collator": tiny.padded,
    },
    "generation": {
        "kind": Generating,
        "make_model": tiny.t5,
        "train_dataset": tiny.translations(81),
        "eval_dataset": tiny.translations(33),
        "data_collator": tiny.padded,
        "learning_rate": 0.02,
        "predict_with_generate": True,
        "generation_max_length": 8,
        "generation_num_beams": 2,
    },
}
RUNS |= {
    f"{name} and accumulation": {**RUNS[name], **RUNS["accumulation"]}
    for name in ("loss function", "language model", "early stopping")
}


def assert_same(two: dict[str, Any], one: dict[str, Any]) -> None:
    """Assert that two runs are one, but for the order of float32 sums."""
    torch.testing.assert_close(two["weights"], one["weights"], rtol=0, atol=1e-5)
    assert two["steps"] == one["steps"]
    for mine, other in zip(two["log"], one["log"], strict=True):
        assert mine == pytest.approx(other, rel=1e-4, nan_ok=True)
    np.testing.assert_array_equal(two["labels"], one["labels"])
    np.testing.assert_allclose(two["rows"], one["rows"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_one(name: str, tmp_path: Path) -> None:
    one = found(tmp_path / "1", name, num_processes=1)
    two = found(tmp_path / "2", name, num_processes=2)
    assert_same(two, one)
    last_step, max_steps, _ = two["steps"]
    assert (last_step < max_steps) == name.startswith("early stopping")


def measure(folder: Path) -> None:
    """Train by both Trainers with one and two micro-batches; write what the page has of each."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    for kind, name in ((transformers.Trainer, "plain"), (Trainer, "ours")):
        for num_parts in (1, 2):
            made, weights = tiny.trained(
                kind,
                folder / name,
                per_device_train_batch_size=tiny.BATCH_SIZE // size // num_parts,
                gradient_accumulation_steps=num_parts,
            )
            log = tiny.logged(made)
            last = next(each["eval_loss"] for each in reversed(log) if "eval_loss" in each)
            if made.is_world_process_zero():
                found = (log[0]["loss"], last, weights)
                torch.save(found, folder / f"{name} {size} {num_parts}.pt")


def test_the_page_has_what_both_trainers_measure(tmp_path: Path) -> None:
    for size in (1, 2):
        script = f"from pathlib import Path\nfrom {__name__} import measure\nmeasure(Path({str(tmp_path)!r}))"
        launch(script, num_processes=size, imports=(__name__,))
    page = (ROOT / "docs" / "from-trainer.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (one|two) process(?:es)?(, two .*?)? \| (.*) \| (.*) \|$", page, re.MULTILINE
    )
    assert len(rows) == 4
    *_, expected = torch.load(tmp_path / "plain 1 1.pt")
    for size, parts, *shown in rows:
        for name, cell in zip(("plain", "ours"), shown, strict=True):
            place = f"{name} {1 + (size == 'two')} {1 + bool(parts)}.pt"
            *losses, weights = torch.load(tmp_path / place)
            first, last, off = cell.split(", ")
            assert losses == pytest.approx([float(first), float(last)], rel=1e-3)
            distance = float((weights - expected).abs().max())
            if name == "ours":  # no more than the rounding of float32
                assert max(distance, float(off)) < 1e-6
            elif off != "-":
                assert distance == pytest.approx(float(off), rel=0.1)


_EIGHT_SAMPLES = {"per_device_train_batch_size": 8}
_OUTLIER = {
    "train_dataset": tiny.with_outlier(DATA, 100),
    "compute_loss_func": tiny.squares,
    **_EIGHT_SAMPLES,
}
HALF_PRECISION: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True, **_EIGHT_SAMPLES},
    "fp16": {"fp16": True, **_OUTLIER},
    # A rank of two computes twice its gradient, which the average halves.
    "fp16 at twice the scale": {"recipe": af.with_amp("fp16", init_scale=2.0**17), **_OUTLIER},
}


# Half precision rounds the gradient of each micro-batch, so only the same ones have the same sum.
@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize(
    ("name", "on_one"), [("bf16", "bf16"), ("fp16", "fp16 at twice the scale")]
)
def test_in_half_precision_two_processes_are_one_with_the_same_micro_batches(
    name: str, on_one: str, num_parts: int, tmp_path: Path
) -> None:
    parts, twice = ({"gradient_accumulation_steps": each * num_parts} for each in (1, 2))
    one = found(tmp_path / "1", on_one, num_processes=1, **twice)
    two = found(tmp_path / "2", name, num_processes=2, **parts)
    assert_same(two, one)
    updates = [each for each in two["log"] if "grad_norm" in each]
    skipped = [not np.isfinite(each["grad_norm"]) for each in updates]
    assert any(skipped) == (name == "fp16")
    # A rate that no update used is used next.
    rates = [each["learning_rate"] for each in updates]
    assert [rate == before for before, rate in pairwise(rates)] == skipped[:-1]


def test_two_processes_write_one_log_where_report_to_points(tmp_path: Path) -> None:
    given = {"report_to": ["tensorboard"], "include_num_input_tokens_seen": "all"}
    one, two = (scalars(tmp_path / str(number), num_processes=number, **given) for number in (1, 2))
    wanted = {"loss", "grad_norm", "learning_rate", "num_input_tokens_seen", "total_flos"}
    assert {"eval/loss", "eval/accuracy", *(f"train/{name}" for name in wanted)} < one.keys()
    assert two.keys() == one.keys()
    for name, values in one.items():
        assert two[name] == pytest.approx(values, rel=1e-4)


def scalars(folder: Path, **given: Any) -> dict[str, dict[int, float]]:
    """What a run has written for tensorboard: the values of each name by step, without times."""
    found(folder, "plain", **given)
    [file] = folder.rglob("events.out.tfevents*")
    board = EventAccumulator(str(file)).Reload()
    names = board.Tags()["scalars"]
    return {
        name: {event.step: event.value for event in board.Scalars(name)}
        for name in names
        if not name.endswith(("runtime", "per_second"))
    }


@pytest.mark.parametrize("name", ["plain", "shards"])
def test_a_run_resumes_on_another_number_of_processes(name: str, tmp_path: Path) -> None:
    steps = {"save_strategy": "steps", "save_steps": 10}
    whole = found(tmp_path / "1", name, num_processes=1, **steps)
    found(tmp_path / "2", name, num_processes=2, **steps)
    checkpoint = str(tmp_path / "2" / "checkpoint-10")
    state = json.loads((tmp_path / "2" / "checkpoint-10" / "trainer_state.json").read_text())
    assert state["global_step"] == 10
    resumed = found(tmp_path / "3", name, num_processes=1, resume=checkpoint, **steps)
    torch.testing.assert_close(resumed["weights"], whole["weights"], rtol=0, atol=1e-5)


def test_streams_and_batch_samplers_are_refused_on_several_ranks(tmp_path: Path) -> None:
    script = f"""
import pytest
from torch.utils.data import DataLoader, IterableDataset
from accel_fn.contrib.transformers import Trainer
from tests.contrib.transformers import tiny

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
    launch(script, imports=(__name__,))


def test_generation_from_shards_is_refused_on_all_ranks(tmp_path: Path) -> None:
    script = f"""
import pytest
import accel_fn as af
from {__name__} import Generating
from tests.contrib.transformers import tiny

made = tiny.trainer(
    Generating, {str(tmp_path)!r}, predict_with_generate=True, recipe=af.wrap_fsdp()
)
with pytest.raises(ValueError, match="Trainer: args.predict_with_generate must not be .* shards, got"):
    made.train()
"""
    launch(script, imports=(__name__,))


def test_ranks_that_hold_the_same_rows_are_refused(tmp_path: Path) -> None:
    script = f"""
import os
from pathlib import Path
from accel_fn.contrib.transformers import Trainer
from tests.contrib.transformers import tiny

os.environ["ACCEL_FN_MESH"] = "tp=2"
try:
    tiny.trainer(Trainer, Path({str(tmp_path)!r}), train_dataset=tiny.samples(9))
except ValueError as error:
    say(error)
"""
    text = "Trainer: mesh must have dp alone, got {'dp': 1, 'tp': 2}; leave out --mesh"
    launch(script, num_processes=2, expect=[text] * 2)
