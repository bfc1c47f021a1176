"""One process without a launcher offloads: `alone.py FOLDER` prints its distance to the loop by hand."""

import json
import sys
import warnings
from pathlib import Path

import torch

import accel_fn as af
from tests.contrib.deepspeed.engine.cases import (
    by_hand,
    distance,
    make_model,
    relative,
    train,
    whole,
    zero,
)


def main(folder: Path) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # of DeepSpeed's collectives, one each
    found = {}
    for stage in (1, 2, 3):
        recipe = af.compose(zero(stage, "cpu"), af.clip(0.5), af.accumulate(3))
        model = make_model()
        model.register_buffer("unused", torch.ones(2))
        ours, losses, _, state, step = train(af.init(), recipe, "momentum", model=model)
        hand, losses_by_hand = by_hand("momentum", max_norm=0.5)
        af.save(step, state, folder / str(stage))
        af.save_model(step.plan.model, folder / f"weights{stage}")
        other = make_model()
        other.register_buffer("unused", torch.zeros(2))
        af.load_model(other, folder / f"weights{stage}")
        equal = all(map(torch.equal, other.parameters(), whole(step.plan.model)))
        found[stage] = [max(distance(ours, hand), relative(losses, losses_by_hand)), equal]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
