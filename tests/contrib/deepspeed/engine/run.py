"""Run every case in one world, since a start takes seconds: `run.py FILE FOLDER`."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path

import accel_fn as af
from tests.contrib.deepspeed.engine import checkpoints, differences, functions, habits, laws, nvme


def main(file: Path, folder: Path) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # of DeepSpeed's collectives, one each
    state = af.init()
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    found = {}
    for module in (laws, functions, habits, checkpoints, nvme, differences):
        for name, case in module.cases(folder).items():
            try:
                found[name] = case(state)
            except Exception as error:  # the tests fail of it, one by one
                found[name] = repr(error)
    if state.is_main:
        file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
