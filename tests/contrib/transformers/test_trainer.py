"""The Trainer over accel_fn's step against transformers' own on one process."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate.parallelism_config import ParallelismConfig
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import EarlyStoppingCallback, TrainingArguments

import accel_fn as af
from accel_fn.contrib.transformers import PRIVATE_NAMES, Trainer
from tests.contrib.transformers import tiny
from tests.support.processes import ROOT

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.1},
    "no clipping": {"max_grad_norm": 0.0},
    "clipping that binds": {"max_grad_norm": 0.05},
    "bf16": {"bf16": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "cosine": {"lr_scheduler_type": "cosine", "weight_decay": 0.1},
    "workers": {"dataloader_num_workers": 2, "max_steps": 4, "eval_strategy": "no"},
    "drop last": {"dataloader_drop_last": True},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
}


def mean_of_sum(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """Divide a sum as users do in a `compute_loss_func`."""
    return F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_one_process_trains_to_the_bits_of_the_plain_trainer(name: str, tmp_path: Path) -> None:
    given = RUNS[name]
    ours, weights = tiny.trained(Trainer, tmp_path / "a", **given)
    theirs, expected = tiny.trained(transformers.Trainer, tmp_path / "b", **given)
    if name == "clipping that binds":  # the norm, and so the factor, is summed in another order
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
    else:
        assert torch.equal(weights, expected)
    for mine, plain in zip(tiny.logged(ours), tiny.logged(theirs), strict=True):
        assert mine == pytest.approx(
            plain, rel=1e-6
        )  # norms and means of losses add in another order


@pytest.mark.slow
def test_in_bf16_a_gradient_differs_by_the_rounding_of_its_micro_batches(tmp_path: Path) -> None:
    def gradient(begin: int, end: int, num_parts: int) -> torch.Tensor:
        _, weights = tiny.trained(
            Trainer,
            tmp_path,
            bf16=True,
            train_dataset=tiny.samples()[begin:end],
            train_sampling_strategy="sequential",
            per_device_train_batch_size=(end - begin) // num_parts,
            gradient_accumulation_steps=num_parts,
            max_steps=1,
            max_grad_norm=0.0,
            optim="sgd",
            learning_rate=1.0,
            warmup_steps=0,
            eval_strategy="no",
        )
        before = torch.cat([each.detach().flatten() for each in tiny.model().parameters()])
        return before - weights

    at_once, in_parts = gradient(0, 16, 1), gradient(0, 16, 2)
    first, second = gradient(0, 8, 1) / 2, gradient(8, 16, 1) / 2
    torch.testing.assert_close(
        in_parts, first + second, rtol=0, atol=1e-6
    )  # of the weights' float32
    unit = torch.finfo(torch.bfloat16).eps / 2
    bound = unit * (at_once.abs() + first.abs() + second.abs()) + 1e-6
    off = (in_parts - at_once).abs()
    assert (off <= bound).all()
    assert off.max() > 1e-4  # far more than float32's


@pytest.mark.slow
def test_a_loss_function_gets_the_number_of_items_of_its_micro_batch(tmp_path: Path) -> None:
    given: dict[str, Any] = {"compute_loss_func": mean_of_sum}
    ours, weights = tiny.trained(Trainer, tmp_path / "a", **given)
    theirs, expected = tiny.trained(transformers.Trainer, tmp_path / "b", **given)
    assert torch.equal(weights, expected)
    assert tiny.logged(ours)[0]["loss"] == tiny.logged(theirs)[0]["loss"]


@pytest.mark.slow
def test_accumulation_is_the_large_batch_of_the_plain_trainer(tmp_path: Path) -> None:
    parts = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8}
    ours, weights = tiny.trained(Trainer, tmp_path / "a", **parts)
    theirs, expected = tiny.trained(transformers.Trainer, tmp_path / "b")
    torch.testing.assert_close(weights, expected, rtol=0, atol=2e-6)
    for mine, plain in zip(tiny.logged(ours), tiny.logged(theirs), strict=True):
        assert mine == pytest.approx(plain, rel=1e-5)


def accuracy(found: Any) -> dict[str, float]:
    """Accuracy, and the number of rows that came."""
    hits = np.argmax(found.predictions, axis=1) == found.label_ids
    return {"accuracy": float(hits.mean()), "rows": float(len(hits))}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"eval_accumulation_steps": 1}, {"bf16": True}])
def test_evaluation_gives_metrics_the_rows_of_the_plain_trainer(
    more: dict[str, Any], tmp_path: Path
) -> None:
    made = [
        tiny.trainer(kind, tmp_path / kind.__module__, compute_metrics=accuracy, **more)
        for kind in (Trainer, transformers.Trainer)
    ]
    ours, theirs = (each.evaluate() for each in made)  # before any training
    for name in ("eval_loss", "eval_accuracy", "eval_rows"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-6)
    mine, plain = (each.predict(tiny.samples(21)) for each in made)
    np.testing.assert_array_equal(mine.predictions, plain.predictions)
    np.testing.assert_array_equal(mine.label_ids, plain.label_ids)
    assert mine.metrics["test_loss"] == pytest.approx(plain.metrics["test_loss"], rel=1e-6)


@pytest.mark.slow
def test_a_prediction_step_of_the_user_computes_in_the_precision_of_the_arguments(
    tmp_path: Path,
) -> None:
    @torch.no_grad()
    def logits(self: Any, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return None, model(inputs["input_ids"]).logits, inputs["labels"]

    rows = []
    for kind in (Trainer, transformers.Trainer):
        own = type("Own", (kind,), {"prediction_step": logits})
        made, _ = tiny.trained(own, tmp_path / kind.__module__, bf16=True, max_steps=1)
        rows.append(made.predict(tiny.samples(21)).predictions)
    np.testing.assert_array_equal(*rows)


@pytest.mark.slow
def test_metrics_by_batch_and_inputs_reach_the_function(tmp_path: Path) -> None:
    class Counting:
        """Counts what each call brings."""

        def __init__(self) -> None:
            self.rows = 0

        def __call__(self, found: Any, compute_result: bool = False) -> dict[str, float]:
            assert len(found.inputs) == len(found.predictions) == len(found.losses)
            self.rows += len(found.predictions)
            return {"rows": float(self.rows)} if compute_result else {}

    made = tiny.trainer(
        Trainer,
        tmp_path,
        compute_metrics=Counting(),
        batch_eval_metrics=True,
        include_for_metrics=["loss", "inputs"],
    )
    assert made.evaluate()["eval_rows"] == 37


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [af.compose(), af.ema(0.9)], ids=["plain", "average"])
def test_a_run_resumed_at_any_step_ends_at_the_same_bits(recipe: Any, tmp_path: Path) -> None:
    given: dict[str, Any] = {"dropout": 0.1, "save_strategy": "steps", "save_steps": 5}
    whole, weights = tiny.trained(Trainer, tmp_path, recipe=recipe, **given)
    for step in (5, 15):
        resumed = tiny.trainer(Trainer, tmp_path / f"from {step}", recipe=recipe, **given)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert torch.equal(tiny.weights_of(resumed), weights)
        assert tiny.logged(resumed) == tiny.logged(whole)


@pytest.mark.slow
def test_a_checkpoint_of_the_plain_trainer_is_resumed(tmp_path: Path) -> None:
    given: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5}
    _, weights = tiny.trained(transformers.Trainer, tmp_path, **given)
    resumed = tiny.trainer(Trainer, tmp_path, **given)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert torch.equal(tiny.weights_of(resumed), weights)


@pytest.mark.slow
def test_the_best_model_is_loaded_and_training_stops_early(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "learning_rate": 0.5,  # the loss gets worse
        "num_train_epochs": 9,
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "save_total_limit": 1,
        "callbacks": [EarlyStoppingCallback(early_stopping_patience=2)],
    }
    ours, weights = tiny.trained(Trainer, tmp_path / "a", **given)
    theirs, _ = tiny.trained(transformers.Trainer, tmp_path / "b", **given)
    assert ours.state.global_step == theirs.state.global_step < 9 * 13
    assert ours.state.best_global_step == theirs.state.best_global_step
    best = load_file(f"{ours.state.best_model_checkpoint}/model.safetensors")
    assert torch.equal(
        weights, torch.cat([best[name].flatten() for name, _ in ours.model.named_parameters()])
    )


@pytest.mark.slow
def test_skipped_updates_reach_schedule_and_log(tmp_path: Path) -> None:
    def third_batch_fails(state: af.DistState, grads: af.Grads) -> torch.Tensor:
        return torch.tensor(state.step != 2)

    def recipe(plan: Any) -> Any:
        return replace(plan, accept=(third_batch_fails,))

    made, _ = tiny.trained(Trainer, tmp_path, recipe=recipe, max_steps=5, eval_strategy="no")
    rates = [each["learning_rate"] for each in tiny.logged(made) if "learning_rate" in each]
    assert rates == pytest.approx(
        [0, 2e-4, 4e-4, 4e-4, 6e-4]
    )  # a rate that no update used is used next


@pytest.mark.slow
@pytest.mark.parametrize("num_parts", [1, 2])
def test_fp16_is_the_loop_by_hand_that_skips_the_same_updates(
    num_parts: int, tmp_path: Path
) -> None:
    data = tiny.with_outlier(tiny.samples(64), 40)  # in the third of four batches, in both epochs
    given: dict[str, Any] = {
        "fp16": True,
        "compute_loss_func": tiny.squares,
        "train_dataset": data,
        "train_sampling_strategy": "sequential",
        "eval_strategy": "no",
        "per_device_train_batch_size": 16 // num_parts,
        "gradient_accumulation_steps": num_parts,
    }
    made, weights = tiny.trained(Trainer, tmp_path, **given)
    expected, log = fp16_by_hand(data, num_parts)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)  # norms add in another order
    for mine, by_hand in zip(tiny.logged(made), log, strict=True):
        assert mine == pytest.approx(by_hand, rel=1e-5, nan_ok=True)
    assert [number for number, each in enumerate(log) if not np.isfinite(each["grad_norm"])] == [
        2,
        6,
    ]


def fp16_by_hand(data: list[Any], num_parts: int) -> tuple[torch.Tensor, list[dict[str, float]]]:
    """Train for two epochs with torch's own loss scale; the weights, and loss, norm and rate by update."""
    model = tiny.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 5, 8)
    scaler = torch.amp.GradScaler("cpu")
    log = []
    model.train()
    for rows in [data[begin : begin + 16] for begin in range(0, 64, 16)] * 2:
        losses = []
        for part in range(num_parts):
            batch = transformers.default_data_collator(
                rows[part * 16 // num_parts :][: 16 // num_parts]
            )
            labels = batch.pop("labels")
            with torch.autocast("cpu", torch.float16):
                loss = tiny.squares(model(**batch), labels, len(labels)) / num_parts
            scaler.scale(loss).backward()
            losses.append(loss.item())
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        [rate] = schedule.get_last_lr()
        log.append({"loss": sum(losses), "grad_norm": norm, "learning_rate": rate})
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() >= scale:
            schedule.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()]), log


