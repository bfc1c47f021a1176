"""autocast: run code outside of a step in the contexts of the step's forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from accel_fn.core.state import DistState, check_state
from accel_fn.core.step import Step
from accel_fn.errors import ArgumentTypeError, message


@contextmanager
def autocast(step: Step, state: DistState) -> Iterator[None]:
    """Run the body of a `with` under the precision that the step computes its loss in.

    For samples, validation images and other forwards of your own. It enters the forward contexts of
    the plan, such as that of `with_amp`; without any, the body runs as it is. Gradients are neither
    computed nor left out: add `torch.no_grad()` where there are none to compute.

    Args:
        step: from `build`.
        state: of this rank.

    Yields:
        Nothing.

    Raises:
        TypeError: `step` is no `Step`.

    Cost: that of the contexts. No collective, so one rank may call it alone, except with
    `wrap_fsdp`, whose forwards gather.

    >>> import torch, accel_fn as af
    >>> state, step = af.build(af.with_amp("bf16")(af.Plan(loss_fn, model, optimizer)), af.DistState())
    >>> with torch.no_grad(), af.autocast(step, state):
    ...     model(torch.zeros(2, 4)).dtype
    torch.bfloat16
    """
    check_state("autocast", state)
    if not isinstance(step, Step):
        rule, got = "be a Step, as build returns it", type(step).__name__
        raise ArgumentTypeError(message("autocast", "step", rule, got))
    with ExitStack() as stack:
        for context in step.plan.forward_contexts:
            stack.enter_context(context(state))
        yield
