"""Replies that several handlers send: failures of a batch's items, and stored chunks."""

from __future__ import annotations

from collections.abc import Sequence

from lakefs.errors import InvalidArgument, LakeError
from lakefs.ids import ChunkId
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


def failed(error: LakeError) -> m.NameResult:
    """Return the result of a batch's item that failed."""
    return m.NameResult(failure=failure_of(error))


def failure_of(error: LakeError) -> m.Failure:
    """Return an error as a message."""
    return m.Failure(error.wire_code, error.message, error.subject)


def versions_of(request: m.StatNames | m.OpenObjects | m.DeleteNames) -> Sequence[str]:
    """Return the version wanted of each name, "" for none.  InvalidArgument when the counts differ."""
    if len(request.versions) not in (0, len(request.names)):
        raise InvalidArgument(f"{len(request.versions)} versions for {len(request.names)} names")
    return request.versions or [""] * len(request.names)


def stored(results: list[tuple[ChunkId, bool]]) -> Reply:
    """Return the reply to a request that stores chunks."""
    return Reply(m.Stored([chunk for chunk, _ in results], [fresh for _, fresh in results]))
