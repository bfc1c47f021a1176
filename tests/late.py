"""Simulates on a CPU that the host reads an accelerator's results one step late."""


class LateEcho:
    """Returns each value one step late, as on an accelerator."""

    def __init__(self):
        self.held = None

    def __call__(self, value):
        known, self.held = self.held, value.clone()
        return known

    def last(self):
        known, self.held = self.held, None
        return known
