"""Forks a process that has imported what commands need, once for each request. Importing torch
takes most of the time of a short command. The fork runs the same `main` as the command, in its own
environment, folder and session."""

import gc
import importlib
import json
import os
import signal
import sys
import tempfile

_LOADED = (
    "checkpoint.save_weights",
    "checkpoint.weights",
    "cli.app",
    "cli.config",
    "cli.explain",
    "cli.launch",
    "cli.test",
    "launcher.launch",
    "launcher.plan_launch",
    "launcher.run",
    "launcher.settings",
    "contrib.estimate.command",
    "contrib.estimate.memory",
    "observe.explain",
    "testing.promises",
    "parallel.ddp",
)


def main():
    """Answer requests, one line of JSON each: start a command, or return how it ended."""
    for name in _LOADED:
        importlib.import_module(f"accel_fn.{name}")
    gc.freeze()  # else each fork would collect all that was imported at its end
    for line in sys.stdin:
        request = json.loads(line)
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            _answer(os.waitstatus_to_exitcode(status) if pid else None)
            continue
        pid = os.fork()
        if pid == 0:
            _become(**request)
        _answer(pid)


def _answer(value):
    print(json.dumps(value), flush=True)


def _become(arguments, folder, variables):
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as if nobody had it ignored
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # the parent has looked it up already
    for number, name in ((0, os.devnull), (1, "stdout"), (2, "stderr")):
        file = os.open(name, os.O_RDWR)
        os.dup2(file, number)
    sys.argv = ["accel-fn", *arguments]
    importlib.import_module("accel_fn.cli").main()


if __name__ == "__main__":
    main()
