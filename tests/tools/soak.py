"""`python -m tests.tools.soak --minutes 15 --seed 0`: killed runs end as undisturbed ones do.

Each run trains on a data set whose last batch is smaller than the ranks. It saves, at once or in the
background, evaluates, is killed at a random moment and resumes, until it has finished. Half of the runs keep
their number of ranks, and end at the bits of an undisturbed run. The others draw one to three ranks at
each resume, and end within 1e-12 of it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path

from tests.support.forked_ranks import EndedRank, run_worlds

MOST_ATTEMPTS = 40
PROGRAM = """
    import json, os, random, signal, threading
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import accel_fn as af

    given = json.loads({given!r})
    chance = random.Random(given["seed"])

    def loss_fn(model, batch):
        features, targets = batch
        return nn.functional.mse_loss(model(features), targets)

    state = af.init(device="cpu", timeout_s=120, seed=3)
    if given["kill"] is not None and state.rank == given["kill"][0] % state.world_size:
        if given["kill"][1] == "time":
            threading.Timer(given["kill"][2], os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            kill_at = given["kill"][2]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    recipe = af.compose(
        af.wrap_ddp(), af.accumulate(2), af.clip(0.5), af.ema(0.9),
        af.schedule(lambda step: 1 / (1 + 0.01 * step)),
    )
    state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), state)
    # 13 samples: the last batch of an epoch has one, for up to three ranks.
    features = torch.arange(39, dtype=torch.float64).reshape(13, 3).sin()
    data = TensorDataset(features, features.sum(1, keepdim=True))
    train = DataLoader(data, batch_size=4, shuffle=True, num_workers=given["workers"])
    loader = af.shard_loader(train, state)
    tests = af.shard_loader(DataLoader(data, batch_size=4), state)
    state = af.resume(step, state, given["folder"], {{"loader": loader}})
    say("from", state.step)
    for epoch in loader.epochs(given["epochs"], since=state):
        for batch in epoch:
            state, report = step(state, batch)
            if "kill_at" in globals() and state.step >= kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            # Ranks agree on these, since all draw from one seed.
            if chance.random() < 0.3:
                af.save(
                    step,
                    state,
                    given["folder"],
                    extras={{"loader": loader}},
                    keep=2,
                    wait=chance.random() < 0.5,
                )
            if chance.random() < 0.1:
                af.evaluate(step, state, tests)
    with af.averaged(step):
        averages = [each.tolist() for each in model.parameters()]
    if state.is_main:
        kept = [each.tolist() for each in model.parameters()]
        say(json.dumps([state.step, kept, averages]))
"""


def main() -> int:
    """Run until the time is up; return 1 if a run ended elsewhere."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance, counts = random.Random(given.seed), Counter[str]()
    end = time.monotonic() + given.minutes * 60
    while time.monotonic() < end:
        seed = chance.randrange(2**32)
        with tempfile.TemporaryDirectory() as folder:
            problem = disturbed(Path(folder), random.Random(seed), counts)
        if problem:
            print(f"run {counts['runs']} of --seed {given.seed} (its own {seed}): {problem}")
            return 1
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return 0


def disturbed(folder: Path, chance: random.Random, counts: Counter[str], epochs: int = 8) -> str:
    """Train with kills until the end; return what was wrong."""
    counts["runs"] += 1
    keeps, size, since = chance.random() < 0.5, chance.randint(1, 3), 0
    first, num_kills = size, chance.randint(2, 12)
    for attempt in range(MOST_ATTEMPTS):
        size = size if keeps or not attempt else chance.randint(1, 3)
        kill: tuple[int, str, float] | None = None
        if attempt < num_kills:
            by_time = chance.random() < 0.6
            when = chance.uniform(0.0, 1.5) if by_time else since + chance.randint(1, 12)
            kill = chance.randrange(3), "time" if by_time else "step", when
        ranks = train(
            folder, size, f"attempt_{attempt}", kill=kill, epochs=epochs,
            seed=chance.randrange(2**32), workers=chance.choice((0, 0, 1)),
        )  # fmt: skip
        counts["processes"] += size
        if all(rank.exit_code == 0 for rank in ranks):
            return difference(ended(ranks), undisturbed(first, epochs), exact=keeps)
        killed = [rank for rank in ranks if rank.exit_code == -9]
        if not killed:
            return f"{attempt + 1} attempts, then no rank was killed, and one failed: {ranks}"
        counts["kills"] += 1
        since = max([since, *(int(line.split()[1]) for line in said(ranks) if "from" in line)])
    return f"did not end in {MOST_ATTEMPTS} attempts"


@cache
def undisturbed(size: int, epochs: int) -> tuple[int, object]:
    """Return where a run ends that nobody kills."""
    with tempfile.TemporaryDirectory() as folder:
        return ended(
            train(Path(folder), size, "alone", kill=None, epochs=epochs, seed=0, workers=0)
        )


def train(folder: Path, size: int, name: str, **given: object) -> list[EndedRank]:
    """Train on that many ranks, from where the folder is; a killed rank has exit code -9."""
    program = PROGRAM.format(given=json.dumps({"folder": str(folder / "run"), **given}))
    return run_worlds({name: program}, folder, num_processes=size, timeout_s=300)[name]


def said(ranks: list[EndedRank]) -> list[str]:
    """Return the lines of all ranks."""
    return [line for rank in ranks for line in rank.stdout.splitlines()]


def ended(ranks: list[EndedRank]) -> tuple[int, object]:
    """Return the step, and the parameters with their averages."""
    assert all(rank.exit_code == 0 for rank in ranks), ranks
    [line] = [line for line in said(ranks) if line.startswith("[")]
    step, *values = json.loads(line)
    return step, values


def difference(found: tuple[int, object], expected: tuple[int, object], *, exact: bool) -> str:
    """Describe where two ends differ; nothing if they are equal, to the bit if `exact`."""
    largest = max(abs(a - b) for a, b in zip(numbers(found[1]), numbers(expected[1]), strict=True))
    if found[0] != expected[0] or largest > (0.0 if exact else 1e-12):
        return f"step {found[0]}, not {expected[0]}, or parameters {largest:g} off, exact={exact}"
    return ""


def numbers(values: object) -> list[float]:
    """Flatten lists."""
    return (
        [number for each in values for number in numbers(each)]
        if isinstance(values, list)
        else [values]
    )  # type: ignore[list-item]


if __name__ == "__main__":
    sys.exit(main())
