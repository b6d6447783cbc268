"""The answer to Locate with its grants encoded already, as the shared index's table packs them.

The same bytes leave as for `Located`; 64 grants of a request are never objects of Python.
"""

from __future__ import annotations

from typing import Final

import msgspec

from lakefs.wire.messages import Grant, Located, Message

_decode: Final = msgspec.msgpack.Decoder(list[Grant]).decode


class PackedLocated(Message, frozen=True):
    """`Located` on its way to a client that gets bytes."""

    grants: msgspec.Raw

    def unpacked(self) -> Located:
        """What a client in this process gets."""
        return Located(_decode(self.grants))
