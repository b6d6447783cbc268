"""What all messages of the native protocol have in common, and the answers that any request may get."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from lakefs.errors import LakeError, from_wire


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages."""


class Request(Message, frozen=True):
    """A message that asks; `OP` is its number in the frame header."""

    OP: ClassVar[int] = 0
    REPLY: ClassVar[type[Message]]


class Done(Message, frozen=True):
    """The request was done and has nothing to tell."""


class Failure(Message, frozen=True):
    """The request, or one item of a batch, failed: an error of `lakefs.errors` by its wire code."""

    wire_code: int
    message: str
    subject: str = ""

    def as_error(self) -> LakeError:
        """The error; an unknown code is an `InternalError` that says so."""
        return from_wire(self.wire_code, self.message, self.subject)
