"""The first code of a rank of `accel-fn launch`: it prepares the process and runs the user's program.

It is a script that imports only the standard library, since every rank waits for its imports.
"""

from __future__ import annotations

import builtins
import ctypes
import faulthandler
import io
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

STACK = "stack"
_PR_SET_PDEATHSIG = 1
_REPORT_AFTER_S, _END_AFTER_S = 5.0, 30.0


def main(launcher: str, cpus: str, show: str, kind: str, target: str, *arguments: str) -> None:
    """Run a script, a module or a program as one rank.

    `launcher` is the process id of the launcher. `cpus` has the processors of each local rank; if
    it is empty, the system chooses them. If `show` is not empty, the rank prints its own error.
    """
    open_streams()
    die_with(int(launcher))
    print_whole_lines()
    if cpus:
        bind(cpus.split(";")[int(os.environ["LOCAL_RANK"])])
    if kind == "program":
        # Let the system handle Ctrl-C. Python's handler only marks the signal and raises later, so
        # a Ctrl-C just before the exec would be lost.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        _unblock_ctrl_c()
        os.execvp(target, [target, *arguments])  # noqa: S606
    file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    record_stacks(file.with_name(STACK))
    start = _run_module if kind == "module" else _run_script
    _run(start, target, list(arguments), file, show=bool(show))


def die_with(launcher: int) -> None:
    """Make this process end soon after the launcher, however the launcher ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    else:
        threading.Thread(target=_die_after, args=(launcher,), daemon=True).start()
    # If the launcher ended before the lines above, this process has another parent, and those lines
    # would wait for the end of that parent.
    if os.getppid() != launcher:
        os._exit(1)


def open_streams() -> None:
    """Open standard streams that the parent closed: stderr as stdout, the other two on /dev/null.

    Otherwise the next file or socket would get the number of a closed stream, and native code would
    print into it.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            opened = os.dup(1) if number == 2 else os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


def print_whole_lines() -> None:
    """Write each printed line in one piece, so that the lines of ranks do not mix."""
    for stream in (sys.stdout, sys.stderr):
        # In a notebook, the streams are of another class, without `reconfigure`.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def record_stacks(path: Path) -> None:
    """Make Python write the stack to a file when native code crashes, and when SIGTERM arrives."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    except FileNotFoundError:
        # The launcher is gone, and the reaper has removed the folder.
        os._exit(1)
    faulthandler.enable(file)
    faulthandler.register(signal.SIGTERM, file, all_threads=False, chain=True)
    # A forked process inherits these handlers. Send its stack to /dev/null: it is not the rank's.
    os.register_at_fork(after_in_child=lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), file))


def _unblock_ctrl_c() -> None:
    # The launcher has blocked Ctrl-C for the rank's start, in which Python would print a traceback.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _die_after(launcher: int) -> None:
    """Kill this process within a second of its launcher's end, on systems without PR_SET_PDEATHSIG."""
    while os.getppid() == launcher:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


