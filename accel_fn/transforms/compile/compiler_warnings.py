"""Print each warning of torch's compiler once, on rank 0."""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

_LOGGERS = ("torch", "torch._dynamo", "torch._inductor")


class _OnceFromRank0(logging.Filter):
    """A log filter that lets each warning of the compiler through once, on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str, int, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether logging prints this record."""
        if record.levelno != logging.WARNING or not record.name.startswith(_LOGGERS[1:]):
            return True
        if dist.is_initialized() and dist.get_rank():
            # All ranks compile the same program, so the warnings of rank 0 suffice.
            return False
        key = record.pathname, record.lineno, record.getMessage()
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new


def warn_once_from_rank_0() -> None:
    """Filter the log of torch's compiler in this process, unless the user has set TORCH_LOGS."""
    if os.environ.get("TORCH_LOGS"):
        return
    for name in _LOGGERS:
        for handler in logging.getLogger(name).handlers:
            if not any(isinstance(each, _OnceFromRank0) for each in handler.filters):
                handler.addFilter(_OnceFromRank0())
