"""Base classes of all messages of the native protocol, and the two answers that any request may get."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from lakefs.errors import LakeError, from_wire


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages."""


class Request(Message, frozen=True):
    """A message from a client that asks for something.  `OP` is its number in the frame header, `REPLY` its answer."""

    OP: ClassVar[int] = 0
    REPLY: ClassVar[type[Message]]


class Done(Message, frozen=True):
    """The request was done; there is nothing to return."""


class Failure(Message, frozen=True):
    """The request, or one item of a batch, failed with the error of `lakefs.errors` that has this wire code."""

    wire_code: int
    message: str
    subject: str = ""

    def as_error(self) -> LakeError:
        """Return the error to raise; an unknown code becomes an `InternalError` that says so."""
        return from_wire(self.wire_code, self.message, self.subject)
