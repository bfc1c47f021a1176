"""Laws 2, 3 and 6: two ranks by ZeRO give the result of one, and of the loop by hand."""

from __future__ import annotations

from functools import partial
from itertools import product

import accel_fn as af
from tests.contrib.deepspeed.engine.cases import PARTS, by_hand, distance, relative, train, zero

MAX_NORM = 0.5


def cases(folder):
    found = {}
    for stage, cut, optimizer in product(range(4), PARTS, ("sgd", "momentum")):
        found[f"law {stage} {cut} {optimizer}"] = partial(
            law, stage=stage, cut=cut, optimizer=optimizer
        )
    for stage in range(4):
        found[f"adamw {stage}"] = partial(law, stage=stage, cut="uneven", optimizer="adamw")
        if stage:
            found[f"cpu adam {stage}"] = partial(cpu_adam, stage=stage)
        found[f"bound {stage}"] = partial(smallest_bound, stage=stage)
    return found


def law(state, *, stage, cut, optimizer):
    """How far two ranks are from one, and from the loop by hand: parameters, losses, norms."""
    recipe = af.compose(zero(stage), af.clip(MAX_NORM), af.accumulate(2))
    ours, losses, norms, *_ = train(state, recipe, optimizer, cut)
    alone, _, norms_alone, *_ = train(af.DistState(), af.clip(MAX_NORM), optimizer)
    hand, losses_by_hand = by_hand(optimizer, max_norm=MAX_NORM)
    return {
        "one process": distance(ours, alone),
        "by hand": distance(ours, hand),
        "losses": relative(losses, losses_by_hand),
        "norms": relative(norms, norms_alone),
    }


def smallest_bound(state, *, stage):
    recipe = af.compose(af.clip(2.0), zero(stage), af.clip(0.1), af.clip(1.0))
    ours, *_ = train(state, recipe, "sgd", "even")
    hand, _ = by_hand("sgd", max_norm=0.1)
    return distance(ours, hand)


def cpu_adam(state, *, stage):
    """DeepSpeed's Adam for offloaded state, as the optimizer of a plan."""
    ours, *_ = train(state, zero(stage, "cpu"), "cpu adam", "uneven")
    return distance(ours, by_hand("adamw")[0])
