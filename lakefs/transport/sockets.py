"""Socket helpers for the trio network and the blocking client: options, descriptors, gathered sends; checks of Unix
sockets by path: does a server listen, and why can a user not connect.

Imports no trio, so that commands start quickly.  Nothing here waits unless the given socket blocks.  Received
descriptors are close-on-exec and belong to the caller; if the kernel could not hand over all of them, all are closed.
The checks change nothing.
"""

from __future__ import annotations

import array
import errno
import grp
import os
import pwd
import socket
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lakefs.errors import EngineUnreachable, LakeError, PermissionDenied
from lakefs.host.descriptors import close_later
from lakefs.ids import Buffer
from lakefs.limits import DESCRIPTORS_PER_FRAME_MAX, SOCKET_BUFFER_BYTES
from lakefs.transport.address import Address, TcpAddress, UnixAddress

START_HINT: Final = "; start one with: lake serve"
"""Ends the message to a user; a lake starts its members itself."""
_PARTS_MAX: Final = 1024
"""Most buffers that one sendmsg takes (IOV_MAX)."""
_SO_PEERGROUPS: Final = 59  # linux/socket.h; not in the socket module
_GROUPS_MAX: Final = 65536
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
    return EngineUnreachable(f"no engine answers at {address} ({reason}){START_HINT}", subject=str(address))


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


REFUSED: Final = frozenset((errno.EACCES, errno.EPERM))
"""Errors of connect(2) that mean that this user may not connect."""
_TABLE: Final = Path("/proc/net/unix")
_LISTENS: Final = 0x10000  # linux/net.h: __SO_ACCEPTCON


def connect_code(path: str) -> int:
    """Return the result of connect(2) at a path: 0 when something listens there, else an errno."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(path)
    return 0 if code == errno.EAGAIN else code  # EAGAIN: its backlog is full


def listens(path: str) -> bool:
    """Return True if something listens at a path, also if this user may not connect."""
    code = connect_code(path)
    return _is_in_table(path) if code in REFUSED else code == 0


def why_not(path: str, code: int) -> str:
    """Return the meaning of an errno of connect(2) at a path: `is not there`, `has nothing that listens`, etc."""
    if code == errno.ENOENT:
        return "is not there"
    if code == errno.ECONNREFUSED:
        return "has nothing that listens"
    if code in REFUSED:
        return f"may not be used by this user: {who_may(path)}"
    return f"cannot be used: {os.strerror(code)}"


def who_may(path: str) -> str:
    """Return the remedy for a refused user, such as the group to join, from the first folder or socket that refuses."""
    closed = _closed(path)
    if closed is None:
        return "run as the engine's user or in its group"
    found, by_group = closed
    return remedy_of(found.st_gid if found.st_mode & by_group else None, _owners(found.st_uid))


def remedy_of(group: int | None, owners: str = "its user and root") -> str:
    """Return the remedy for a refused user: join the group, if one is let in, else restart the engine with a group."""
    if group is not None:
        return f"join the group {_group_name(group)}"
    return f"only {owners} may; start the engine with a socket_group, and join that group"


def _closed(path: str) -> tuple[os.stat_result, int] | None:
    """Return the stat of the first folder or socket that refuses, and the mode bit that would let its group pass.

    None when none refuses, or one cannot be looked at.
    """
    wanted = [(str(folder), os.X_OK, stat.S_IXGRP) for folder in reversed(Path(path).parents)]
    for place, access, by_group in (*wanted, (path, os.W_OK, stat.S_IWGRP)):
        try:
            found = os.stat(place)
        except OSError:
            return None
        if not os.access(place, access, effective_ids=True):
            return found, by_group
    return None


def _is_in_table(path: str) -> bool:
    """Return True if the kernel's table of sockets has a listener with that path, or cannot be read."""
    try:
        lines = _TABLE.read_bytes().splitlines()
    except OSError:
        return True
    wanted = os.fsencode(path)
    for line in lines[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[7] == wanted and int(fields[3], 16) & _LISTENS:
            return True
    return False


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _owners(uid: int) -> str:
    """Return the users who may use a file that only its owner may use."""
    if not uid:
        return "root"
    try:
        return f"{pwd.getpwuid(uid).pw_name} and root"
    except KeyError:
        return f"user {uid} and root"


def address_of(sock: socket.socket) -> Address:
    """Return the address to which a socket is bound."""
    name = sock.getsockname()
    return UnixAddress(name) if sock.family == socket.AF_UNIX else TcpAddress(*name[:2])


def peer_groups(sock: socket.socket) -> list[int]:
    """Return supplementary groups of a Unix socket's peer, as they were when it connected; empty when unknown."""
    width = struct.calcsize("I")
    try:
        packed = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_MAX * width)
    except OSError:  # a kernel before 4.13
        return []
    return list(struct.unpack(f"{len(packed) // width}I", packed))
