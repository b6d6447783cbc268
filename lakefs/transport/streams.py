"""The real network: Unix and TCP streams on trio, with descriptors on Unix sockets.

Rules kept here:
- The system call is tried first; a wait follows only if it would block, because a wait costs more than the call.  After
  several tries in a row that found nothing, as with a peer that sends a request and waits for the answer, more and more
  receives wait first.  Nothing here is a checkpoint unless it waits, except that every 32nd receive in a row is one.
- A Unix listener lets in the engine's own user, root, and members of the configured group, by the credentials that the
  kernel reports; other peers get a failure frame and are closed.
- A socket file is replaced only if no server answers on it, and removed only if it is still this listener's.
"""

from __future__ import annotations

import enum
import errno
import os
import select
import socket
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import structlog
import trio

from lakefs.errors import AddressInUse, EngineUnreachable, InvalidArgument, LakeError, PermissionDenied
from lakefs.host.descriptors import after, close_all
from lakefs.ids import Buffer
from lakefs.limits import HELLO_TIMEOUT_S, LISTEN_BACKLOG
from lakefs.ports import Stream
from lakefs.transport.address import Address, TcpAddress, UnixAddress, parse_address
from lakefs.transport.sockets import (
    address_of,
    connect_error,
    lost_error,
    new_socket,
    peer_groups,
    receive_with_descriptors,
    remedy_of,
    send_some,
    tune,
)
from lakefs.wire.connection import farewell

_log: Final = structlog.get_logger(__name__)

_RECEIVES_IN_A_ROW: Final = 32
_WAITS_FIRST_MAX: Final = 16
_ACCEPT_RETRY_S: Final = 0.1
"""Pause when the process is out of descriptors or memory; connections wait in the backlog."""
_CONNECT_RETRY_S: Final = 0.01
_EXHAUSTED: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_PEER_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid


class PortUse(enum.Enum):
    """Sharing of a TCP address with other listeners."""

    ALONE = "no other listener"
    FIRST = "no other listener yet; later listeners of the same user may join"
    JOIN = "listeners of the same user may exist; the kernel spreads connections over all (SO_REUSEPORT)"


class SocketStream:
    """A `Stream` on a connected, non-blocking socket."""

    def __init__(self, sock: socket.socket, peer: str, uid: int | None = None) -> None:
        self._sock = sock
        self.peer = peer
        """Credentials of a client, address of a server."""
        self.uid = uid
        self.carries_descriptors = sock.family == socket.AF_UNIX
        self._descriptors: list[int] = []
        self._receives = 0
        self._vain = self._wait_first = 0
        """Count of tries in a row that found nothing; count of next receives that wait without a try."""

    async def receive_into(self, buffer: memoryview) -> int:
        """Receive; return the count, 0 at the end.  EngineUnreachable if the connection broke or was closed here."""
        self._receives += 1
        if self._receives >= _RECEIVES_IN_A_ROW:
            self._receives = 0
            await trio.lowlevel.checkpoint()
        if self._wait_first:
            self._wait_first -= 1
        elif (count := self._receive(buffer)) is not None:
            self._vain = 0
            return count
        else:
            self._vain = self._wait_first = min(self._vain + 1, _WAITS_FIRST_MAX)
        self._receives = 0
        while True:
            try:
                await trio.lowlevel.wait_readable(self._sock.fileno())
            except (trio.ClosedResourceError, ValueError) as error:  # closed during the wait, or before
                raise lost_error(self.peer) from error
            count = self._receive(buffer)
            if count is not None:
                return count

    def _receive(self, buffer: memoryview) -> int | None:
        """Receive; return the count, or None when no bytes have arrived."""
        try:
            if self.carries_descriptors:
                return receive_with_descriptors(self._sock, buffer, self._descriptors)
            return self._sock.recv_into(buffer)
        except BlockingIOError:
            return None
        except OSError as error:
            raise lost_error(self.peer, error) from error

    def take_descriptors(self) -> list[int]:
        """Hand over the descriptors received so far; the caller closes them."""
        taken = self._descriptors
        if taken:
            self._descriptors = []
        return taken

    def send_nowait(self, parts: Sequence[Buffer], descriptors: Sequence[int] = ()) -> int:
        """Send without waiting; return the count of bytes that the socket took.  EngineUnreachable."""
        try:
            return send_some(self._sock, parts, descriptors)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise lost_error(self.peer, error) from error

    async def wait_writable(self) -> None:
        """Wait until the socket takes bytes again.  EngineUnreachable once it is closed here."""
        try:
            await trio.lowlevel.wait_writable(self._sock.fileno())
        except (trio.ClosedResourceError, ValueError) as error:  # closed during the wait, or before
            raise lost_error(self.peer) from error

    async def send(self, parts: Sequence[Buffer], descriptors: Sequence[int] = ()) -> None:
        """Send everything.  EngineUnreachable."""
        left = [part for part in parts if len(part)]
        while left:
            count = self.send_nowait(left, descriptors)
            if count:
                left, descriptors = after(left, count), ()
            else:
                await self.wait_writable()

    @property
    def descriptor(self) -> int:
        """The socket's descriptor, -1 once it is closed; it stays this stream's."""
        return self._sock.fileno()

    def detach(self) -> int:
        """Give the descriptor, on which no task waits, up to the caller, and close the stream; -1 if it was closed."""
        return self._sock.detach()

    def is_at_end(self) -> bool:
        """Return True if a receive would find the end: the peer has closed, or is gone."""
        try:
            return not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def has_peer_left(self) -> bool:
        """Return True if the peer has closed or ended its half, whatever waits to be received."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLRDHUP)
            return bool(poll.poll(0))
        except (OSError, ValueError):  # closed here
            return True

    def send_end(self) -> None:
        """Close the socket's sending half."""
        with suppress(OSError):  # the peer has closed already
            self._sock.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        """Close the socket, and received descriptors that were not taken."""
        _close(self._sock)
        close_all(self.take_descriptors())


