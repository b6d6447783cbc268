"""Steps, for every client, that request the engine's shared index and map it."""

from __future__ import annotations

from typing import Final

from lakefs.errors import CorruptionError, EngineBusy, EngineUnreachable, PermissionDenied, UnsupportedVersion
from lakefs.grants import batch_plan as plain_reads
from lakefs.host.descriptors import close_all
from lakefs.shared_index import table as shared_table
from lakefs.shared_index.table import SharedIndexReader
from lakefs.steps.steps import Steps, send
from lakefs.wire.messages import OpenSharedIndex, SharedIndexOpened

_ATTEMPTS: Final = 2


def open_shared_index() -> Steps[SharedIndexReader | None]:
    """Return the engine's shared index, mapped read-only; None if this client gets none and has to send requests.

    Call it again on another connection, and when `SharedIndexReader.is_current` has become False.  Reads work without
    the index, so it is None also when the engine cannot be reached, or has no room for the request.
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
        except PermissionDenied:  # its memory could be shrunk
            return None
        except CorruptionError:  # a later version; or the index was replaced while its descriptor was sent
            continue
        finally:
            close_all(reply.descriptors)
    return None
