"""autocast: run code outside of a step in the forward contexts of the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from accel_fn.core.state import DistState, check_state
from accel_fn.core.step import Step
from accel_fn.errors import ArgumentTypeError, message


@contextmanager
def autocast(step: Step, state: DistState) -> Iterator[None]:
    """Run the body of a `with` under the precision in which the step computes its loss.

    Use it for sampling, validation images and other forwards outside of the step. It enters the
    forward contexts of the plan, such as the one of `with_amp`. It does not disable gradients: add
    `torch.no_grad()` if you need none.

    Args:
        step: from `build`.
        state: this rank's state.

    Yields:
        Nothing.

    Raises:
        TypeError: `step` is not a `Step`.

    Cost: the cost of the contexts, without a collective, so one rank may call it alone. With
    `wrap_fsdp`, all ranks must call it: forwards gather parameters.

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
