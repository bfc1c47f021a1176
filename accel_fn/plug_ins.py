"""Import plug-ins on first use; for a missing one, raise an error that names its extra."""

import importlib
from types import ModuleType

from accel_fn.errors import ExtraError


def plug_in(module: str, name: str) -> ModuleType:
    """Import a module of `accel_fn.contrib`, such as `runs.report`, which defines `name`.

    If the plug-in or a library that it imports is not installed, the error names the extra to
    install.
    """
    try:
        return importlib.import_module(f"accel_fn.contrib.{module}")
    except ModuleNotFoundError as error:
        extra = module.partition(".")[0]
        raise ExtraError(
            f'{name}: {error.name} must be installed; pip install "accel_fn[{extra}]"',
            name=error.name,
        ) from error
