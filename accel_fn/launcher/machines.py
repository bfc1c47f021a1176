"""The machines of a launch: their number, the rank of this one, and the rendezvous address."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from accel_fn.errors import WorldError
from accel_fn.launcher.settings import Resolved
from accel_fn.parallel.clusters import RANKS, Node, Variables, check_agree, read_node, read_task

_LOOPBACK, _PORT = "127.0.0.1", 29500


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of a launch, all with the same number of processes, seen from one of them."""

    num_machines: int
    machine_rank: int | None
    """The rank of this machine, from 0; None if the rendezvous assigns it."""
    num_local: int
    host: str
    port: int
    """The port of the rendezvous; 0 stands for a free port."""
    backend: str
    job: str | None
    """The name of this run on all machines, if a cluster has set one."""
    why: Mapping[str, str]
    """The sources of the values named `num_processes`, `num_machines`, `host` and `port`."""

    @property
    def num_processes(self) -> int:
        """Return the number of processes on all machines."""
        return self.num_machines * self.num_local


def place(resolved: Resolved, environment: Mapping[str, str]) -> Machines:
    """Find the machines of a launch from settings, else from the cluster's variables.

    Raise a WorldError if settings and cluster differ, if both lack a required value, or if a host
    does not resolve.
    """
    settings, node = resolved.settings, _read_node(environment)
    num_machines = settings.num_machines or (node.num_machines if node else 1)
    rank = settings.machine_rank
    if node is not None:
        _agree("num_machines", settings.num_machines, node.num_machines, node, resolved)
        _agree("machine_rank", rank, node.machine_rank, node, resolved)
        rank = node.machine_rank
    elif settings.num_machines is None:
        _check_pod(environment)
    backend = settings.rdzv_backend or "static"
    if num_machines == 1:
        rank = 0
    elif rank is None and backend == "static":
        raise WorldError(
            f"launch: machine_rank must be given with num_machines={num_machines}, got None; "
            "0 is the machine at main_process_ip"
        )
    host, source = _host(resolved, num_machines, node, environment)
    check_host(host, source)
    return Machines(
        num_machines=num_machines,
        machine_rank=rank,
        num_local=_num_local(resolved, num_machines, node),
        host=host,
        port=_port(resolved, num_machines, node, environment),
        backend=backend,
        job=node.job if node else None,
        why={
            "num_processes": resolved.sources["num_processes"],
            "num_machines": _source("num_machines", resolved, node),
            "host": source,
            "port": _source("main_process_port", resolved, node if num_machines > 1 else None),
        },
    )


def _read_node(environment: Mapping[str, str]) -> Node | None:
    """Read this launcher's machine from a cluster's variables; None outside of a cluster."""
    task = read_task(environment, function="launch")
    node = read_node(environment, function="launch")
    if task is None:
        return node
    if task.local_world_size != 1:
        raise WorldError(
            f"launch: {task.cluster} must start one launcher on each machine, got "
            f"{task.local_world_size} on this one; request one task per node, or have it "
            "start the script itself: af.init() needs no launcher there"
        )
    machine = Node(
        cluster=task.cluster,
        variables=(RANKS[task.cluster],),
        num_machines=task.num_machines,
        machine_rank=task.machine_rank,
        host=task.host,
        port=task.port,
        job=task.job,
    )
    if node is not None:
        check_agree("launch", machine, node)
    return machine


def _check_pod(environment: Mapping[str, str]) -> None:
    """Refuse a pod whose variables hold its index and the first pod's address, but no number of pods."""
    address = next(filter(environment.get, ("MASTER_ADDR", "PET_MASTER_ADDR")), None)
    if address and environment.get("JOB_COMPLETION_INDEX"):
        raise WorldError(
            f"launch: PET_NNODES must be set with JOB_COMPLETION_INDEX and {address}, got none; "
            "it is the number of pods, which Kubernetes does not set"
        )


def _agree(name: str, given: int | None, found: int, node: Node, resolved: Resolved) -> None:
    if given is not None and given != found:
        raise WorldError(
            f"launch: {name} must be {found}, as {node.cluster} has set it, got {given} "
            f"({resolved.sources[name]}); leave it out, or unset {' and '.join(node.variables)}"
        )


