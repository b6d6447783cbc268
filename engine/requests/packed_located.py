"""The reply to Locate with its grants already encoded, as the shared index's table packs them.

The bytes sent are those of `Located`; the grants never become Python objects.
"""

from __future__ import annotations

from typing import Final

import msgspec

from lakefs.wire.messages import Grant, Located, Message

_decode: Final = msgspec.msgpack.Decoder(list[Grant]).decode


class PackedLocated(Message, frozen=True):
    """`Located`, already encoded, for a client that gets bytes."""

    grants: msgspec.Raw

    def unpacked(self) -> Located:
        """Return the `Located` for a client in this process."""
        return Located(_decode(self.grants))
