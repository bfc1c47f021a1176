"""Small models, their data, and one training of them: by transformers' Trainer or by ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")
BATCH_SIZE = 16
_TRAINER = (
    "recipe",
    "train_dataset",
    "compute_loss_func",
    "compute_metrics",
    "callbacks",
    "data_collator",
    "eval_dataset",
)


def samples(number: int = 206) -> list[dict[str, Any]]:
    """Rows of twelve tokens, labelled by the first one."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 100, (number, 12), generator=generator)
    return [{"input_ids": each, "labels": int(each[0] > 50)} for each in tokens]


def with_outlier(rows: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """The rows with numbers for `squares` as labels, one of which is beyond float16 at any loss scale."""
    labels = [float(row["labels"]) for row in rows]
    labels[number] = 1e6
    return [{**row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def squares(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The mean square of what the first logit is off by."""
    return (outputs.logits[:, 0].float() - labels).square().sum() / num_items_in_batch


def model(dropout: float = 0.0) -> BertForSequenceClassification:
    """A BERT of 4,400 parameters."""
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


def translations(number: int = 20) -> list[dict[str, Any]]:
    """Up to seven tokens, and the same ones backwards."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 40, (number, 7), generator=generator)
    lengths = torch.randint(1, 8, (number,), generator=generator).tolist()
    rows = [each[:length] for each, length in zip(tokens, lengths, strict=True)]
    return [{"input_ids": each, "labels": each.flip(0)} for each in rows]


def t5() -> T5ForConditionalGeneration:
    """A T5 of 6,000 parameters."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32}
    own = {"num_layers": 1, "num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    config = T5Config(**sizes, **own)
    return T5ForConditionalGeneration(config)


def llama() -> LlamaForCausalLM:
    """A Llama of 3,900 parameters."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad tokens by 0 and labels by -100 to the longest of the batch."""
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad([row["input_ids"] for row in rows], batch_first=True)
    labels = pad([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}


def trainer(kind: Any, folder: Path, *, dropout: float = 0.0, **given: Any) -> Any:
    """A Trainer of this class; what is given goes to it or to its arguments.

    `make_model` makes another model than the small BERT.
    """
    made = given.pop("make_model", lambda: model(dropout))()
    own = {name: given.pop(name) for name in _TRAINER if name in given}
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    defaults = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": BATCH_SIZE // num_processes,
        "per_device_eval_batch_size": BATCH_SIZE // num_processes,
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
        model=made,
        args=Seq2SeqTrainingArguments(str(folder), **{**defaults, **given}),
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
