"""Resolves settings in isolation: only the given variables, files and machine exist.

What tests of the launcher's settings import of it stands here, so that they survive its moves.
"""

import os
from pathlib import Path

import pytest

from accel_fn.errors import ArgumentError, SettingsError
from accel_fn.launcher.hardware import Machine
from accel_fn.launcher.settings import SETTINGS as SETTINGS
from accel_fn.launcher.settings import Settings as Settings
from accel_fn.launcher.settings import check_settings
from accel_fn.launcher.settings import resolve as resolve
from accel_fn.launcher.settings import user_file as user_file
from accel_fn.launcher.settings_files import read_yaml as read_yaml
from accel_fn.launcher.settings_files import render as render

PLAIN = Machine(num_cores=4)
TWO_GPUS = Machine(num_cores=4, kind="CUDA", num_installed=2, num_devices=2)


def resolved(flags=None, *, config=None, environment=None, folder=None, machine=PLAIN):
    """Resolve settings from the given variables, files and machine only."""
    folder = folder or Path(os.sep)
    return resolve(
        flags or {}, config=config, environment=environment or {}, folder=folder, machine=machine
    )


def made(values):
    """Make settings of values that fit their rules."""
    return check_settings(values, dict.fromkeys(values, "made"))


def refused(flags=None, **context):
    with pytest.raises(SettingsError) as caught:
        resolved(flags, **context)
    assert isinstance(caught.value, ArgumentError)
    return str(caught.value)


def written(folder, text, name="accel_fn.yaml"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
