"""A context in which waiting for the accelerator is an error."""

import warnings
from contextlib import contextmanager

import torch


@contextmanager
def no_waiting():
    device = torch.get_device_module()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        device.set_sync_debug_mode("error")
    try:
        yield
    finally:
        device.set_sync_debug_mode("default")
