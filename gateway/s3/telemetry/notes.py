"""Notes of an S3 gateway's counts to the engine, which shows them in `lake status`.

Rules kept here:
- One small request each time when counts or connection have changed, at most every GATEWAY_NOTE_S.
- No request of a client waits for it, and no failure of it matters: the counts are noted the next time.
- An engine that does not know the request is not asked again on its connection.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import trio

from gateway.s3.telemetry.traffic import Snapshot
from lakefs.errors import LakeError, UnsupportedVersion
from lakefs.limits import GATEWAY_NOTE_S
from lakefs.wire.engine_port import EngineClient
from lakefs.wire.messages import NoteGateway


def note_of(url: str, counts: Snapshot, *, has_door: bool) -> NoteGateway:
    """Return the note of this process, which serves S3 at `url`."""
    return NoteGateway(
        url=url,
        process=os.getpid(),
        door=has_door,
        answers=sum(counts.requests),
        repeated=sum(counts.repeated.values()),
        passed_on=counts.passed_on,
    )


async def keep_noted(engine: EngineClient, note: Callable[[], NoteGateway]) -> None:
    """Send notes until cancelled."""
    noted: NoteGateway | None = None
    epoch, unable = -1, -1
    while True:
        present = note()
        if engine.epoch != unable and (present != noted or engine.epoch != epoch):
            asked = engine.epoch
            try:
                epoch = (await engine.call(present)).epoch
                noted = present
            except UnsupportedVersion:
                unable = asked
            except LakeError:
                noted = None  # the engine is busy, or away
        await trio.sleep(GATEWAY_NOTE_S)