def stream_of(descriptor: int, peer: str) -> SocketStream:
    """Return a stream on a connection whose descriptor a stream has given up; the stream closes it."""
    sock = socket.socket(fileno=descriptor)
    sock.setblocking(False)
    return SocketStream(sock, peer)


class SocketListener:
    """A `Listener` on a bound, listening, non-blocking socket."""

    def __init__(self, sock: socket.socket, address: Address, group: int | None, *, is_lent: bool = False) -> None:
        self._sock = sock  # `is_lent`: another process has bound it, and removes its file
        self._address = address
        self.address = str(address)  # with the real port
        self._group = group
        self._inode = None if is_lent else _inode_of(address)

    @property
    def descriptor(self) -> int:
        """The socket's descriptor, which stays this listener's; a process that inherits it may accept too."""
        return self._sock.fileno()

    async def accept(self) -> Stream:
        """Wait for the next client that is let in; always a checkpoint.  EngineUnreachable once closed."""
        await trio.lowlevel.checkpoint()
        while True:
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                await self._wait()
                continue
            except OSError as error:
                await self._survive(error)
                continue
            stream = self._admit(sock)
            if stream is not None:
                return stream

    async def aclose(self) -> None:
        """Stop listening; remove the socket's file unless another listener has replaced it."""
        _close(self._sock)
        if self._inode is not None and _inode_of(self._address) == self._inode:
            assert isinstance(self._address, UnixAddress), "only Unix sockets have a file"
            os.unlink(self._address.path)
        self._inode = None

    async def _wait(self) -> None:
        try:
            await trio.lowlevel.wait_readable(self._sock.fileno())
        except trio.ClosedResourceError as error:
            raise lost_error(self.address) from error

    async def _survive(self, error: OSError) -> None:
        """Wait after an error that will pass; raise EngineUnreachable for one that will not."""
        if error.errno in _EXHAUSTED:
            _log.warning("accept_postponed", address=self.address, reason=error.strerror)
            await trio.sleep(_ACCEPT_RETRY_S)
        elif self._sock.fileno() < 0 or error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
            raise lost_error(self.address, error) from error
        else:  # an error of the one connection that was to be accepted (accept(2))
            await trio.lowlevel.checkpoint()

    def _admit(self, sock: socket.socket) -> SocketStream | None:
        try:
            sock.setblocking(False)
            peer, uid = self._peer_of(sock)
            tune(sock)
        except PermissionDenied as error:
            _refuse(sock, error)
            return None
        except OSError:  # the client closed before it was let in
            sock.close()
            return None
        return SocketStream(sock, peer, uid)

    def _peer_of(self, sock: socket.socket) -> tuple[str, int | None]:
        if isinstance(self._address, TcpAddress):
            host, port = sock.getpeername()[:2]
            return str(TcpAddress(host, port)).removeprefix("tcp://"), None
        pid, uid, gid = _PEER_CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        )
        if uid not in (0, os.geteuid()) and not self._in_group(sock, gid):
            raise PermissionDenied(f"user {uid} may not use the engine at {self.address}: {remedy_of(self._group)}")
        return f"uid {uid} pid {pid}", uid

    def _in_group(self, sock: socket.socket, gid: int) -> bool:
        if self._group is None:
            return False
        return gid == self._group or self._group in peer_groups(sock)


class TrioNetwork:
    """The `Network` of the operating system.

    `group`: its members may use Unix sockets made here (mode 0660); without it only the owner and root may (0600).
    """

    def __init__(self, *, group: int | None = None, port_use: PortUse = PortUse.ALONE) -> None:
        self._group = group
        self._port_use = port_use

    async def listen(self, address: str) -> SocketListener:
        """Bind an address.  AddressInUse, PermissionDenied, InvalidArgument."""
        parsed = parse_address(address)
        if isinstance(parsed, UnixAddress):
            sock = _bind_unix(parsed, self._group)
        else:
            parsed, sock = await bind_tcp(parsed, self._port_use)
        try:
            sock.listen(LISTEN_BACKLOG)
        except OSError as error:
            sock.close()
            raise _bind_error(parsed, error) from error
        return SocketListener(sock, parsed, self._group)

    def inherited(self, descriptor: int) -> SocketListener:
        """Return a listener on a socket that another process has bound, and goes on to hold."""
        sock = socket.socket(fileno=descriptor)
        sock.setblocking(False)
        return SocketListener(sock, address_of(sock), self._group, is_lent=True)

    async def connect(self, address: str) -> Stream:
        """Connect within 5 s.  EngineUnreachable, PermissionDenied, InvalidArgument."""
        parsed = parse_address(address)
        failure: LakeError = EngineUnreachable(f"no engine answers at {parsed} within {HELLO_TIMEOUT_S:.0f} s")
        with trio.move_on_after(HELLO_TIMEOUT_S):
            for target, sockaddr in await _resolve(parsed):
                try:
                    return SocketStream(await _connected(target, sockaddr), str(parsed))
                except OSError as error:
                    failure = connect_error(parsed, error)
        raise failure