@pytest.mark.slow
def test_fp16_keeps_its_loss_scale_in_checkpoints(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "fp16": True,
        "compute_loss_func": tiny.squares,
        "train_dataset": tiny.with_outlier(tiny.samples(64), 40),
        "save_strategy": "steps",
        "save_steps": 3,
    }
    whole, weights = tiny.trained(Trainer, tmp_path, **given)
    resumed = tiny.trainer(Trainer, tmp_path / "resumed", **given)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert torch.equal(tiny.weights_of(resumed), weights)
    assert str(tiny.logged(resumed)) == str(tiny.logged(whole))  # as text: a norm may be nan
    assert resumed._state.scaler.scale == whole._state.scaler.scale < 2**16


@pytest.mark.slow
def test_logs_go_where_report_to_says(tmp_path: Path) -> None:
    made, _ = tiny.trained(Trainer, tmp_path, report_to=["tensorboard"], max_steps=3)
    assert [*tmp_path.rglob("events.out.tfevents*")]
    assert made.state.log_history[0]["grad_norm"] > 0


@pytest.mark.slow
def test_generation_of_a_seq2seq_trainer_is_left_alone(tmp_path: Path) -> None:
    class Generating(Trainer, transformers.Seq2SeqTrainer):
        """Ours in front of that which generates in evaluation."""

    given: dict[str, Any] = {
        "make_model": tiny.t5,
        "train_dataset": tiny.translations(),
        "data_collator": tiny.padded,
        "max_steps": 2,
        "eval_strategy": "no",
        "predict_with_generate": True,
        "generation_max_length": 5,
    }
    rows = []
    for kind in (Generating, transformers.Seq2SeqTrainer):
        made, _ = tiny.trained(kind, tmp_path / kind.__name__, **given)
        rows.append(made.predict(tiny.translations(7)).predictions)
    np.testing.assert_array_equal(*rows)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fsdp": ({"fsdp": True}, r"args.fsdp must not be set.*wrap_fsdp"),
    "torch_compile": ({"torch_compile": True}, r"args.torch_compile must not be set.*compiled\(\)"),
    "auto": (
        {"auto_find_batch_size": True},
        r"args.auto_find_batch_size must not.*accumulation_steps",
    ),
    "rebalance": ({"train_sampling_strategy": "batch_rebalance"}, r".*shares out samples by their"),
    "static graph": ({"ddp_static_graph": True}, r"args.ddp_static_graph must not"),
    "buckets": ({"ddp_bucket_cap_mb": 5}, r"args.ddp_bucket_cap_mb must not be set, got 5"),
    "buffers": ({"ddp_broadcast_buffers": True}, r"args.ddp_broadcast_buffers must not"),
    "split": ({"accelerator_config": {"split_batches": True}}, r"args.accelerator_config must not"),
    "axes": ({"parallelism_config": ParallelismConfig(tp_size=1)}, r"args.parallelism_config must"),
    "lomo": ({"optim": "lomo"}, r"args.optim must not be set, got .*in the backward"),
    "cache": ({"torch_empty_cache_steps": 3}, r"args.torch_empty_cache_steps must not"),
}


