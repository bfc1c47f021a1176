"""What ranks pickle for each other, and the values of a store, are refused without the run's signature."""

import pickle
import subprocess
import sys
import textwrap
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

import accel_fn as af
from accel_fn.errors import WorldError
from accel_fn.testing import internals, simulate
from accel_fn.testing.internals import FolderStore, SignedStore
from tests.cli.commands import surroundings
from tests.cli.launchers import is_listening, until
from tests.support.processes import free_port

RULE = "ranks must send what they have signed with ACCEL_FN_TOKEN, got other bytes"


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("ACCEL_FN_TOKEN", "a secret of this run")


RAN = []


class Evil:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return run_code, ("code of a stranger",)


def run_code(text):
    RAN.append(text)


SENDING = {
    "collectives": lambda state: af.broadcast({"run": "blue"}, state),
    "channels": lambda state: internals.open_channel(state).exchange("value"),
}


@pytest.mark.parametrize("send", SENDING.values(), ids=SENDING)
def test_bytes_of_a_stranger_are_refused_before_they_are_unpickled(send):
    RAN.clear()
    evil = b"\0" * 32 + pickle.dumps(Evil())
    with internals.forged_messages(evil), pytest.raises(WorldError, match=RULE):
        simulate(send, world_size=2)
    assert RAN == []


def test_without_a_token_nothing_is_signed(monkeypatch):
    monkeypatch.delenv("ACCEL_FN_TOKEN")
    store = HashStore()
    assert internals.signed(b"data") == b"data"
    assert internals.verified(b"data", "f") == b"data"
    assert store.num_keys() == 0


@pytest.fixture
def stores():
    below = HashStore()
    below.set_timeout(timedelta(seconds=1))
    return SignedStore(below), below


def test_a_signed_store_is_a_store(stores):
    store, _ = stores
    store.set("a", "one")
    assert (store.get("a"), store.check(["a"]), store.check(["a", "b"])) == (b"one", True, False)
    assert store.compare_set("c", "", "first") == b"first"
    assert store.compare_set("c", "other", "second") == b"first"
    assert store.compare_set("c", "first", "") == b""
    assert store.compare_set("c", "", "third") == b"third"
    assert [store.add("n", 2), store.add("n", 0)] == [2, 2]
    below = PrefixStore("p", store)  # as torch's own code uses it
    below.set("k", "v")
    assert below.get("k") == store.get("p/k") == b"v"
    assert below.multi_get(["k"]) == [b"v"]
    assert below.clone().get("k") == b"v"


@pytest.mark.parametrize("forged", ["plain text", "00" * 40, ""])
def test_a_value_that_a_stranger_has_set_is_refused(stores, forged):
    store, below = stores
    store.set("a", "one")
    below.set("a", forged or "not hex")
    with pytest.raises(WorldError, match=f"init: {RULE}"):
        store.get("a")


def test_the_value_of_another_key_is_refused(stores):
    store, below = stores
    store.set("a", "one")
    below.set("b", below.get("a"))
    with pytest.raises(WorldError, match=RULE):
        store.get("b")


def test_a_store_in_a_file_has_the_time_outs_of_a_served_one(tmp_path):
    store = FolderStore(str(tmp_path / "store"), 0.1)
    with pytest.raises(torch.distributed.DistStoreError, match="Wait timeout for a key"):
        store.wait(["a key"])
    store.set("a key", "")
    store.wait(["a key"], timedelta(seconds=1))


WORLD = """
    import torch
    import accel_fn as af

    state = af.init(device="cpu", timeout_s=30)
    print(af.reduce_sum(state.rank + 1, state), af.broadcast({"run": "blue"}, state))
"""


def start(folder, rank, port, token):
    (folder / "script.py").write_text(textwrap.dedent(WORLD))
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCEL_FN_TOKEN": token}
    return subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=surroundings(folder, **place, **where),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [("one", "one"), ("one", "other")])
def test_two_processes_meet_in_a_signed_store_if_they_have_one_token(tmp_path, tokens):
    port = free_port()
    ranks = [start(tmp_path, rank, port, token) for rank, token in enumerate(tokens)]
    outputs = [rank.communicate(timeout=100) for rank in ranks]
    if tokens[0] == tokens[1]:
        assert [output for output, _ in outputs] == ["3 {'run': 'blue'}\n"] * 2, outputs
    else:
        assert RULE in outputs[0][1] + outputs[1][1]


@pytest.mark.slow
def test_a_stranger_who_writes_into_the_store_of_several_machines_is_noticed(tmp_path):
    port = free_port()
    rank_0 = start(tmp_path, 0, port, "one")
    until(lambda: is_listening("127.0.0.1", port) or None, lambda: "the store of rank 0")
    stranger = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    stranger.set("accel_fn/leader", "accel_fn/world/another")
    _, errors = rank_0.communicate(timeout=100)
    assert f"WorldError: init: {RULE}" in errors
