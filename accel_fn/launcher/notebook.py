"""Launch ranks from a notebook: the cell that launches them shows the displays of rank 0.

The caller uses IPython only if it is imported already. The ranks of a notebook import it.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import Any

from accel_fn.errors import WorldError

NO_PIPE = -1


def shell_of_kernel() -> Any:
    """Return the shell of the notebook that runs in this process; None outside of a notebook."""
    ipython = sys.modules.get("IPython") if "ipykernel" in sys.modules else None
    return ipython.get_ipython() if ipython else None


def check_unused_accelerator(shell: Any) -> None:
    """Refuse a notebook that has used an accelerator: its process would keep memory that ranks need."""
    torch = sys.modules.get("torch")
    device = torch.accelerator.current_accelerator() if torch else None
    if torch is None or device is None:
        return
    # torch.mps has no function `is_initialized`.
    is_initialized = getattr(torch.get_device_module(device), "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return
    named = re.compile(rf"\b({device.type}|accelerator)\b|\.(to|init|distributed)\(")
    cells = [
        f"In [{number}]" for number, cell in enumerate(shell.user_ns["In"]) if named.search(cell)
    ]
    raise WorldError(
        f"launch: the process of the notebook must not have used {device.type}, whose memory it "
        f"keeps from the ranks; cells that may have used it: {', '.join(cells) or 'none found'}; "
        f"restart the kernel and use {device.type} in fn alone, or pass cpu=True"
    )


@contextmanager
def shown_displays(shell: Any) -> Iterator[int | None]:
    """Show rank 0's displays in the running cell; yield the pipe's file descriptor.

    Outside of notebooks, yield None.
    """
    if shell is None:
        yield None
        return
    reader, writer = Pipe(duplex=False)
    thread = threading.Thread(target=_show, args=(reader, shell.display_pub))
    thread.start()
    try:
        yield writer.fileno()
    finally:
        # Send None as an end mark. To close the pipe is not enough: a process that rank 0 started,
        # and that outlives it, may hold the pipe open.
        with writer, suppress(OSError):
            writer.send(None)
        thread.join()


def _show(reader: Connection, publisher: Any) -> None:
    # `recv` raises an EOFError or OSError if rank 0 is killed while it sends. If a display cannot
    # be shown, `reader` is closed, so that rank 0's next send fails instead of waiting forever.
    with reader, suppress(EOFError, OSError):
        for method, args, kwargs in iter(reader.recv, None):
            getattr(publisher, method)(*args, **kwargs)


def send_displays(pipe: int) -> Callable[[], None]:
    """Send this rank's displays into a pipe, for the notebook; without a pipe, drop them.

    Return a function that sends the figures that are still open, as at the end of a cell.
    """
    import ipykernel  # noqa: F401 - progress bars detect a notebook by it
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    connection = None if pipe == NO_PIPE else Connection(pipe, readable=False)
    lock = threading.Lock()

    def send(method: str, *args: Any, **kwargs: Any) -> None:
        if connection is not None:
            with lock:
                connection.send((method, args, kwargs))

    shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    for method in ("publish", "clear_output"):
        setattr(shell.display_pub, method, partial(send, method))
    return lambda: shell.events.trigger("post_execute")
