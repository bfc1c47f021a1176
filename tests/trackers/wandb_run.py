"""W&B, offline."""

import json
import struct
from pathlib import Path

import wandb
from wandb.proto.wandb_internal_pb2 import Record


def start(folder: Path):
    return wandb.init(project="tests", id="one", dir=folder, mode="offline")


def read(folder: Path):
    values, settings = {}, {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in _records(path):
            if items := {each.nested_key[0]: each.value_json for each in record.history.item}:
                values[record.history.step.num] = {
                    name: json.loads(text) for name, text in items.items() if name[0] != "_"
                }
            settings |= {each.key: json.loads(each.value_json) for each in record.config.update}
    return values, settings["accel_fn"]


def _records(path: Path):
    """Read the records of a file that has LevelDB's log format after 7 bytes of its own."""
    data, at, record = path.read_bytes(), 7, b""
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(record)
            record = b""
