"""Preemption: a signal to one rank lets all ranks stop after the same step, to save and exit."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from accel_fn.core.plan import Plan, SlotFunction
from accel_fn.core.transform import fill, named
from accel_fn.errors import ArgumentError, ArgumentTypeError, message


class Preemption:
    """A transform and a context: shares a signal to one rank with all ranks, instead of ending the process.

    Schedulers send SIGTERM or SIGUSR1 before they take a machine away, often to one process of
    many. If any rank gets one, `report.extras["stop"]` is True on all ranks after the same step.
    The flag is sent with the weights that a step sums anyway.

    Args:
        signals: those to catch inside the `with` block; () for none, so that only `ask` counts.

    Raises:
        ValueError: a signal cannot be caught, or the `with` block is not in the main thread.
        TypeError: `signals` are not signals.

    Law: the step computes the same bits as without it. Tests: `tests/laws/law09_preemption.py`.

    Cost: one more number in a collective of the step; nothing on one rank.

    >>> import accel_fn as af
    >>> with af.Preemption() as preemption:
    ...     plan = preemption(af.Plan(loss_fn, model, optimizer))
    ...     state, step = af.build(plan, af.DistState())
    ...     state, report = step(state, batch)
    ...     if report.extras["stop"]:
    ...         path = af.save(step, state, "runs/a")
    ...         preemption.leave()
    """

    def __init__(
        self, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)
    ) -> None:
        for each in signals:
            if not isinstance(each, signal.Signals):
                rule = "be signals, such as signal.SIGTERM"
                raise ArgumentTypeError(message("Preemption", "signals", rule, each))
            if each in (signal.SIGKILL, signal.SIGSTOP):
                rule = "be some that a process can catch"
                raise ArgumentError(message("Preemption", "signals", rule, each.name))
        self._signals = tuple(signals)
        self._before: dict[signal.Signals, Any] = {}
        self._asked = False
        self._owner = os.getpid()
        self._transform = named(fill(should_stop=SlotFunction(self.asked)), "Preemption()")

    def __call__(self, plan: Plan) -> Plan:
        """Return a plan whose steps report a stop on all ranks if any rank got a signal."""
        return self._transform(plan)

    def __enter__(self) -> Preemption:
        """Catch the signals from now on."""
        if self._signals and threading.current_thread() is not threading.main_thread():
            rule = "be () outside of the main thread, where Python handles no signals"
            names = ", ".join(each.name for each in self._signals)
            raise ArgumentError(message("Preemption", "signals", rule, names))
        self._owner = os.getpid()
        for each in self._signals:
            self._before.setdefault(each, signal.signal(each, self._note))
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the former handlers."""
        for each, handler in self._before.items():
            # Python cannot restore a handler that was set outside of Python.
            with suppress(TypeError):
                signal.signal(each, handler)
        self._before.clear()

    def asked(self) -> bool:
        """Return whether this rank must stop; raise if the signals are not being caught."""
        if self._signals and not self._before:
            rule = "be listened for while steps are made"
            names = ", ".join(each.name for each in self._signals)
            repair = "train inside `with preemption:`, or give ()"
            raise ArgumentError(message("Preemption", "signals", rule, names, repair))
        return self._asked

    def ask(self) -> None:
        """Request a stop, as a signal does: for a thread that polls a cloud, for example."""
        self._asked = True

    def leave(self) -> NoReturn:
        """End this process with exit code 75, to be restarted and resumed.

        `accel-fn launch --max-restarts` starts the ranks again; otherwise the launch ends with this
        code too.
        """
        raise SystemExit(os.EX_TEMPFAIL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._owner:
            self._asked = True
            return
        # This process is a forked worker of a loader, so let the signal end the process.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
