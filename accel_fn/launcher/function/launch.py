"""launch: run a function on every rank of a new world, from Python and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never, TypeVar

from accel_fn.errors import ArgumentTypeError, message

T = TypeVar("T")


def launch(
    fn: Callable[..., T],
    *args: Any,
    num_processes: int = 2,
    kwargs: Mapping[str, Any] | None = None,
    cpu: bool = False,
    gpu_ids: Sequence[int] | None = None,
    mixed_precision: str | None = None,
    num_microbatches: int | None = None,
    wrap: str | None = None,
    threads_per_process: int | None = None,
    timeout_s: float | None = None,
    **others: Never,
) -> list[T]:
    """Run `fn(*args, **kwargs)` on every rank of a world of fresh processes.

    Each rank is a new interpreter, with the variables that torchrun would set, so
    `af.init()` in `fn` needs no argument. Nothing is forked and no script is imported
    again, so `launch` works after CUDA has started, and for functions of a notebook's
    cell or of a script without `if __name__ == "__main__"`. They are sent by cloudpickle;
    ranks import what comes from a module. Files of settings are not read. Ranks inherit
    variables such as ACCEL_FN_WRAP, unless an argument replaces them.

    When a rank fails, the others are stopped, and its exception is raised here.
    Ctrl-C stops all ranks. No rank outlives this process.

    Args:
        fn: what each rank runs; `af.init()` in it returns the rank's state.
        *args: for `fn`, the same on every rank.
        num_processes: ranks, all on this machine.
        kwargs: for `fn`, by name.
        cpu: use the CPU even if there are accelerators.
        gpu_ids: accelerators to use, by index.
        mixed_precision: what `with_amp()` without an argument does.
        num_microbatches: what `accumulate()` without an argument does.
        wrap: what `wrap()` does, "ddp" or "fsdp".
        threads_per_process: CPU threads of each; default: the cores, divided.
        timeout_s: seconds that a collective may take before all ranks report and end.
        **others: none; arguments of `fn` go into `kwargs`, which cannot clash with these names.

    Returns:
        The results of `fn`, in rank order.

    Raises:
        Exception: the first exception of `fn` on any rank, with the rank as a note and the
            rank's traceback as the cause.
        RuntimeError: a rank was killed or exited, or this process is itself a rank.
        ValueError: an argument is outside its range.
        TypeError: `fn` is no function, an argument cannot be pickled, or is none of these.

    Cost: starts the interpreters, which import torch if `fn` uses it; arguments and
    results are written to a temporary folder and read once.

    >>> import accel_fn as af
    >>> def add_ranks(offset):
    ...     state = af.init(device="cpu")
    ...     return state.rank + offset, af.reduce_sum(state.rank, state)
    >>> af.launch(add_ranks, 10, num_processes=2)
    [(10, 1), (11, 1)]
    """
    if not callable(fn):
        raise ArgumentTypeError(message("launch", "fn", "be a function", fn))
    for name, value in dict[str, object](others).items():
        rule, repair = "be an argument of launch", f"for fn, write kwargs={{{name!r}: ...}}"
        raise ArgumentTypeError(message("launch", name, rule, value, repair))
    from accel_fn.launcher.function.call import call

    return call(
        fn,
        args,
        kwargs or {},
        num_processes=num_processes,
        cpu=cpu,
        gpu_ids=None if gpu_ids is None else tuple(gpu_ids),
        mixed_precision=mixed_precision,
        num_microbatches=num_microbatches,
        wrap=wrap,
        threads_per_process=threads_per_process,
        timeout_s=timeout_s,
    )
