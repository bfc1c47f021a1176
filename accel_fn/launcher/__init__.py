"""Launch the processes of a run from settings."""

from accel_fn.names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "parallel.launch_options": (
            "LaunchOptions",
            "launch_options",
        ),
        "launcher.settings": (
            "Given",
            "Layer",
            "check_names",
        ),
    },
)
