"""`python -m tests.tools.mutants.probe` prints whether each detector notices a bug, as a JSON object. The
detectors are `build`, `assert_equivalent` and `accel-fn test`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import torch

import accel_fn as af
from accel_fn.errors import AccelError, NotEquivalentError
from accel_fn.testing import assert_equivalent, simulate
from accel_fn.testing.promises import check_promises
from tests.support import strategies as ours


def batches(*, tokens: bool = False, sizes: tuple[int, ...] = (7, 5, 6)) -> list[Any]:
    """Make global batches of samples or of labelled tokens."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in sizes:
        inputs = torch.randn(size, 3, 3, generator=generator).double()
        labels = torch.randint(0, 4, (size, 3), generator=generator)
        labels[torch.rand(size, 3, generator=generator) < 0.5] = -100
        pair = inputs[:, 0], inputs[:, 1, :1]
        found.append({"inputs": inputs, "labels": labels} if tokens else pair)
    return found


def pairs() -> Iterator[tuple[af.Plan, af.Plan, list[Any], int]]:
    """Yield a plan, one that must be equivalent to it, batches, and the number of ranks."""
    overflowing = batches()
    overflowing.insert(1, (overflowing[1][0] * float("inf"), overflowing[1][1]))
    tokens = {"model": ours.token_model(), "loss_fn": ours.token_loss}
    labelled = ours.plan(**tokens, weight_fn=af.count_labels("labels"))
    both = [af.skip_nonfinite(), af.schedule(lambda n: 1 / (n + 1))]
    for wrap in (af.wrap_ddp(), af.wrap_fsdp()):
        for inner in ([], [af.clip(0.05)], [af.clip_value(0.01)]):
            plan = af.compose(*inner)(ours.plan())
            yield plan, af.compose(wrap, af.accumulate(3))(plan), batches(), 2
        yield labelled, af.compose(wrap, af.accumulate(2))(labelled), batches(tokens=True), 2
        plan = af.compose(*both)(ours.plan())
        yield plan, af.compose(wrap, af.accumulate(2))(plan), overflowing, 2
    yield ours.plan(), af.accumulate(3)(ours.plan()), batches(), 1
    yield labelled, af.accumulate(3)(labelled), batches(tokens=True), 1
    yield ours.plan(), af.local_sgd(1)(ours.plan()), batches(), 2
    yield ours.plan(), af.reproducible(2)(ours.plan()), batches(sizes=(8, 4, 6)), 2
    frozen = af.freeze("0", until=2)(ours.plan(optimizer=ours.adamw))
    yield frozen, af.compose(af.wrap_ddp(), af.accumulate(2))(frozen), batches(), 2


def who_notices(plan: af.Plan, other: af.Plan, given: list[Any], world_size: int) -> str:
    """Return what raises an error while both plans train; empty if nothing does."""
    try:
        assert_equivalent(plan, other, given, world_sizes=(1, world_size))
    except NotEquivalentError:
        return "assert_equivalent"
    except AccelError:
        return "build"
    except Exception:  # an error of torch
        return "assert_equivalent"
    return ""


def notices() -> dict[str, bool]:
    """Return, for each of the three, whether it notices the bug that is planted here."""
    found = {who_notices(*pair) for pair in pairs()}
    try:
        verdicts, _ = simulate(check_promises, world_size=2, timeout_s=30.0)
        is_broken = not all(each.holds for each in verdicts)
    except Exception:
        is_broken = True
    return {
        "build": "build" in found,
        "assert_equivalent": "assert_equivalent" in found,
        "accel-fn test": is_broken,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(json.dumps(notices()))
