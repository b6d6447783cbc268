"""Puts by RDMA: payloads are copied to registered memory, and the engine READs them from there.

Rules kept here:
- Less than STORE_FROM_BYTES goes in a body, and so does everything else when there is no queue pair, when another put
  uses the memory, or when the engine's READ has failed.
- The memory is filled anew only after the answer; when there is none, its registration ends, so that the engine can
  store nothing under the old name that was not meant for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from lakefs.errors import EngineUnreachable, LakeError, SessionLost
from lakefs.ids import SessionId
from lakefs.limits import MIB, STORE_REQUEST_BYTES
from lakefs.steps.steps import Steps, send, work
from lakefs.wire.engine_port import Reply
from lakefs.wire.fabric_messages import FabricMemory
from lakefs.wire.messages import NameChange, PutSlots, Request, StoreSlots

if TYPE_CHECKING:
    from lakefs.fabric.client_fabric import ClientFabric

STORE_FROM_BYTES: Final = 1 * MIB
"""Least payload of a request that is READ: for less the copy and the round trips of the READ cost more."""


def store_remotely(
    fabric: ClientFabric | None, session: SessionId, payloads: Sequence[memoryview]
) -> Steps[Reply | None]:
    """Store payloads as chunks of a put session; returns the answer (`Stored`), None: send them in a body."""
    lengths = [len(payload) for payload in payloads]

    def request(offsets: list[int], memory: FabricMemory) -> Request:
        return StoreSlots(session, 0, offsets, lengths, memory)

    return (yield from _read_by_engine(fabric, payloads, request))


def put_remotely(
    fabric: ClientFabric | None, payloads: Sequence[memoryview], changes: Callable[[], list[NameChange]]
) -> Steps[Reply | None]:
    """Put a chunk under each name; returns the answer (`NameResults`), None: send them in a body.

    `changes` returns the names; it is called when they go by RDMA.
    """
    lengths = [len(payload) for payload in payloads]

    def request(offsets: list[int], memory: FabricMemory) -> Request:
        return PutSlots(0, offsets, lengths, changes(), fabric=memory)

    return (yield from _read_by_engine(fabric, payloads, request))


def _read_by_engine(
    fabric: ClientFabric | None, payloads: Sequence[memoryview], request: Callable[[list[int], FabricMemory], Request]
) -> Steps[Reply | None]:
    total = sum(map(len, payloads))
    if fabric is None or not STORE_FROM_BYTES <= total <= STORE_REQUEST_BYTES:
        return None
    link = yield from fabric.connected()
    if link is None:
        return None
    source = yield from fabric.taken_source()
    if source is None:
        return None
    is_quiet = False
    try:
        offsets = yield from work(source.fill, payloads)
        reply = yield from send(request(offsets, source.memory))
        is_quiet = True
        fabric.note_moved(len(payloads), total)
        return reply
    except SessionLost as error:
        fabric.retire(link, error)
        return None
    except LakeError as error:
        is_quiet = not isinstance(error, EngineUnreachable)  # then it is the engine's answer
        raise
    except BaseException:
        fabric.retire(link, None)  # the engine's READ of memory that is given up now breaks it
        raise
    finally:
        fabric.give_back(source, is_quiet=is_quiet)
