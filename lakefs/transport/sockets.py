"""Socket helpers for the trio network and the blocking client: options, descriptors, gathered sends.

Imports no trio.  Nothing here waits unless the given socket blocks.  Received descriptors are close-on-exec and
belong to the caller; if the kernel could not hand over all of them, all are closed.
"""

from __future__ import annotations

import array
import socket
from collections.abc import Sequence
from typing import Final

from lakefs.errors import EngineUnreachable, LakeError, PermissionDenied
from lakefs.host.descriptors import close_later
from lakefs.ids import Buffer
from lakefs.limits import DESCRIPTORS_PER_FRAME_MAX, SOCKET_BUFFER_BYTES
from lakefs.transport.address import Address, UnixAddress
from lakefs.transport.unix_sockets import REFUSED, who_may

_PARTS_MAX: Final = 1024
"""Most buffers that one sendmsg takes (IOV_MAX)."""
_SO_SNDBUFFORCE: Final = 32  # linux/socket.h; not in the socket module
_SO_RCVBUFFORCE: Final = 33
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(DESCRIPTORS_PER_FRAME_MAX * array.array("i").itemsize)
_RECEIVE_FLAGS: Final = int(socket.MSG_CMSG_CLOEXEC)  # plain ints: operators of enum flags cost a microsecond
_SEND_FLAGS: Final = int(socket.MSG_NOSIGNAL)
_TRUNCATED: Final = int(socket.MSG_CTRUNC)
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""TCP keep-alive options: a peer that vanished without closing is noticed within a minute."""


def new_socket(address: Address) -> socket.socket:
    """Return a blocking stream socket for an address; IPv6 if its host is an IPv6 address."""
    if isinstance(address, UnixAddress):
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    return socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)


def tune(sock: socket.socket) -> None:
    """Set the options of a connection: large buffers on Unix sockets; no delay and keep-alive on TCP."""
    if sock.family == socket.AF_UNIX:
        _set_buffer(sock, _SO_SNDBUFFORCE, socket.SO_SNDBUF)
        _set_buffer(sock, _SO_RCVBUFFORCE, socket.SO_RCVBUF)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, seconds)


def connect_error(address: Address, error: OSError) -> LakeError:
    """Return the error to raise for a failed connect."""
    if error.errno in REFUSED:
        remedy = who_may(address.path) if isinstance(address, UnixAddress) else "the system refuses it"
        return PermissionDenied(f"{address} may not be used by this user: {remedy}", subject=str(address))
    reason = error.strerror or str(error)
    return EngineUnreachable(
        f"no engine answers at {address} ({reason}); start one with: lake serve", subject=str(address)
    )


def lost_error(peer: str, error: OSError | None = None) -> EngineUnreachable:
    """Return the error to raise for a broken connection."""
    reason = f" ({error.strerror or error})" if error is not None else ""
    return EngineUnreachable(f"the connection to {peer} was lost{reason}", subject=peer)


def receive_with_descriptors(sock: socket.socket, buffer: memoryview, descriptors: list[int], flags: int = 0) -> int:
    """Receive into `buffer` from a Unix socket; received descriptors are appended.  OSError as recvmsg."""
    count, ancillary, message_flags, _ = sock.recvmsg_into([buffer], _ANCILLARY_BYTES, _RECEIVE_FLAGS | flags)
    if ancillary or message_flags & _TRUNCATED:
        received = _descriptors_of(ancillary)
        if message_flags & _TRUNCATED:
            close_later(received)
        else:
            descriptors.extend(received)
    return count


def send_some(sock: socket.socket, parts: Sequence[Buffer], descriptors: Sequence[int] = (), flags: int = 0) -> int:
    """Send as much of the parts as the socket takes; return the count in bytes.  OSError as sendmsg.

    Descriptors are sent with the first byte: they were sent if the count is not 0.
    """
    if descriptors:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        return sock.sendmsg(parts[:_PARTS_MAX], ancillary, _SEND_FLAGS | flags)
    if len(parts) == 1:
        return sock.send(parts[0], _SEND_FLAGS | flags)
    return sock.sendmsg(parts[:_PARTS_MAX], (), _SEND_FLAGS | flags)


def _set_buffer(sock: socket.socket, forced: int, plain: int) -> None:
    try:
        sock.setsockopt(socket.SOL_SOCKET, forced, SOCKET_BUFFER_BYTES)
    except OSError:  # not privileged: the system's limit applies
        sock.setsockopt(socket.SOL_SOCKET, plain, SOCKET_BUFFER_BYTES)


def _descriptors_of(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    received = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
    return received.tolist()
