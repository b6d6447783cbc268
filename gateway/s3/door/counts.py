"""Counts of the door's answers, as those of any other answers: added to the traffic of their port."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gateway.s3.telemetry.traffic import CLASSES, NUMBERS, Snapshot

if TYPE_CHECKING:
    from gateway.s3.door._repeater import Repeater

_SUCCESS: Final = CLASSES.index("2xx")
_NS: Final = 1_000_000_000


def counts_of(repeater: Repeater, operations: tuple[str, ...], reasons: tuple[str, ...]) -> Snapshot:
    """Return the counts of a repeater: of these operations, and of these reasons for passing a request on."""
    found = Snapshot()
    for at, operation in enumerate(operations):
        number = NUMBERS[operation]
        times, took_ns = repeater.times(at)
        found.requests[number * len(CLASSES) + _SUCCESS] = found.repeated[operation] = sum(repeater.answered[at])
        found.times[number * len(times) : (number + 1) * len(times)] = times
        found.seconds[number] = took_ns / _NS
    found.bytes_in = repeater.received_bytes
    found.bytes_out = repeater.sent_bytes
    found.cut_short = repeater.cut_short
    found.passed_on = dict(zip(reasons, repeater.passed, strict=True))
    return found