def _bind_unix(address: UnixAddress, group: int | None) -> socket.socket:
    _clear_stale(address)
    sock = new_socket(address)
    try:
        # On Linux the file gets the mode of the unbound socket: it is never open wider, not even for an instant.
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(address.path)
        if group is not None:
            os.chown(address.path, -1, group)
            os.chmod(address.path, 0o660)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise _bind_error(address, error) from error
    return sock


def _clear_stale(address: UnixAddress) -> None:
    """Remove the socket file of a dead engine.  AddressInUse when a server answers, or the file is no socket."""
    try:
        mode = os.lstat(address.path).st_mode
    except OSError:  # no such file, or bind raises the reason
        return
    if not stat.S_ISSOCK(mode):
        raise AddressInUse(f"{address.path} exists and is no socket; choose another path", subject=address.path)
    with new_socket(address) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address.path)
        except ConnectionRefusedError:
            os.unlink(address.path)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EPERM):
                raise _bind_error(address, error) from error
    raise AddressInUse(f"an engine already serves at {address}; stop it or choose another path", subject=address.path)


async def bind_tcp(address: TcpAddress, port_use: PortUse) -> tuple[TcpAddress, socket.socket]:
    """Return a bound socket that does not listen yet, and its address with the real port.

    AddressInUse, PermissionDenied, InvalidArgument, EngineUnreachable for an unknown host.
    """
    target, sockaddr = (await _resolve(address))[0]
    if port_use is PortUse.FIRST and address.port:
        # With SO_REUSEPORT alone, bind would not report other listeners.
        _bound_tcp(address, target, sockaddr, shared=False).close()
    sock = _bound_tcp(address, target, sockaddr, shared=port_use is not PortUse.ALONE)
    return TcpAddress(address.host, sock.getsockname()[1]), sock


def _bound_tcp(address: TcpAddress, target: Address, sockaddr: str | tuple[str, int], *, shared: bool) -> socket.socket:
    sock = new_socket(target)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(sockaddr)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise _bind_error(address, error) from error
    return sock


def _bind_error(address: Address, error: OSError) -> LakeError:
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(f"{address} is taken; stop what listens there or choose another", subject=str(address))
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PermissionDenied(f"{address} may not be listened on ({reason})", subject=str(address))
    return InvalidArgument(f"{address} cannot be listened on ({reason})", subject=str(address))


async def _resolve(address: Address) -> list[tuple[Address, str | tuple[str, int]]]:
    """Return addresses with numeric hosts, and the arguments for connect and bind.  EngineUnreachable: unknown host."""
    if isinstance(address, UnixAddress):
        return [(address, address.path)]
    try:
        found = await trio.socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise EngineUnreachable(f"host {address.host} is not known ({error.strerror})", subject=str(address)) from error
    numeric = [TcpAddress(str(sockaddr[0]), int(sockaddr[1])) for *_, sockaddr in found]
    return [(target, (target.host, target.port)) for target in numeric]


async def _connected(target: Address, sockaddr: str | tuple[str, int]) -> socket.socket:
    """Return a connected, non-blocking socket.  OSError as connect."""
    sock = new_socket(target)
    try:
        sock.setblocking(False)
        tune(sock)
        code = sock.connect_ex(sockaddr)
        while code == errno.EAGAIN:  # a Unix listener whose backlog is full
            await trio.sleep(_CONNECT_RETRY_S)
            code = sock.connect_ex(sockaddr)
        if code == errno.EINPROGRESS:
            await trio.lowlevel.wait_writable(sock.fileno())
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
    except BaseException:
        _close(sock)
        raise
    return sock


def _refuse(sock: socket.socket, error: PermissionDenied) -> None:
    """Send a client the reason of its refusal, if that needs no wait, and close."""
    _log.warning("client_refused", reason=error.message)
    with sock:
        try:
            sock.send(farewell(error), socket.MSG_NOSIGNAL)
        except OSError:
            return


def _close(sock: socket.socket) -> None:
    if sock.fileno() >= 0:
        trio.lowlevel.notify_closing(sock.fileno())
        sock.close()


def _inode_of(address: Address) -> int | None:
    """Return the inode of a Unix socket's file; None when it has no file."""
    if isinstance(address, TcpAddress):
        return None
    try:
        return os.lstat(address.path).st_ino
    except OSError:
        return None
