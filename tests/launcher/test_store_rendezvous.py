"""Launchers wait for one another, over sockets of this machine and with shortened waits."""

import socket

import pytest

from accel_fn.errors import WorldTimeoutError
from accel_fn.launcher import store_rendezvous
from accel_fn.launcher.machines import Machines, listen
from tests.support.processes import free_port


@pytest.mark.parametrize("rank", [0, 1])
def test_a_machine_logs_which_other_it_waits_for_and_gives_up_in_the_end(rank, monkeypatch, capfd):
    assert (store_rendezvous._LOG_AFTER_S, store_rendezvous._MEET_WITHIN_S) == (
        10,
        600,
    )  # the words of docs/machines.md
    monkeypatch.setattr(store_rendezvous, "_LOG_AFTER_S", 0.1)
    monkeypatch.setattr(store_rendezvous, "_MEET_WITHIN_S", 0.6)
    port = free_port()
    machines = Machines(2, rank, 1, "127.0.0.1", port, "static", None, {})
    whom = "machine 1" if rank == 0 else f"machine 0 at 127.0.0.1:{port}"
    rule = f"launch: all 2 machines must come within 0.6 s, machine {rank} did not see {whom}; "
    with pytest.raises(WorldTimeoutError, match=rule):
        store_rendezvous.StoreRendezvous(machines, rank, "run").next_rendezvous()
    assert capfd.readouterr().err == f"machine {rank} waits for {whom}\n"


@pytest.mark.parametrize(
    ("host", "alone", "address"),
    [
        ("127.0.0.2", False, "127.0.0.2"),
        ("127.0.0.1", True, "127.0.0.1"),
        ("localhost", True, "127.0.0.1"),
        ("localhost", False, "0.0.0.0"),  # on other machines the name may lead to another address
    ],
)
def test_a_launcher_listens_at_the_address_that_was_given(host, alone, address, monkeypatch):
    getaddrinfo = socket.getaddrinfo  # if a name has both kinds of address, the IPv4 one
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *given, **named: sorted(getaddrinfo(*given, **named))
    )
    with listen(host, 0, alone=alone) as listener:
        assert listener.getsockname()[0] == address
