"""clip and clip_value: keep gradients within a bound."""

from __future__ import annotations

import torch

from accel_fn.core.dtensor import is_sharded
from accel_fn.core.grads import Grads
from accel_fn.core.plan import SlotFunction
from accel_fn.core.state import DistState
from accel_fn.core.transform import Transform, fill, transform
from accel_fn.errors import check_positive


@transform
def clip(max_norm: float) -> Transform:
    """Scale gradients so that their global L2 norm is at most `max_norm`.

    The direction is kept. The norm is that of the gradients that the optimizer
    will see: over all ranks and micro-batches, averaged and unscaled. A norm
    that is not finite makes all gradients not finite, or zero.

    Law: the norm is at most the bound; inactive means bit-identical; clipping twice is clipping
    once, but for the 1e-6 that is added to the norm, as torch does.
    Tests: `tests/laws/law06_clipping.py`.

    Args:
        max_norm: the bound, finite and > 0, in units of the unscaled gradient.

    Returns:
        A transform. Adds `grad_norm` ([], float32, before clipping) to the report.

    Raises:
        ValueError: `max_norm` is not finite or not > 0 (a TypeError too if it is not a number).

    Cost: one read of the gradients; no write if the optimizer is fused, else one multiply in place;
    no host synchronisation.

    Source: Pascanu et al. 2013, arXiv:1211.5063, section 3.2.

    >>> import accel_fn as af
    >>> af.clip(1.0)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, gradients=[clip(1.0)])
    """
    bound = check_positive("clip", "max_norm", max_norm)
    return fill(gradients=ClipSlot(clip_norm, max_norm=bound))


class ClipSlot(SlotFunction):
    """The slot function of clip: it calls `clip_norm` with its bound."""

    traits = frozenset({"clips_norm"})


def clip_norm(state: DistState, grads: Grads, *, max_norm: float) -> Grads:
    """Multiply the gradients by max_norm / norm, if this factor is below one."""
    return grads.scaled((max_norm / (grads.norm() + 1e-6)).clamp(max=1.0))


@transform
def clip_value(max_value: float) -> Transform:
    """Clamp every element of the gradients to [-max_value, max_value].

    The values are those that the optimizer will see: averaged and unscaled.
    The direction is not kept. NaN stays NaN.

    Law: no element beyond the bound; inactive means bit-identical; clamping twice is clamping once.
    Tests: `tests/laws/law06_clipping.py`.

    Args:
        max_value: the bound, finite and > 0, in units of the unscaled gradient.

    Returns:
        A transform.

    Raises:
        ValueError: `max_value` is not finite or not > 0 (a TypeError too if it is not a number).

    Cost: one read and one write of the gradients, on an accelerator two of each in a few kernels; no
    host synchronisation.

    >>> import accel_fn as af
    >>> af.clip_value(0.5)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, gradients=[clip_value(0.5)])
    """
    bound = check_positive("clip_value", "max_value", max_value)
    return fill(gradients=SlotFunction(clamp_values, max_value=bound))


def clamp_values(state: DistState, grads: Grads, *, max_value: float) -> Grads:
    """Clamp every element of the gradients to the bound."""
    plain = not any(each.is_cpu or each.is_sparse or is_sharded(each) for each in grads.present())
    if not plain or not grads.present():
        return grads.map(lambda value: value.clamp(-max_value, max_value))
    # On an accelerator, two passes, each in a few kernels for all tensors, are faster than one
    # kernel per tensor.
    values = grads.values()
    clamped = [*torch._foreach_clamp_min([each for each in values if each is not None], -max_value)]
    torch._foreach_clamp_max_(clamped, max_value)
    of_each = iter(clamped)
    tensors = tuple([None if value is None else next(of_each) for value in values])
    return Grads(tensors, None, None, grads.norm_read, grads.norm_fn, grads.owners)
