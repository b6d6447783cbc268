"""Counts of repeated answers, as those of any other answers: added to the traffic of their port."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gateway.s3.protocol.targets import Operation
from gateway.s3.telemetry.traffic import CLASSES, OPERATIONS, Snapshot

if TYPE_CHECKING:
    from gateway.s3.door._repeater import Repeater

_OPERATIONS: Final = (Operation.GET_OBJECT, Operation.HEAD_OBJECT)
_SUCCESS: Final = CLASSES.index("2xx")
_NS: Final = 1_000_000_000


def counts_of(repeater: Repeater, reasons: tuple[str, ...]) -> Snapshot:
    """Return the counts of a repeater; `reasons` are those for which it passes a request on, in its order."""
    found = Snapshot()
    whole_get, range_get, whole_head, range_head = repeater.repeated
    for operation, answers in zip(_OPERATIONS, (whole_get + range_get, whole_head + range_head), strict=True):
        number = OPERATIONS.index(operation.value)
        times, took_ns = repeater.times(operation is Operation.HEAD_OBJECT)
        found.requests[number * len(CLASSES) + _SUCCESS] = answers
        found.times[number * len(times) : (number + 1) * len(times)] = times
        found.seconds[number] = took_ns / _NS
        found.repeated[operation.value] = answers
    found.bytes_out = repeater.sent_bytes
    found.cut_short = repeater.cut_short
    found.passed_on = dict(zip(reasons, repeater.passed, strict=True))
    return found
