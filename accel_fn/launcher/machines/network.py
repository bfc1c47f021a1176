"""Addresses and interfaces of machines, and the sockets that listen there."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from ipaddress import ip_address

from accel_fn.errors import WorldError

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
    """Listen at an address of this machine, at a port, 0 being a free one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # On Debian, a machine's own name is an address of its loopback, which other machines cannot
        # reach; they resolve the name to its address in the network.
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
    """Return that port of this machine, or a free one for 0, which nobody listens at then."""
    with listen(host, port, alone=True) as listener:
        found: int = listener.getsockname()[1]
        return found


def is_listening(host: str, port: int, timeout_s: float) -> bool:
    """Does a process accept connections there?"""
    try:
        with socket.create_connection((host, port), timeout_s):
            return True
    except OSError:
        return False


def own_address(host: str) -> str:
    """The address of this machine from which it reaches `host`."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Sends nothing: with UDP, it only chooses the route.
        probe.connect(address)
        own: str = probe.getsockname()[0]
        return own


def interface_towards(host: str) -> str | None:
    """The network interface through which this machine reaches `host`; None if unknown."""
    try:
        own = own_address(host)
    except OSError:
        return None
    names = [name for _, name in socket.if_nameindex()]
    if own.startswith("127.") or own == "::1":
        return next((name for name in names if name.startswith("lo")), None)
    return next((name for name in names if _address(name) == own), None)


def _address(interface: str) -> str | None:
    """The IPv4 address of an interface of Linux."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])
