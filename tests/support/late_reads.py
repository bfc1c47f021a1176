"""Simulates on a CPU that the host reads an accelerator's results one step late."""

from accel_fn.core.delayed_read import DelayedFloats, DelayedRead


class LateRead:
    """Returns each value one step late, as on an accelerator."""

    def __init__(self):
        self.held = None

    def __call__(self, value):
        known, self.held = self.held, value.clone()
        return known

    def last(self, timeout_s=None):
        known, self.held = self.held, None
        return known


class LateFloats(LateRead):
    """Returns values by name one step late, as on an accelerator."""

    def __call__(self, values, device):
        known, self.held = self.held, {name: float(each) for name, each in values.items()}
        return known


def read_late(*slot_functions):
    """Let slot functions read whether an update was made as from an accelerator."""
    for each in slot_functions:
        for name, value in [*getattr(each, "__dict__", {}).items()]:
            if isinstance(value, DelayedRead):
                setattr(each, name, LateRead())
            elif isinstance(value, DelayedFloats):
                setattr(each, name, LateFloats())
            elif type(value).__module__.startswith("accel_fn."):  # such as a count of updates
                read_late(value)
