"""The content of a lake for a process of one machine: chunks over the members, and memory for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from typing import Final, NamedTuple

import structlog
import trio

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.lake_state import LakeState
from engine.lake.beside_names import NAMES_PAUSE_S, WAITING_FOR_NAMES
from engine.lake.plan import LakePlan
from engine.members.lent_area import LentArea
from engine.members.member_link import Connect
from engine.members.member_links import MemberLinks, connect_member, open_member_links
from engine.members.read_memory import ReadMemory, Take
from engine.stripes.stripes import LakeStripes
from lakefs.errors import EngineBusy, EngineUnreachable
from lakefs.host.buffers import BufferPool
from lakefs.limits import BUFFER_POOL_BYTES, PARITY_MEMORY_BYTES
from lakefs.ports import Offload

_log: Final = structlog.get_logger(__name__)


class Content(NamedTuple):
    """Chunks over the members, with the memory for what a head receives."""

    links: MemberLinks
    stripes: LakeStripes
    buffers: BufferPool
    take: Take
    """Memory for what is read from members."""


async def open_content(stack: AsyncExitStack, plan: LakePlan, coordinator: Coordinator, offload: Offload) -> Content:
    """Reach the members.  Memory for payload and for parity is one area, which members on this machine map."""
    area = LentArea(BUFFER_POOL_BYTES + PARITY_MEMORY_BYTES)
    buffers = BufferPool(BUFFER_POOL_BYTES, memory=area.part(BUFFER_POOL_BYTES))
    parity = BufferPool(PARITY_MEMORY_BYTES, memory=area.part(PARITY_MEMORY_BYTES))
    reads = stack.enter_context(closing(ReadMemory()))
    connect = partial(connect_member, token=plan.token, machine=plan.machine.machine, area=area, reads=reads)
    links = await stack.enter_async_context(_links(coordinator, connect))
    return Content(links, LakeStripes(links, LakeState(coordinator), offload, parity, reads.take), buffers, reads.take)


@asynccontextmanager
async def _links(coordinator: Coordinator, connect: Connect) -> AsyncIterator[MemberLinks]:
    """Open links to the members, when the coordinator can be asked for them."""
    async with AsyncExitStack() as stack:
        while True:
            try:
                links = await stack.enter_async_context(open_member_links(coordinator, connect))
            except (EngineUnreachable, EngineBusy) as error:
                _log.warning(WAITING_FOR_NAMES, reason=error.message)
                await trio.sleep(NAMES_PAUSE_S)
            else:
                break
        yield links
