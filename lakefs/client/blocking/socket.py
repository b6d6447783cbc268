"""The socket of a blocking connection: resolves the address, connects, tunes."""

from __future__ import annotations

import socket
import struct
import time
from typing import Final

from lakefs.errors import EngineUnreachable, LakeError
from lakefs.limits import HELLO_TIMEOUT_S
from lakefs.transport.address import Address, TcpAddress
from lakefs.transport.sockets import connect_error, new_socket, tune

_CONNECT_RETRY_S: Final = 0.01
_TIMEVAL: Final = struct.Struct("@ll")  # struct timeval of socket(7)


def connected_socket(address: Address, timeout_s: float = HELLO_TIMEOUT_S) -> socket.socket:
    """Return a socket connected to an engine.  Blocks at most `timeout_s` for each address that a host name has.

    EngineUnreachable, PermissionDenied.
    """
    failure: LakeError = EngineUnreachable(f"no engine answers at {address}", subject=str(address))
    for target in _resolve(address):
        sock = new_socket(target)
        try:
            tune(sock)
            _connect(sock, target, timeout_s)
        except OSError as error:
            sock.close()
            failure = connect_error(address, error)
            continue
        except BaseException:
            sock.close()
            raise
        return sock
    raise failure


def limit_waits(sock: socket.socket, wait_s: float) -> None:
    """Let each receive and send of a blocking socket wait so long at most, and fail with EAGAIN then."""
    seconds, fraction = divmod(wait_s, 1)
    packed = _TIMEVAL.pack(int(seconds), int(fraction * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)


def _connect(sock: socket.socket, target: Address, timeout_s: float) -> None:
    """Connect within the time; a Unix listener whose backlog is full is tried again until then.  OSError."""
    sock.settimeout(timeout_s)
    until = time.monotonic() + timeout_s
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
