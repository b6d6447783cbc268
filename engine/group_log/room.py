"""Room at a coordinator that is full, as an etcd at its quota: the leader makes it, and no operator has to.

    trim        all groups that the leader's own journal has    --  etcd removes keys also when it is full
    forget      what was trimmed, a moment later                --  those who follow have seen it by then
    make room   `ReplicaPlace.make_room`: etcd's nodes write their files anew, and the alarm is disarmed

Decisions are refused meanwhile (`LeaderLog.check_decision`), and the group under way is tried again until it is done.

Rules kept here:
- This goes on until a group was appended, with longer pauses from time to time: others may fill the coordinator.
- A replica that does not follow closely enough begins anew.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import structlog
import trio

from engine.group_log.leader_log import LeaderLog
from engine.group_log.log_bounds import ROOM_PAUSE_S, ROOM_PAUSE_S_MAX, ROOM_TRY_S
from engine.group_log.trimming import Trimming
from lakefs.errors import LakeError
from lakefs.ids import Sequence

_log: Final = structlog.get_logger(__name__)


async def keep_room(
    log: LeaderLog, trimming: Trimming, kept: Callable[[], Sequence], make_room: Callable[[], Awaitable[None]]
) -> None:
    """Make room whenever the coordinator has none, until cancelled; `kept`: see `Trimming.run`."""
    pause_s = ROOM_PAUSE_S
    while True:
        await trio.sleep(ROOM_TRY_S)
        if log.full is None:
            if pause_s > ROOM_PAUSE_S:
                _log.warning("the coordinator has room again")
            pause_s = ROOM_PAUSE_S
            continue
        _log.error("the coordinator is full: names are refused until it has room", reason=log.full.message)
        try:
            await trimming.trim(kept(), is_full=True)
            await trio.sleep(pause_s)
            await trimming.forget_all()
            await make_room()
        except LakeError as error:
            _log.error("room could not be made at the coordinator; it is tried again", reason=error.message)
        pause_s = min(2 * pause_s, ROOM_PAUSE_S_MAX)
        await trio.sleep(2 * ROOM_TRY_S)  # the append was tried again by then
