"""A small BERT, its data, and one training of it: by transformers' Trainer or by ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

NUM_PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")
BATCH_SIZE = 16
_TRAINER = (
    "recipe",
    "train_dataset",
    "compute_loss_func",
    "compute_metrics",
    "callbacks",
    "eval_dataset",
)


def samples(number: int = 206) -> list[dict[str, Any]]:
    """Rows of twelve tokens, labelled by the first one."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 100, (number, 12), generator=generator)
    return [{"input_ids": each, "labels": int(each[0] > 50)} for each in tokens]


def model(dropout: float = 0.0) -> BertForSequenceClassification:
    """A BERT of 17,000 parameters."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=100,
        max_position_embeddings=12,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForSequenceClassification(config)


def trainer(kind: Any, folder: Path, *, dropout: float = 0.0, **given: Any) -> Any:
    """A Trainer of this class on the small BERT; what is given goes to it or to its arguments."""
    own = {name: given.pop(name) for name in _TRAINER if name in given}
    defaults = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": BATCH_SIZE // NUM_PROCESSES,
        "per_device_eval_batch_size": BATCH_SIZE // NUM_PROCESSES,
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "epoch",
        "report_to": [],
        "use_cpu": True,
        "learning_rate": 1e-3,
        "warmup_steps": 5,
        "disable_tqdm": True,
    }
    data = samples()
    return kind(
        **{"train_dataset": data, "eval_dataset": data[:37], **own},
        model=model(dropout),
        args=TrainingArguments(str(folder), **{**defaults, **given}),
    )


def trained(kind: Any, folder: Path, **given: Any) -> tuple[Any, torch.Tensor]:
    """Train, and return the Trainer with all parameters as one vector."""
    made = trainer(kind, folder, **given)
    made.train()
    return made, weights_of(made)


def weights_of(made: Any) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([each.detach().flatten() for each in made.model.parameters()])


def logged(made: Any) -> list[dict[str, float]]:
    """What a Trainer has logged and does not depend on time."""
    history = made.state.log_history
    kept = [{name: each[name] for name in LOGGED if name in each} for each in history]
    return [each for each in kept if each]
