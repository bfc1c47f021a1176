"""Runs of W&B, MLflow, trackio, aim and swanlab, each in an environment of its own: `nox -s trackers`.

A module for each library starts a run without a network, and reads from the disk what was stored.
"""
