"""skip_nonfinite, skip_spikes: skip harmful updates, with the same decision on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from ctypes import c_float
from typing import Any

import torch
from torch import Tensor

from accel_fn.core.delayed_read import DelayedRead
from accel_fn.core.grads import Grads
from accel_fn.core.plan import AcceptFn, Plan, Stateful
from accel_fn.core.state import DistState, step_name
from accel_fn.core.transform import Transform, fill, transform
from accel_fn.errors import SkippedError, check_count, check_positive

_LEAST = 2.0
"""A spike is more than this many times the mean, even if earlier norms were nearly equal."""


@transform
def skip_nonfinite(max_consecutive: int = 10) -> Transform:
    """Skip updates whose gradients are not finite; raise after too many in a row.

    For bfloat16 and float32: a bad batch does not put nan into the parameters. Optimizer,
    schedule and average stay as they are, and `report.applied` is False. The check is of
    the global norm before clipping, so all ranks decide the same. A norm beyond float32
    counts as not finite, as it does for float16.

    Law: the run over the other batches, bit for bit. Tests: `tests/laws/law07_skipping.py`.

    Args:
        max_consecutive: number of skipped updates in a row that is an error, >= 1. With float16,
            allow for a few at the start, until the loss scale has decreased.

    Returns:
        A transform. The report's `grad_norm` is always there.

    Raises:
        ValueError: `max_consecutive` is not an integer >= 1 (a TypeError too if it is not an
            integer). From the step, on every rank, an ArithmeticError: so many updates in a row
            were skipped. On an accelerator it is raised one step later.

    Cost: one read of the gradients for their norm, shared with `clip`; no host
    synchronisation with a fused optimizer, one with any other.

    >>> import accel_fn as af
    >>> af.skip_nonfinite()(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, accept=[skip_nonfinite()])
    """
    check_count("skip_nonfinite", "max_consecutive", max_consecutive)
    return fill(accept=Stateful(finite_norm, max_consecutive=max_consecutive))


@transform
def skip_spikes(
    num_sigmas: float = 6.0, *, window: int = 128, max_consecutive: int = 10
) -> Transform:
    """Skip updates whose gradient norm is far above those before it.

    A spike is more than `num_sigmas` standard deviations above the mean of the last
    `window` norms that were not spikes, and more than twice that mean. Until half a window
    is known, only non-finite norms are skipped. A norm of 0, of a batch without weight, is not a
    spike and does not enter the window. As with `skip_nonfinite`, all ranks decide the same, and
    nothing else changes.

    Law: the run over the other batches, bit for bit. Tests: `tests/laws/law07_skipping.py`.

    Args:
        num_sigmas: finite and > 0.
        window: number of norms in the mean, >= 4.
        max_consecutive: number of skipped updates in a row that is an error, >= 1.

    Returns:
        A transform. The report's `grad_norm` is always there.

    Raises:
        ValueError: an argument breaks its rule. From the step, on every rank, an
            ArithmeticError: so many updates in a row were skipped. On an accelerator it is raised
            one step later.

    Cost: one read of the gradients for their norm, shared with `clip`, and a few small kernels
    over the window; no host synchronisation with a fused optimizer, one with any other.

    Source: OLMo-core's `SkipStepOptimizer`, which takes the loss for it, too.

    >>> import accel_fn as af
    >>> af.skip_spikes()(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, accept=[skip_spikes()])
    """
    return fill(
        accept=Stateful(
            norm_in_line,
            num_sigmas=check_positive("skip_spikes", "num_sigmas", num_sigmas),
            window=check_count("skip_spikes", "window", window, minimum=4),
            max_consecutive=check_count("skip_spikes", "max_consecutive", max_consecutive),
        )
    )


def finite_norm(state: DistState, plan: Plan, *, max_consecutive: int) -> AcceptFn:
    """Make, for one step function, the check that the norm is finite."""
    return FiniteNorm(state.device, max_consecutive)


def norm_in_line(
    state: DistState, plan: Plan, *, num_sigmas: float, window: int, max_consecutive: int
) -> AcceptFn:
    """Make, for one step function, the check that the norm is in line with earlier norms."""
    return NormInLine(state.device, num_sigmas, window, max_consecutive)


class FiniteNorm:
    """Checks that the norm is finite; raises after too many non-finite norms in a row.

    If norms are on an accelerator, the state of the check is there too, and the host reads the
    count one step late. On the CPU, the state is Python numbers: a dozen operations on tensors of
    one element would cost more than the norm.
    """

    _RULE = "be finite"

    def __init__(self, device: torch.device, max_consecutive: int) -> None:
        self.max_consecutive = max_consecutive
        self._in_a_row: Any = torch.zeros((), dtype=torch.int64, device=device)
        self._norm_before: Tensor | None = None
        self._name_before = ""
        self._delayed = DelayedRead()
        self._pending: dict[str, Any] = {}
        """The new values of the attributes that `commit` changes."""
        self._answers = torch.tensor(False), torch.tensor(True)

    def __call__(self, state: DistState, grads: Grads) -> Tensor:
        # If the last update was prepared but not applied, drop its count, which is still on its way
        # to the host.
        if self._pending:
            self._delayed.last()
        norm, name = grads.norm(), step_name(state.step + 1, state.call)
        if norm.is_cpu:
            return self._answers[self._accepts(norm.item(), name)]
        if not isinstance(self._in_a_row, Tensor) or norm.device != self._in_a_row.device:
            # The state has been on the host so far, or came from a checkpoint. Move it to the
            # device of the norm.
            self._move(norm.device)
        ok, changes = self._judge(norm)
        in_a_row = torch.where(ok, 0, self._in_a_row + 1)
        known = self._delayed(in_a_row)
        if known is not None and self._norm_before is not None:
            self._check(known, self._name_before, self._norm_before)
        self._pending = {
            "_in_a_row": in_a_row,
            "_norm_before": norm,
            "_name_before": name,
            **changes,
        }
        return ok

    def _accepts(self, norm: float, name: str) -> bool:
        """Return whether a norm that the host knows is accepted."""
        if isinstance(self._in_a_row, Tensor):
            self._read()
        ok, changes = self._judge_number(norm)
        in_a_row = 0 if ok else self._in_a_row + 1
        self._check(in_a_row, name, norm)
        self._pending = {"_in_a_row": in_a_row, **changes}
        return ok

    def _move(self, device: torch.device) -> None:
        """Move the state to an accelerator, where the norms are."""
        for name, each in self.state_dict().items():
            setattr(self, f"_{name}", each.to(device))

    def _read(self) -> None:
        """Convert the state to numbers: `__init__` and `load_state_dict` set tensors."""
        for name, each in self.state_dict().items():
            setattr(self, f"_{name}", each.tolist())

    def commit(self) -> None:
        """Store the new values of this update. `apply` calls this after the optimizers have run."""
        vars(self).update(self._pending)
        self._pending = {}

    def _check(self, in_a_row: int | Tensor, name: str, norm: float | Tensor) -> None:
        """Raise if too many updates in a row were skipped."""
        if in_a_row < self.max_consecutive:
            return
        raise SkippedError(
            f"step: the gradient norm must {self._RULE} once in {self.max_consecutive} updates, got "
            f"{float(norm):g} at step {name}, and so for {int(in_a_row)} in a row; look at "
            "their batches, resume from a checkpoint, or lower the learning rate"
        )

    def _judge(self, norm: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return whether the norm is accepted, and new values of attributes for `commit` to set."""
        return torch.isfinite(norm), {}

    def _judge_number(self, norm: float) -> tuple[bool, dict[str, Any]]:
        """Judge a number as `_judge` judges a tensor."""
        return math.isfinite(norm), {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that checkpoints hold."""
        return {"in_a_row": torch.as_tensor(self._in_a_row, dtype=torch.int64)}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Restore the state of a checkpoint."""
        # Drop a pending count, since it is of the run before this load.
        self._delayed.last()
        self._norm_before = None
        for name in self.state_dict():
            setattr(self, f"_{name}", saved[name])


class NormInLine(FiniteNorm):
    """Checks the norm against earlier norms; raises after too many spikes in a row."""

    _RULE = "be in line with those before it"

    def __init__(
        self, device: torch.device, num_sigmas: float, window: int, max_consecutive: int
    ) -> None:
        super().__init__(device, max_consecutive)
        self.num_sigmas = num_sigmas
        self._norms: Any = torch.zeros(window, device=device)
        self._num_seen: Any = torch.zeros((), dtype=torch.int64, device=device)
        self._places = torch.arange(window, device=device)

    def _judge(self, norm: Tensor) -> tuple[Tensor, dict[str, Any]]:
        norm = norm.to(self._norms)
        window = len(self._norms)
        places = self._places.to(norm.device)
        known = places < self._num_seen
        count = known.sum()
        mean = self._norms.sum() / count
        spread = torch.where(known, self._norms - mean, 0.0).square().sum() / (count - 1)
        bound = torch.maximum(mean + self.num_sigmas * spread.sqrt(), _LEAST * mean)
        ok = torch.isfinite(norm) & ((norm <= bound) | (self._num_seen < window // 2))
        here = places == self._num_seen % window
        # A batch of weight 0 has the norm 0. Leave this norm out of the window, since it would
        # lower the mean.
        counts = ok & (norm > 0)
        norms = torch.where(here & counts, norm, self._norms)
        return ok, {"_norms": norms, "_num_seen": self._num_seen + counts}

    def _judge_number(self, norm: float) -> tuple[bool, dict[str, Any]]:
        norms, num_seen = self._norms, self._num_seen
        # Round the norm to float32, in which a checkpoint stores norms. So a resumed run makes the
        # same decisions as an uninterrupted one.
        norm, window = c_float(norm).value, len(norms)
        ok = math.isfinite(norm)
        if ok and num_seen >= window // 2:
            known = norms[:num_seen]
            mean = math.fsum(known) / len(known)
            spread = math.fsum([(each - mean) ** 2 for each in known]) / (len(known) - 1)
            ok = norm <= max(mean + self.num_sigmas * math.sqrt(spread), _LEAST * mean)
        # A batch of weight 0 has the norm 0. Leave this norm out of the window, since it would
        # lower the mean.
        if not ok or norm <= 0:
            return ok, {}
        place = num_seen % window
        return ok, {
            "_norms": [*norms[:place], norm, *norms[place + 1 :]],
            "_num_seen": num_seen + 1,
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that checkpoints hold."""
        norms = torch.as_tensor(self._norms, dtype=torch.float32)
        num_seen = torch.as_tensor(self._num_seen, dtype=torch.int64)
        return {**super().state_dict(), "norms": norms, "num_seen": num_seen}
