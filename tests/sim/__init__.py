"""Tests on a simulated accelerator, which device.py loads."""
