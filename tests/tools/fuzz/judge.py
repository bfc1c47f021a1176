"""Judges programs in another process, so that one that aborts or hangs counts as a failure."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Protocol, Self

import torch

TIMEOUT_S = 60.0


class Program(Protocol):
    """A program that can be judged, shrunk and printed."""

    @property
    def ingredients(self) -> frozenset[tuple[str, str]]:
        """What makes it another kind of program than others."""

    def simpler(self) -> Iterable[Self]:
        """Yield programs that are simpler in one way."""

    def source(self) -> str:
        """Return the program as a user can run it."""

    def verdict(self) -> str:
        """Return `equal`, `refused`, `warned`, `undefined` if there is no right result, or a fault."""


def fails(result: str) -> bool:
    return result not in {"equal", "refused", "warned", "undefined"}


def shrunk(program: Program, judge: Callable[[Program], str]) -> Program:
    """Make a failing program simpler for as long as it fails."""
    for simpler in program.simpler():
        if fails(judge(simpler)):
            return shrunk(simpler, judge)
    return program


def printed(program: Program, result: str) -> str:
    """Return the program as a user can run it, with the fault in its first line."""
    return f"# {result}\n{program.source()}"


class Judge:
    """Judges programs: use it in `with`, and call it with a program."""

    def __enter__(self) -> Judge:
        """Start the process now, before there is a thread that a fork would lose."""
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self._process.kill()
        self._process.join()
        self._ours.close()

    def __call__(self, program: Program) -> str:
        self._ours.send(program)
        try:
            result = str(self._ours.recv()) if self._ours.poll(TIMEOUT_S) else "hangs"
        except EOFError:
            self._process.join()
            result = f"the process ended with code {self._process.exitcode}"
        # the process may have ended, or have threads left over
        if fails(result) and "differs" not in result:
            self.__exit__()
            self.__enter__()
        return result


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        connection.send(connection.recv().verdict())
