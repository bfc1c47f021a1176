"""Records which operations a piece of code runs."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

HOST_READ = "_local_scalar_dense"
"""The operation by which the host waits for a value of a device."""


class OperationsNamed(TorchDispatchMode):
    """Records the operations whose names contain a word."""

    def __init__(self, word):
        super().__init__()
        self.word, self.seen = word, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.word in str(func):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))