def _num_local(resolved: Resolved, num_machines: int, node: Node | None) -> int:
    settings = resolved.settings
    count = settings.num_processes or 1
    # By default, `count` is the number of devices here times the settings' number of machines.
    # Divide by the same number: the cluster's number of machines may differ.
    if not resolved.is_given("num_processes"):
        return (node and node.num_local) or count // (settings.num_machines or 1)
    if count % num_machines:
        raise WorldError(
            f"launch: num_processes must be a multiple of the {num_machines} machines, got {count}; "
            "it counts the processes of all machines"
        )
    return count // num_machines


def _host(
    resolved: Resolved, num_machines: int, node: Node | None, environment: Mapping[str, str]
) -> tuple[str, str]:
    """Return the address of machine 0, and its source."""
    if resolved.settings.main_process_ip:
        return resolved.settings.main_process_ip, resolved.sources["main_process_ip"]
    if num_machines == 1:
        return _LOOPBACK, "one machine"
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"], "MASTER_ADDR"
    if node is not None and node.host:
        return node.host, node.cluster
    raise WorldError(
        f"launch: main_process_ip must be given if no variable holds it, with {num_machines} machines, "
        "got None; it is the address of machine 0"
    )


def _port(
    resolved: Resolved, num_machines: int, node: Node | None, environment: Mapping[str, str]
) -> int:
    """Return the port of the rendezvous. On one machine, 0 stands for a free port."""
    port = resolved.settings.main_process_port
    if port or num_machines == 1:
        return port or 0
    given = Variables("launch", "the cluster", environment).port("MASTER_PORT")
    return given or (node and node.port) or _PORT


def _source(name: str, resolved: Resolved, node: Node | None) -> str:
    return node.cluster if node and not resolved.is_given(name) else resolved.sources[name]


# ---- addresses and sockets

_SIOCGIFADDR = 0x8915


def check_host(host: str, source: str) -> None:
    """Refuse a host that does not resolve."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise WorldError(
            f"launch: main_process_ip must be a host that resolves, got {host!r} "
            f"({source}; {error.strerror})"
        ) from None


def listen(host: str, port: int, *, alone: bool) -> socket.socket:
    """Listen at an address and a port of this machine; port 0 stands for a free one.

    `alone` is whether the launch has only this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # On Debian, a machine resolves its own name to a loopback address, but other machines
        # resolve it to the network address. To be reachable for them, listen on all interfaces.
        if not alone and address[0] != host and ip_address(address[0]).is_loopback:
            family, address = socket.AF_INET, ("", port)
        return socket.create_server(address, family=family)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise WorldError(
                f"launch: main_process_ip must be an address of this machine, got {host!r}"
                + ("; leave it out on one machine" if alone else ", which is machine 0")
            ) from None
        repair = "choose another, or leave it out for a free one" if alone else "choose another"
        raise WorldError(
            f"launch: main_process_port must be one that this machine can open, got {port} "
            f"({os.strerror(error.errno or 0)}); {repair}"
        ) from None


def free_port(host: str, port: int) -> int:
    """Check that the machine can open this port, and return it; for 0, return a free port."""
    with listen(host, port, alone=True) as listener:
        found: int = listener.getsockname()[1]
        return found


def is_listening(host: str, port: int, timeout_s: float) -> bool:
    """Return whether a process accepts connections at this address."""
    try:
        with socket.create_connection((host, port), timeout_s):
            return True
    except OSError:
        return False


def own_address(host: str) -> str:
    """Return the address of this machine from which it reaches `host`."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # With UDP, `connect` sends nothing, but chooses the route and so this machine's address.
        probe.connect(address)
        own: str = probe.getsockname()[0]
        return own


def interface_towards(host: str) -> str | None:
    """Return the network interface through which this machine reaches `host`; None if unknown."""
    try:
        own = own_address(host)
    except OSError:
        return None
    names = [name for _, name in socket.if_nameindex()]
    if own.startswith("127.") or own == "::1":
        return next((name for name in names if name.startswith("lo")), None)
    return next((name for name in names if _address(name) == own), None)


def _address(interface: str) -> str | None:
    """Return the IPv4 address of a network interface, by a system call of Linux."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])
