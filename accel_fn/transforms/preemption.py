"""Preemption: one rank is asked to go, all finish the step, save once and leave to come back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from accel_fn.errors import ArgumentError, ArgumentTypeError, message
from accel_fn.step.plan import Plan, SlotFunction
from accel_fn.step.transform import fill, named


class Preemption:
    """A transform, and a `with`: signals are noted instead of obeyed, and all ranks hear of them.

    SIGTERM and SIGUSR1 are what schedulers send before they take a machine away, often to
    one process of many. Whatever rank gets one, `report.extras["stop"]` is True on all ranks
    after the same step; the word travels with the weights that a step sums anyway.

    Args:
        signals: to be noted, from `with` on until its end; () for none: only `ask` counts.

    Raises:
        ValueError: one of them cannot be caught, or is not caught in the main thread.
        TypeError: they are not signals.

    Law: the step computes what it computes without it, bit for bit.

    Cost: a number more in a collective that is there; nothing on one rank.

    >>> import accel_fn as af
    >>> with af.Preemption() as preemption:
    ...     plan = preemption(af.Plan(loss_fn, model, optimizer))
    ...     state, step = af.build(af.DistState(), plan)
    ...     state, report = step(state, batch)
    ...     if report.extras["stop"]:
    ...         path = af.save("runs/a", state, step)
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
        """The plan whose steps end the run once a rank was signalled."""
        return self._transform(plan)

    def __enter__(self) -> Preemption:
        """Note signals from now on."""
        if self._signals and threading.current_thread() is not threading.main_thread():
            rule = "be () outside of the main thread, where Python handles no signals"
            names = ", ".join(each.name for each in self._signals)
            raise ArgumentError(message("Preemption", "signals", rule, names))
        self._owner = os.getpid()
        for each in self._signals:
            self._before.setdefault(each, signal.signal(each, self._note))
        return self

    def __exit__(self, *_: object) -> None:
        """Obey them again."""
        for each, handler in self._before.items():
            with suppress(TypeError):  # one that was not set from Python cannot be set again
                signal.signal(each, handler)
        self._before.clear()

    def asked(self) -> bool:
        """Has this rank been asked to go? Refused where nobody listens for the signals."""
        if self._signals and not self._before:
            rule = "be listened for while steps are made"
            names = ", ".join(each.name for each in self._signals)
            repair = "train inside `with preemption:`, or give ()"
            raise ArgumentError(message("Preemption", "signals", rule, names, repair))
        return self._asked

    def ask(self) -> None:
        """Ask this rank to go, as a signal does: for a thread that listens to a cloud, say."""
        self._asked = True

    def leave(self) -> NoReturn:
        """End this process with exit code 75: started again, it goes on.

        `accel-fn launch --max-restarts` starts the ranks again; without, that is its exit code.
        """
        raise SystemExit(os.EX_TEMPFAIL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._owner:
            self._asked = True
            return
        signal.signal(number, signal.SIG_DFL)  # a fork, such as a loader's worker, obeys
        os.kill(os.getpid(), number)