def bind(cpus: str) -> None:
    """Run only on these processors, such as `0,1,8`."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, map(int, cpus.split(",")))


def _run(
    start: Callable[[str, list[str]], None],
    target: str,
    arguments: list[str],
    file: Path,
    *,
    show: bool,
) -> None:
    """Run the user's program, and write its error to a file.

    The launcher prints the error of one rank only. With `show`, the rank prints its error too.
    """
    # Read RANK now, since the program may empty os.environ.
    hook, own, rank = _Hook(), os.getpid(), os.environ["RANK"]
    if not show:
        sys.excepthook = hook
    try:
        _unblock_ctrl_c()
        start(target, arguments)
    except SystemExit as end:
        # A process that the program has forked also gets here, but must not write a record: it is
        # not the rank.
        if _status(end) == 0 or os.getpid() != own:
            raise
        text = _record(end, None, file)
        if isinstance(end.code, int):
            raise
        if show:
            print(end.code, file=sys.stderr)
    except BaseException as error:
        error.__traceback__ = frames = _of_the_program(error.__traceback__)
        if os.getpid() != own:
            sys.excepthook(type(error), error, frames)
            sys.exit(1)
        text = _record(error, frames, file)
        if isinstance(error, KeyboardInterrupt):
            sys.exit(128 + signal.SIGINT)
        # Exit handlers read `last_value`. Set it, as Python does for an error that ends a program.
        hook.recorded = sys.last_value = error
        sys.excepthook(type(error), error, frames)
    else:
        return
    # Threads and exit handlers could keep this failed rank alive, while its peers wait for it. So
    # end it soon.
    reason = "" if show else f"rank {rank} has failed and is slow to end\n{text}"
    threading.Thread(target=_end_if_slow, args=(reason,), daemon=True).start()
    sys.exit(1)


class _Hook:
    """An excepthook that prints every error except the recorded one, which the launcher prints."""

    recorded: BaseException | None = None

    def __call__(
        self, kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        if error is not self.recorded:
            sys.__excepthook__(kind, error, frames)


def _run_script(target: str, arguments: list[str]) -> None:
    """Run a file as `python FILE` does, in a new `__main__`."""
    path = os.path.abspath(target)
    sys.argv = [target, *arguments]
    if os.path.isdir(path) or path.endswith((".pyz", ".zip")):
        _search_first(path)
        runpy.run_path(path, run_name="__main__")
        return
    _search_first(os.path.dirname(os.path.realpath(path)))
    if path.endswith(".pyc"):
        runpy.run_path(path, run_name="__main__")
        return
    loader = SourceFileLoader("__main__", path)
    main_module = _replace_main(__file__=path, __cached__=None, __loader__=loader)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main_module.__dict__)  # noqa: S102


def _run_module(target: str, arguments: list[str]) -> None:
    """Run a module as `python -m MODULE` does, with the function of `runpy` that Python calls for it."""
    sys.argv = ["-m", *arguments]
    _search_first(os.getcwd())
    _replace_main()
    runpy._run_module_as_main(target)  # type: ignore[attr-defined]


def _search_first(folder: str) -> None:
    """Put this folder first in `sys.path`, unless the user has set PYTHONSAFEPATH."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _replace_main(**attributes: object) -> ModuleType:
    """Make a new `__main__`."""
    # Do not use runpy for this: at the program's end, it would restore this file's `__main__`,
    # while threads of the program may still need the program's `__main__`.
    main_module = ModuleType("__main__")
    main_module.__dict__.update({"__annotations__": {}, "__builtins__": builtins} | attributes)
    sys.modules["__main__"] = main_module
    return main_module


def _of_the_program(frames: TracebackType | None) -> TracebackType | None:
    """Drop the outer frames of a traceback, which belong to this file and to runpy."""
    starts = (__file__, "<frozen runpy>", runpy.__file__)
    while frames is not None and frames.tb_frame.f_code.co_filename in starts:
        frames = frames.tb_next
    return frames


def _record(error: BaseException, frames: TracebackType | None, file: Path) -> str:
    """Write this rank's error to a file, in a form that torch's agent can read; return its text."""
    whole = traceback.TracebackException(type(error), error, frames)
    text, last = "".join(whole.format()), "".join(whole.format_exception_only())
    own_code = None
    if isinstance(error, SystemExit):
        own_code = _status(error)
        text = last = f"{f'exit code {own_code}' if isinstance(error.code, int) else error.code}\n"
    now = time.time()
    extra = {"py_callstack": text, "timestamp": str(int(now))}
    content = {
        "message": {"message": last.strip(), "extraInfo": extra},
        "stack": text.removesuffix(last),
        "exception": last,
        "exit_code": own_code,
        "time": now,
    }
    try:
        # Write under another name and rename, so that the launcher never finds half a file.
        Path(f"{file}.new").write_text(json.dumps(content))
        os.replace(f"{file}.new", file)
    except OSError:
        print(text, file=sys.stderr)
    return text


def _status(end: SystemExit) -> int:
    """Return the exit status that other processes will see, which has 8 bits: 255 for -1."""
    return end.code & 0xFF if isinstance(end.code, int) else int(end.code is not None)


def _end_if_slow(text: str) -> None:
    """End a failed rank whose threads or exit handlers keep it alive; print why it failed."""
    time.sleep(_REPORT_AFTER_S)
    if text:
        print(text, file=sys.stderr)
    time.sleep(_END_AFTER_S)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
