"""One reader of bytes, the inputs that it is given, and the errors that it may refuse them with.

A target takes an input and returns, or raises what its face refuses with; anything else that it raises is a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.http.head import HttpRefusal
from gateway.s3.protocol.errors import S3Error
from lakefs.errors import InternalError, LakeError
from tests.fuzz.inputs import kept_inputs

REFUSALS: Final[tuple[type[HttpRefusal], type[S3Error]]] = (HttpRefusal, S3Error)
Refusal = HttpRefusal | S3Error | LakeError


@dataclass(frozen=True)
class Target:
    """One reader: its function, good inputs, and the tokens that it looks for."""

    name: str
    read: Callable[[bytes], None]
    good: Sequence[bytes]
    tokens: Sequence[bytes]
    refusals: tuple[type[Refusal], ...] = REFUSALS

    @property
    def bases(self) -> list[bytes]:
        """Good inputs, and those that were kept."""
        return [*self.good, *kept_inputs(self.name)]

    def survives(self, data: bytes) -> Refusal | None:
        """Read an input; return the error that refused it, or None.  Whatever is raised here is a bug."""
        refusal = self.refusal(data)
        if refusal is None:
            return None
        assert refusal.message, refusal
        if isinstance(refusal, LakeError):  # its message may have names of files that are not UTF-8
            assert not isinstance(refusal, InternalError), refusal
            assert refusal.wire_code, f"{type(refusal).__name__} has no place in the table of errors"
            return refusal
        assert 400 <= refusal.status <= 599, refusal
        assert refusal.code.isalnum(), refusal
        assert refusal.message.encode(), refusal
        return refusal

    def refusal(self, data: bytes) -> Refusal | None:
        """Return the error that an input is refused with; None when it is read."""
        try:
            self.read(data)
        except self.refusals as refusal:
            return refusal
        return None
