"""The parts that programs of the catalogue share: numbers, data, a model, and two training loops."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import accel_fn as af


@dataclass(frozen=True)
class Case:
    """The numbers of a program."""

    seed: int = 0
    world_size: int = 1
    k: int = 1
    num_samples: int = 12
    batch_size: int = 6
    strategy: str = "wrap_ddp"
    cp: int = 1
    """The number of ranks that share each sequence."""

    @property
    def world(self) -> dict[str, Any]:
        """What `simulate` takes."""
        if self.cp == 1:
            return {"world_size": self.world_size}
        return {"mesh": {"dp": self.world_size, "cp": self.cp}}

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


def recipe(case: Case) -> af.Transform:
    return af.compose(getattr(af, case.strategy)(), af.accumulate(case.k))


def samples(case: Case) -> tuple[Tensor, Tensor]:
    x = torch.randn(case.num_samples, 4, generator=case.generator(), dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin() + x[:, :1]


def labels(case: Case, num_classes: int = 3) -> Tensor:
    return torch.randint(0, num_classes, (case.num_samples,), generator=case.generator())


def network(num_outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, num_outputs)).double()


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).double()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def update(model: nn.Module, loss: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train_by_hand(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batches: Iterable[Any]
) -> dict[str, Tensor]:
    optimizer = sgd(model)
    return figures(model, [update(model, loss_fn(model, batch), optimizer) for batch in batches])


def train(
    state: af.DistState,
    case: Case,
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batches: Iterable[Any],
    *,
    check_loss: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    plan = recipe(case)(af.Plan(loss_fn, model, sgd(model), **options))
    state, step = af.build(plan, state, check_loss=check_loss)
    losses = []
    for batch in batches:
        state, report = step(state, batch)
        losses.append(report.loss)
    return figures(model, losses)


def two_loops(
    case: Case,
    make_model: Callable[[], nn.Module],
    loss_fn: Callable[[Any, Any], Any],
    loader: DataLoader[Any],
    **options: Any,
) -> tuple[Callable[[], Any], Callable[[af.DistState], Any]]:
    """Return the loop by hand and the one with steps, over the batches of a loader."""
    return (
        lambda: train_by_hand(make_model(), loss_fn, loader),
        lambda state: train(
            state, case, make_model(), loss_fn, af.shard_loader(loader, state), **options
        ),
    )


def train_in_turn(
    state: af.DistState,
    wraps: af.Transform,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: Sequence[Callable[[Any, Any], Any]],
    batch: Any,
) -> dict[str, Tensor]:
    """Train one model by a plan for each loss, in turn."""
    steps = []
    for loss_fn in losses:
        state, step = af.build(wraps(af.Plan(loss_fn, model, optimizer)), state)
        steps.append(step)
    for _ in range(3):
        for step in steps:
            state, _ = step(state, af.shard_batch(batch, state))
    return figures(model)


def train_on(
    state: af.DistState,
    folder: str,
    plan: af.Plan,
    batches: af.ShardedLoader[Any],
    num_epochs: int,
    stops_after: int | None,
    *,
    make_batch: Callable[[Any, af.DistState], Any] = lambda batch, state: batch,
) -> dict[str, Tensor] | None:
    """Go on from the last checkpoint to the end, or stop with a checkpoint after so many batches."""
    state, step = af.build(plan, state)
    state = af.resume(step, state, folder, extras={"data": batches})
    for batch in chain.from_iterable(batches.epochs(num_epochs, since=state)):
        state, _ = step(state, make_batch(batch, state))
        if state.step == stops_after:
            af.save(step, state, folder, extras={"data": batches})
            return None
    return figures(plan.model)


def stopped_and_resumed(
    state: af.DistState, run: Callable[[af.DistState, str, int | None], Any], stops_after: int
) -> Any:
    """Run to a step, where a run saves, and again from there; return what the second run returns."""
    with tempfile.TemporaryDirectory() as folder:
        folder = af.broadcast([folder], state)[0]
        run(state, folder, stops_after)
        found = run(state, folder, None)
        af.barrier(state)
    return found


def figures(model: nn.Module, losses: Sequence[Tensor] = ()) -> dict[str, Tensor]:
    """Return copies of the parameters, whole ones of FSDP's shards, and the losses."""
    found = {f"loss {number}": loss for number, loss in enumerate(losses)}
    for name, value in model.named_parameters():
        found[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return {name: value.detach() for name, value in found.items()}


def predictions(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"outputs": model(batch[0]), "names": [f"{float(each):.6f}" for each in batch[1]]}


def rows_of(found: dict[str, Any]) -> dict[str, Tensor]:
    names = torch.tensor([float(name) for name in found["names"]], dtype=torch.float64)
    return {"outputs": found["outputs"].detach(), "names": names}


class Hardest(Sampler[int]):
    """A sampler of the highest scores, which the loop changes."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores

    def __iter__(self) -> Iterator[int]:
        for _ in self.scores:
            index = int(self.scores.argmax())
            # Far down: with a sample twice in a batch, two ranks may have equal rows, a warning.
            self.scores[index] -= 100
            yield index

    def __len__(self) -> int:
        return len(self.scores)

    def learn(self, indices: Tensor) -> None:
        self.scores[indices] *= 0.5
        self.scores[int(indices.sum()) % len(self)] += 2


def taught_batches(
    case: Case,
    of_ranks: Callable[[DataLoader[Any]], Iterable[Any]],
    all_of: Callable[[Tensor], Tensor],
    **options: Any,
) -> Iterator[Any]:
    """Yield batches of a sampler that learns from the indices of each, which `all_of` ranks have."""
    x, y = samples(case)
    sampler = Hardest(x.sum(1))
    rows = TensorDataset(x, y, torch.arange(len(x)))
    for batch in of_ranks(DataLoader(rows, case.batch_size, sampler=sampler, **options)):
        yield batch
        sampler.learn(all_of(batch[2]))
