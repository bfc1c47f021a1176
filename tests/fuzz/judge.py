"""A process that judges programs, so that one that aborts or hangs is a failure like any other."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from types import TracebackType

import torch

from tests.fuzz.programs import Program, fails, verdict

TIMEOUT_S = 60.0


class Judge:
    """Call it with a program for its verdict; use it in `with`."""

    def __enter__(self) -> Judge:
        """Start the process; it has no thread yet that a fork would lose."""
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
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
        if fails(result) and "differs" not in result:  # it may have left threads, or be no more
            self.__exit__()
            self.__enter__()
        return result


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        connection.send(verdict(connection.recv()))
