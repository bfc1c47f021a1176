"""aim, with its store in a folder."""

from pathlib import Path

import aim


def start(folder: Path):
    return aim.Run(repo=str(folder), system_tracking_interval=None)


def read(folder: Path):
    [key] = aim.Repo(str(folder)).list_all_runs()
    run = aim.Run(key, repo=str(folder), system_tracking_interval=None)
    values = {}
    for metric in run.metrics():
        steps, (each_value, *_) = metric.data.items_list()
        for step, value in zip(steps, each_value, strict=True):
            values.setdefault(step, {})[metric.name] = value
    return values, run["accel_fn"]
