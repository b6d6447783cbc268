"""Asking the engine for its hot index: steps for every client."""

from __future__ import annotations

from lakefs.errors import CorruptionError, PermissionDenied, UnsupportedVersion
from lakefs.hot_index import HotIndexReader
from lakefs.sockets import close_all
from lakefs.steps import Steps, send
from lakefs.wire.messages import HotIndexOpened, OpenHotIndex


def open_hot_index() -> Steps[HotIndexReader | None]:
    """The hot index of the engine, mapped read-only; None when there is none for this client, which asks instead.

    To be asked for again on another connection, and when `HotIndexReader.is_current` has become false.
    """
    try:
        reply = yield from send(OpenHotIndex())
    except (UnsupportedVersion, PermissionDenied):
        return None
    assert isinstance(reply.message, HotIndexOpened)
    try:
        return HotIndexReader(reply.descriptors[0])
    except (CorruptionError, PermissionDenied):  # of a later version, or in memory that could be cut
        return None
    finally:
        close_all(reply.descriptors)
