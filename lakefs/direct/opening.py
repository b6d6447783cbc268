"""Asking the engine for its shared index: steps for every client."""

from __future__ import annotations

from typing import Final

from lakefs.errors import (
    CorruptionError,
    EngineBusy,
    EngineUnreachable,
    PermissionDenied,
    UnsupportedVersion,
)
from lakefs.grants import batch_plan as plain_reads
from lakefs.host.descriptors import close_all
from lakefs.shared_index import table as shared_table
from lakefs.shared_index.reader import SharedIndexReader
from lakefs.steps.steps import Steps, send
from lakefs.wire.messages import OpenSharedIndex, SharedIndexOpened

_ATTEMPTS: Final = 2


def open_shared_index() -> Steps[SharedIndexReader | None]:
    """The shared index of the engine, mapped read-only; None when there is none for this client, which asks instead.

    To be asked for again on another connection, and when `SharedIndexReader.is_current` has become false.  Reads go on
    without it, so that an engine that cannot be reached, and a descriptor that cannot be had, are None, too.
    """
    if not (shared_table.IS_BUILT and plain_reads.IS_BUILT):
        return None
    for _ in range(_ATTEMPTS):
        try:
            reply = yield from send(OpenSharedIndex())
        except (UnsupportedVersion, PermissionDenied, EngineBusy, EngineUnreachable):
            return None
        assert isinstance(reply.message, SharedIndexOpened)
        try:
            return SharedIndexReader(reply.descriptors[0])
        except PermissionDenied:  # in memory that could be cut
            return None
        except CorruptionError:  # of a later version; or it was replaced while its descriptor was on its way
            continue
        finally:
            close_all(reply.descriptors)
    return None
