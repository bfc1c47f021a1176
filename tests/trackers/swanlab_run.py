"""swanlab, offline."""

from pathlib import Path

import swanlab
import yaml
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.sdk.internal.core_python.store import DataStoreReader


def start(folder: Path):
    return swanlab.init(project="tests", id="one", mode="offline", logdir=str(folder))


def read(folder: Path):
    values = {}
    [path] = folder.glob("run-*/run-*.swanlab")
    reader = DataStoreReader()
    reader.open(path)
    for record in map(Record.FromString, reader):
        if record.WhichOneof("record_type") == "scalar":
            scalar = record.scalar
            values.setdefault(scalar.step, {})[scalar.key] = scalar.value.number
    config = yaml.safe_load((path.parent / "files/config.yaml").read_text())
    return values, config["accel_fn"]["value"]
