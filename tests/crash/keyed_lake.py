"""`lake` with small files that notes what it evicts, and may have a bug.

    python -m tests.crash.keyed_lake BUG serve ...

The file that the variable KEYED_EVICTED names gets a line for each start, for each value before it is evicted, and for
each when that is durable: time, space's number, key.  Clients that look keys up in shared memory see a value for so
long.  So a key that is missing was evicted, or was lost.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import trio

from tests.crash import small_lake

VARIABLE: Final = "KEYED_EVICTED"
STARTED: Final = b"started"
BEGUN: Final = b"begun"
DURABLE: Final = b"durable"


def note_evictions(path: str) -> None:
    """Note each victim of an eviction in a file, and when its removal is durable."""
    from engine.format.keyed import space_and_key
    from engine.format.layouts import Table
    from engine.keyed.upkeep import KeyedUpkeep

    victim = KeyedUpkeep._victim
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    under_way: set[bytes] = set()

    def note(what: bytes, number: int = 0, key: bytes = b"-") -> None:
        os.write(descriptor, b"%s %d %d %s\n" % (what, time.monotonic_ns(), number, key.hex().encode()))

    def noted(upkeep: Any, view: Any, number: int) -> bytes | None:
        if not observed:
            upkeep._metadata.on_durable_records(frozenset({Table.KEYED}), durable)
            observed.append(True)
        place = victim(upkeep, view, number)
        if place is not None:
            note(BEGUN, number, space_and_key(place)[1])
            under_way.add(place)
        return place

    def durable(mutations: Any) -> None:
        for _, _, place, _ in mutations:
            if place in under_way:
                under_way.remove(place)
                gone = partial(note, DURABLE, *space_and_key(place))
                trio.lowlevel.current_trio_token().run_sync_soon(gone)  # behind all who are called for this group

    observed: list[bool] = []
    note(STARTED)
    KeyedUpkeep._victim = noted  # type: ignore[method-assign,assignment]


def _gc_forgets_values() -> None:
    from engine.upkeep.gc import Collector

    async def nothing(collector: Any, cycle: Any) -> None:
        return None

    Collector._mark_values = nothing  # type: ignore[method-assign,assignment]


def _answer_first() -> None:
    """Answer a put of values when it is visible."""
    from engine.chunks.bound_payloads import BoundPayloads

    store = BoundPayloads.store

    async def early(bound: Any, payloads: Any, bind: Any, **_: Any) -> Any:
        return await store(bound, payloads, bind, durable=False)

    BoundPayloads.store = early  # type: ignore[method-assign,assignment]


def _evict_from_any_space() -> None:
    """Evict a value of the space with the next lower number too."""
    from engine.format.keyed import values_range
    from engine.format.layouts import Table
    from engine.keyed import upkeep

    remove = vars(upkeep)["remove_value"]

    def more(txn: Any, usage: Any, number: int, key: bytes) -> Any:
        for place, _ in txn.scan(Table.KEYED, *values_range(number - 1)):
            txn.delete(Table.KEYED, place)
            break
        return remove(txn, usage, number, key)

    vars(upkeep)["remove_value"] = more


def _load_the_neighbour() -> None:
    """Load, for one key in fifty, the value of a key that was loaded before it."""
    from engine.requests.keyed_load import WantedValues

    add = WantedValues.add
    last: list[Any] = [None]

    def wrong(wanted: Any, index: int, value: Any) -> None:
        is_wrong = value is not None and last[0] is not None and random.random() < 0.02
        add(wanted, index, last[0] if is_wrong else value)
        last[0] = value or last[0]

    WantedValues.add = wrong  # type: ignore[method-assign,assignment]


BUGS: Final[dict[str, Callable[[], None]]] = {
    "none": lambda: None,
    "gc-forgets-values": _gc_forgets_values,
    "answer-first": _answer_first,
    "evict-from-any-space": _evict_from_any_space,
    "load-the-neighbour": _load_the_neighbour,
}


if __name__ == "__main__":
    small_lake.make_small()
    BUGS[sys.argv.pop(1)]()
    note_evictions(os.environ[VARIABLE])
    small_lake.be_lake()
