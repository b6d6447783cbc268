"""Answers that several handlers give: failures of a batch's items, and what was stored."""

from __future__ import annotations

from collections.abc import Sequence

from lakefs.errors import InvalidArgument, LakeError
from lakefs.ids import ChunkId
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


def failed(error: LakeError) -> m.NameResult:
    """A batch's item that failed."""
    return m.NameResult(failure=failure_of(error))


def failure_of(error: LakeError) -> m.Failure:
    """An error as a message."""
    return m.Failure(error.wire_code, error.message, error.subject)


def versions_of(request: m.StatNames | m.OpenObjects | m.DeleteNames) -> Sequence[str]:
    """The version that a batch wants of each of its names, "" for none.  InvalidArgument when they are not as many."""
    if len(request.versions) not in (0, len(request.names)):
        raise InvalidArgument(f"{len(request.versions)} versions for {len(request.names)} names")
    return request.versions or [""] * len(request.names)


def stored(results: list[tuple[ChunkId, bool]]) -> Reply:
    """The answer to what stores chunks."""
    return Reply(m.Stored([chunk for chunk, _ in results], [fresh for _, fresh in results]))
