"""trackio, with its store in SQLite."""

import os
from pathlib import Path


def start(folder: Path):
    os.environ["TRACKIO_DIR"] = str(folder)
    import trackio

    return trackio.init(project="tests", name="one")


def read(folder: Path):
    os.environ["TRACKIO_DIR"] = str(folder)
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    values = {}
    for line in SQLiteStorage.get_logs("tests", "one"):
        del line["timestamp"]
        values[line.pop("step")] = line
    [run] = trackio.Api().runs("tests")
    return values, run.config["accel_fn"]