@pytest.mark.parametrize(("given", "text"), REFUSED.values(), ids=list(REFUSED))
def test_arguments_that_are_not_supported_are_refused_by_name(
    given: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"Trainer: {text}"):
        tiny.trainer(Trainer, tmp_path, **given)


def test_the_page_lists_the_arguments_that_are_refused() -> None:
    page = (ROOT / "docs" / "from-trainer.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page.partition("## Arguments that")[2], re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)(?:`|=)", row)}
    not_set_here = {"deepspeed", "lomo", "split_batches", "dispatch_batches"}
    assert listed - not_set_here == {name for given, _ in REFUSED.values() for name in given}


def test_private_names_of_transformers_are_those_that_are_listed() -> None:
    plain, ours = transformers.Trainer, vars(Trainer)
    missing = [name for name in PRIVATE_NAMES if not hasattr(plain, name)]
    assert missing == ["_loss_shifts_labels"]  # set by __init__
    made = [name for name in ours if name.startswith("_") and not name.startswith("__")]
    overridden = {name for name in made if hasattr(plain, name)}
    assert overridden <= set(PRIVATE_NAMES)


def test_a_stream_on_one_process_is_read_as_it_comes(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(tiny.samples(40))

    ours = tiny.trainer(Trainer, tmp_path, train_dataset=Stream(), max_steps=2)
    assert len(next(iter(ours.get_train_dataloader()))["labels"]) == tiny.BATCH_SIZE


def test_batches_of_a_batch_sampler_stay_on_one_process(tmp_path: Path) -> None:
    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            data = self.train_dataset
            loader = DataLoader(
                data, batch_sampler=[[7, 1, 5]], collate_fn=transformers.default_data_collator
            )
            return self.accelerator.prepare(loader)

    data = tiny.samples(9)
    [batch] = tiny.trainer(Own, tmp_path, train_dataset=data).get_train_dataloader()
    expected = torch.stack([data[number]["input_ids"] for number in (7, 1, 5)])
    assert torch.equal(batch["input_ids"], expected)


def test_arguments_of_the_user_are_not_changed(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    Trainer(model=tiny.model(), args=args)
    assert args.average_tokens_across_devices


@pytest.mark.slow
def test_the_update_is_made_before_the_callback_of_the_optimizer(tmp_path: Path) -> None:
    seen = []

    class Looking(transformers.TrainerCallback):
        """Compares the model with the new one."""

        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            pairs = zip(model.parameters(), tiny.model().parameters(), strict=True)
            seen.extend((new.grad is None, torch.equal(new, old)) for new, old in pairs)

    given: dict[str, Any] = {"callbacks": [Looking()], "max_steps": 1, "warmup_steps": 0}
    tiny.trained(Trainer, tmp_path, **given)
    assert all(has_none for has_none, _ in seen)
    assert not all(is_old for _, is_old in seen)


@pytest.mark.slow
def test_a_state_of_the_trainer_is_json(tmp_path: Path) -> None:
    tiny.trained(Trainer, tmp_path, save_strategy="epoch", num_train_epochs=1)
    state = json.loads((tmp_path / "checkpoint-13" / "trainer_state.json").read_text())
    assert state["global_step"] == 13
