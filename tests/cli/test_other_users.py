"""Other users of a machine can neither read nor write the store of a launch, and its folder goes with it."""

import json
import os
import subprocess
import sys

import pytest

from tests.cli.commands import surroundings
from tests.cli.launchers import until

SCRIPT = """
    import json, os, time
    from pathlib import Path
    import accel_fn as af

    state = af.init(device="cpu", timeout_s=60)
    names = ("MASTER_PORT", "ACCEL_FN_STORE")
    found = {name: os.environ.get(name) for name in names} | {"pid": os.getpid()}
    if state.is_main:
        Path("half.json").write_text(json.dumps(found))
        os.rename("half.json", "found.json")
    while not Path("go on").exists():
        time.sleep(0.01)
    print(af.reduce_sum(1, state))
"""
STRANGER = """
import json, os, sys
from datetime import timedelta
import torch
from torch._C._distributed_c10d import FileStore, TCPStore

os.setgroups([])
os.setgid(65534)
os.setuid(65534)
found = json.loads(sys.argv[1])
reached = []

def attempt(name, act):
    try:
        act()
    except Exception:
        return
    reached.append(name)

def overwrite():
    store = TCPStore("127.0.0.1", int(found["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=3))
    store.set("accel_fn/note/0", "forged")

attempt("server", overwrite)
if found["ACCEL_FN_STORE"]:
    attempt("file", lambda: FileStore(found["ACCEL_FN_STORE"]).set("a", "b"))
    attempt("folder", lambda: os.listdir(os.path.dirname(found["ACCEL_FN_STORE"])))
attempt("environment", lambda: open(f"/proc/{found['pid']}/environ").read())
print(json.dumps(reached))
"""


def found_by_a_stranger(folder, found):
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, json.dumps(found)],
        env=surroundings(folder), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="root alone may become another user")
def test_another_user_reaches_nothing_of_a_launch(launchers, tmp_path):
    launch = launchers.start(tmp_path, "-n", 2, "--cpu", "script.py", script=SCRIPT)
    until(lambda: (tmp_path / "found.json").exists() or None, lambda: "a world")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found_by_a_stranger(tmp_path, found) == []
    (tmp_path / "go on").touch()
    ended = launch.wait()
    assert (ended.exit_code, ended.stdout) == (0, "2\n2\n")
