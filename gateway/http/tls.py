"""TLS between a listener's streams and the server: `Stream`s over `Stream`s, invisible to their users.

Rules kept here:
- TLS 1.2 and newer, without renegotiation.  The connection's own task makes the handshake, when it first receives or
  sends, within HTTP_HANDSHAKE_TIMEOUT_S: a stalled one delays no other connection, and no accept waits for one.
- A peer that sends no more (close_notify, or the end of its bytes) is still answered.  HTTP carries the length of
  a body, so an end that was cut off is noticed there.
- Bytes for the peer are encrypted once.  Bytes that `send_nowait` has encrypted and the socket did not take are sent
  before anything else; they are not counted as sent until then, and the caller offers them again, as it does any
  unsent bytes.
- Closing sends close_notify if that needs no wait.

The certificate of the port and its key are read at the start, and again on request or when the files changed:
- The files are checked when a connection arrives, at most once a second; present connections keep the certificate
  that they began with.
- A new pair that cannot be used is logged as an error, and tried again only when the files change once more or a reload
  is requested; the old pair stays.
- An encrypted key is refused: there is no user to enter its password.

Reading two small files is the one thing here that blocks the loop, and only when they have changed.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import structlog
import trio

from lakefs.errors import ConfigError, EngineUnreachable
from lakefs.ids import Buffer
from lakefs.limits import HTTP_HANDSHAKE_TIMEOUT_S
from lakefs.ports import Listener, Stream

_RECEIVE_BYTES: Final = 8 << 10
"""Receive buffer of a new connection; RECEIVE_BYTES_MAX once it was filled."""
_RECEIVE_BYTES_MAX: Final = 64 << 10
_RECEIVES_IN_A_ROW: Final = 32
_SEAL_BYTES: Final = 64 << 10
"""Four records; long parts are encrypted and sent in pieces of it, and short ones together."""
_PLAIN_REFUSAL: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: 38\r\nConnection: close\r\n\r\n"
    b"this port speaks TLS: use https, please"
)
_LOOK_EVERY_S: Final = 1.0
_log: Final = structlog.get_logger(__name__)


class TlsListener:
    """A `Listener` whose streams are encrypted."""

    def __init__(self, listener: Listener, current: Callable[[], ssl.SSLContext]) -> None:
        """`current` returns the context for a connection that begins now."""
        self._listener = listener
        self._current = current

    @property
    def address(self) -> str:
        """See `Listener`."""
        return self._listener.address

    async def accept(self) -> Stream:
        """Return the next connection, before its handshake."""
        return TlsStream(await self._listener.accept(), self._current())

    async def aclose(self) -> None:
        """See `Listener`."""
        await self._listener.aclose()


class TlsStream:
    """A `Stream` without descriptors."""

    carries_descriptors = False

    def __init__(self, raw: Stream, context: ssl.SSLContext, *, server_name: str | None = None) -> None:
        """With `server_name` it is the client's end."""
        self._raw = raw
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._received = memoryview(bytearray(_RECEIVE_BYTES))
        self._unsent: bytes | memoryview = b""  # encrypted, and not taken by the socket
        self._ahead = 0  # plain bytes in `unsent` that the caller will offer again
        self._receives = 0
        self._is_open = False
        self._has_ended = False
        self._is_sending = False
        self._handshaking = trio.Lock()

    @property
    def peer(self) -> str:
        """See `Stream`."""
        return self._raw.peer

    @property
    def uid(self) -> int | None:
        """See `Stream`."""
        return self._raw.uid

    def take_descriptors(self) -> list[int]:
        """Return an empty list: TLS carries no descriptors."""
        return []

    async def receive_into(self, buffer: memoryview) -> int:
        """Receive bytes; 0 if the peer has finished.  EngineUnreachable, also for a failed handshake."""
        if not self._is_open:
            await self.shake_hands()
        self._receives += 1
        if self._receives >= _RECEIVES_IN_A_ROW:  # reads of decrypted bytes never wait: let others run
            self._receives = 0
            await trio.lowlevel.checkpoint()
        while True:
            try:
                count: Any = self._tls.read(len(buffer), buffer)  # the stubs know only the form that returns bytes
                return int(count)
            except ssl.SSLWantReadError:
                await self._feed()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0
            except ssl.SSLError as error:
                raise _broken(self.peer, error) from error

    def send_nowait(self, parts: Sequence[Buffer], descriptors: Sequence[int] = ()) -> int:
        """See `Stream.send_nowait`; 0 before the handshake."""
        assert not descriptors, "TLS carries no descriptors"
        if not self._is_open or self._is_sending:
            return 0
        if len(self._unsent):
            self._unsent = self._unsent[self._raw.send_nowait([self._unsent]) :]
            if len(self._unsent):
                return 0
        reported, self._ahead = self._ahead, 0
        for piece in _pieces(parts, reported):
            sealed = memoryview(self._seal(piece))
            count = self._raw.send_nowait([sealed])
            if count < len(sealed):
                self._unsent = sealed[count:]
                self._ahead = len(piece)
                break
            reported += len(piece)
        return reported

    async def wait_writable(self) -> None:
        """See `Stream`."""
        if not self._is_open:
            await self.shake_hands()
        await self._raw.wait_writable()

    async def send(self, parts: Sequence[Buffer], descriptors: Sequence[int] = ()) -> None:
        """Send everything.  EngineUnreachable."""
        assert not descriptors, "TLS carries no descriptors"
        if not self._is_open:
            await self.shake_hands()
        self._is_sending = True
        if len(self._unsent):
            await self._raw.send([self._unsent])
            self._unsent = b""
        skipped, self._ahead = self._ahead, 0
        for piece in _pieces(parts, skipped):
            await self._raw.send([self._seal(piece)])
        self._is_sending = False

    def is_at_end(self) -> bool:
        """Return True if the connection below has ended."""
        return self._raw.is_at_end()

    def has_peer_left(self) -> bool:
        """Return True if the peer of the connection below has finished."""
        return self._raw.has_peer_left()

    def send_end(self) -> None:
        """Send close_notify, if the socket takes it now, and end the stream below."""
        self._say_goodbye()
        self._raw.send_end()

    async def aclose(self) -> None:
        """Close at once, with a close_notify if the socket takes it now."""
        self._say_goodbye()
        await self._raw.aclose()

    def _say_goodbye(self) -> None:
        if not self._is_open or self._has_ended or self._is_sending or len(self._unsent):
            return
        self._has_ended = True
        with suppress(ssl.SSLError):  # the peer has sent no close_notify, or is broken
            self._tls.unwrap()
        self._send_last(self._outgoing.read())

    def _seal(self, piece: Buffer) -> bytes:
        try:
            self._tls.write(piece)
        except ssl.SSLError as error:
            raise _broken(self.peer, error) from error
        return self._outgoing.read()

    async def _feed(self) -> None:
        """Receive more encrypted bytes, or their end, to read from."""
        count = await self._raw.receive_into(self._received)
        if not count:
            self._incoming.write_eof()
            return
        self._incoming.write(self._received[:count])
        if count == len(self._received) < _RECEIVE_BYTES_MAX:
            self._received = memoryview(bytearray(_RECEIVE_BYTES_MAX))

    async def shake_hands(self) -> None:
        """Make the handshake, unless that is done.  EngineUnreachable if it fails, or takes too long."""
        async with self._handshaking:
            if self._is_open:
                return
            with trio.move_on_after(HTTP_HANDSHAKE_TIMEOUT_S) as scope:
                await self._handshake()
            if scope.cancelled_caught:
                raise EngineUnreachable(f"{self.peer} did not finish its TLS handshake", subject=self.peer)

    async def _handshake(self) -> None:
        while not self._is_open:
            try:
                self._tls.do_handshake()
                self._is_open = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                self._refuse(error)
                raise _broken(self.peer, error) from error
            if self._outgoing.pending:
                await self._raw.send([self._outgoing.read()])
            if not self._is_open:
                await self._feed()

    def _refuse(self, error: ssl.SSLError) -> None:
        """Send the alert, or a plain HTTP answer to plain HTTP, if that needs no wait."""
        self._send_last(_PLAIN_REFUSAL if error.reason == "HTTP_REQUEST" else self._outgoing.read())

    def _send_last(self, sealed: bytes) -> None:
        """Send bytes if the socket takes them now; a peer that is gone needs none."""
        with suppress(EngineUnreachable):
            if sealed:
                self._raw.send_nowait([sealed])


