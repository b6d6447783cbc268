"""A repeater for tests of the door alone: requests are lines, and those that begin with `?` are known."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gateway.http._door import Rest

_NAME = b"lake_repeater"
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _Span(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("length", ctypes.c_size_t))

    def text(self) -> bytes:
        return ctypes.string_at(self.at, self.length) if self.length else b""


class _Ticket(ctypes.Structure):
    _fields_ = (("descriptor", ctypes.c_int), ("number", ctypes.c_uint64))


class _Repeated(ctypes.Structure):
    _fields_ = (("bytes", _Span), ("rest", ctypes.c_void_p), ("is_held", ctypes.c_int), ("wanted", ctypes.c_size_t))


_Begin = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Repeat = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p, _Span, ctypes.c_int64, _Ticket, ctypes.POINTER(_Repeated))
_Sent = ctypes.CFUNCTYPE(None, ctypes.c_void_p, _Span, ctypes.c_uint64)
_Taken = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_Ended = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, _Span, ctypes.c_uint64, ctypes.c_int)


class _Port(ctypes.Structure):
    _fields_ = (
        ("context", ctypes.c_void_p),
        ("begin", _Begin),
        ("repeat", _Repeat),
        ("sent", _Sent),
        ("piece", ctypes.c_void_p),
        ("taken", _Taken),
        ("ended", _Ended),
    )


class Held(NamedTuple):
    """A line that is held, with its ticket."""

    descriptor: int
    number: int
    line: bytes


class LineRepeater:
    """Answers `?TEXT LF` with `answer(TEXT)`; other lines, and what is no whole line, are not known.

    `N:TEXT`, with as many bytes of TEXT as the digit N says, is waited for until it is whole, and held.
    """

    def __init__(self, answer: Callable[[bytes], bytes] = bytes.upper) -> None:
        self.batches = 0
        self.peers: list[bytes] = []
        self.held: list[Held] = []
        self._answer = answer
        self._out: Any = None
        self._port = _Port(
            None,
            _Begin(self._begin),
            _Repeat(self._repeat),
            _Sent(self._sent),
            None,  # no answer has a rest
            _Taken(lambda context, rest, count: 1),
            _Ended(lambda context, rest, peer, took_ns, is_cut: None),
        )

    @property
    def native(self) -> object:
        """The port, as the door takes it."""
        return _new_capsule(ctypes.addressof(self._port), _NAME, None)

    def take_rest(self, address: int, peer: bytes, began_ns: int) -> Rest:
        """See `Repeats`."""
        raise AssertionError("no answer has a rest")

    def _begin(self, _: int) -> None:
        self.batches += 1

    def _repeat(self, _: int, received: _Span, began_ns: int, ticket: _Ticket, answer: Any) -> int:
        text = received.text()
        if text[:1].isdigit() and text[1:2] == b":":
            length = int(text[:1]) + 2
            if len(text) == length:
                self.held.append(Held(ticket.descriptor, ticket.number, text))
                answer[0] = _Repeated(_Span(None, 0), None, 1, 0)
                return length
            answer[0] = _Repeated(_Span(None, 0), None, 0, length)
            return 0
        line, end, _rest = text.partition(b"\n")
        if not end or line[:1] != b"?":
            return 0
        out = self._answer(line[1:])
        self._out = ctypes.create_string_buffer(out, len(out))  # valid until the next call
        answer[0] = _Repeated(_Span(ctypes.addressof(self._out), len(out)), None, 0, 0)
        return len(line) + 1

    def _sent(self, _: int, peer: _Span, took_ns: int) -> None:
        self.peers.append(peer.text())
