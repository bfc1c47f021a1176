"""The Trainer of transformers over wrap_deepspeed: `trainer.py FOLDER` trains twice for each stage."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import torch

from accel_fn.contrib.transformers import Trainer
from tests.contrib.deepspeed.engine.cases import zero
from tests.contrib.transformers import tiny

BEGUN = 3
"""The step of the first checkpoint, and of the model that is taken for the best."""


def work(folder: Path, recipe=None, resume=None) -> None:
    """Train on 65 samples, so that the last batch is one sample; write weights and log."""
    made = tiny.trainer(
        Trainer,
        folder,
        train_dataset=tiny.samples(65),
        eval_dataset=tiny.samples(33),
        recipe=recipe,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the best is the first, not the last
        **{f"{each}_strategy": "steps" for each in ("eval", "save")},
        **{f"{each}_steps": BEGUN for each in ("eval", "save")},
    )
    made.train(resume_from_checkpoint=resume)
    made.save_model(str(folder / "whole"))
    if made.is_world_process_zero():
        torch.save(tiny.logged(made), folder / "log.pt")


def main(folder: Path) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # of DeepSpeed's collectives, one each
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    for stage in range(4):
        place = folder / f"stage {stage}"
        work(place, zero(stage))
        work(folder / f"resumed {stage}", zero(stage), str(place / f"checkpoint-{BEGUN}"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
