"""The socket of a blocking connection: resolves the address, connects, tunes."""

from __future__ import annotations

import socket
import time
from typing import Final

from lakefs.errors import EngineUnreachable, LakeError
from lakefs.limits import HELLO_TIMEOUT_S
from lakefs.transport.address import Address, TcpAddress
from lakefs.transport.sockets import connect_error, new_socket, tune

_CONNECT_RETRY_S: Final = 0.01


def connected_socket(address: Address) -> socket.socket:
    """Return a socket connected to an engine.  Blocks at most HELLO_TIMEOUT_S for each address that a host name has.

    EngineUnreachable, PermissionDenied.
    """
    failure: LakeError = EngineUnreachable(f"no engine answers at {address}", subject=str(address))
    for target in _resolve(address):
        sock = new_socket(target)
        try:
            tune(sock)
            _connect(sock, target)
        except OSError as error:
            sock.close()
            failure = connect_error(address, error)
            continue
        except BaseException:
            sock.close()
            raise
        return sock
    raise failure


def _connect(sock: socket.socket, target: Address) -> None:
    """Connect within HELLO_TIMEOUT_S; a Unix listener whose backlog is full is tried again until then.  OSError."""
    sock.settimeout(HELLO_TIMEOUT_S)
    until = time.monotonic() + HELLO_TIMEOUT_S
    while True:
        try:
            sock.connect((target.host, target.port) if isinstance(target, TcpAddress) else target.path)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(_CONNECT_RETRY_S)


def _resolve(address: Address) -> list[Address]:
    if not isinstance(address, TcpAddress):
        return [address]
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise EngineUnreachable(f"host {address.host} is not known ({error.strerror})", subject=str(address)) from error
    return [TcpAddress(str(sockaddr[0]), int(sockaddr[1])) for *_, sockaddr in found]