class Certificates:
    """One pair of files.  Raises ConfigError if it cannot be used at the start."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._paths = (certificate, key)
        self._signature = self._look()
        self._looked_at = 0.0
        self._context = load_pair(certificate, key)

    def current(self) -> ssl.SSLContext:
        """Return the context for a connection that begins now."""
        now = trio.current_time()
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            if self._look() != self._signature:
                self.reload()
        return self._context

    def reload(self) -> None:
        """Read the pair again; keep the old one if the new one cannot be used."""
        self._signature = self._look()  # before reading: a change during it is seen at the next look
        try:
            self._context = load_pair(*self._paths)
        except ConfigError as error:
            _log.error("certificate_not_reloaded", reason=error.message)
        else:
            _log.info("certificate_reloaded", path=str(self._paths[0]))

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        found = []
        for path in self._paths:
            try:
                stat = os.stat(path)
                found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
            except OSError:
                found.append((0, 0, 0))
        return tuple(found)


def load_pair(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a server's context with this chain and key.  ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        named = str(error.reason or "")
        if "MISMATCH" in named:
            reason = "certificate and key do not belong together"
        elif not named:  # OpenSSL gives no more for a file that it cannot read
            reason = "one of them is no PEM file of its kind, or the key is encrypted"
        else:
            reason = str(error)
        raise ConfigError(f"{certificate} and {key} cannot be used for TLS: {reason}") from error
    except OSError as error:
        path = next((path for path in (certificate, key) if not os.access(path, os.R_OK)), certificate)
        raise ConfigError(f"{path}: {error.strerror}; TLS needs it", subject=str(path)) from error
    return context


def _pieces(parts: Sequence[Buffer], skipped: int) -> Iterator[Buffer]:
    """Yield the bytes behind the first `skipped`, in pieces of at most _SEAL_BYTES; whole ones are not copied."""
    held: list[memoryview] = []
    size = 0
    for part in parts:
        left = memoryview(part)[skipped:]
        skipped -= min(skipped, len(part))
        while len(left):
            taken = left[: _SEAL_BYTES - size]
            left = left[len(taken) :]
            held.append(taken)
            size += len(taken)
            if size == _SEAL_BYTES:
                yield _joined(held)
                held, size = [], 0
    if held:
        yield _joined(held)


def _joined(held: Sequence[memoryview]) -> Buffer:
    return held[0] if len(held) == 1 else b"".join(held)


def _broken(peer: str, error: ssl.SSLError) -> EngineUnreachable:
    return EngineUnreachable(f"TLS with {peer} failed ({error.reason or error})", subject=peer)
