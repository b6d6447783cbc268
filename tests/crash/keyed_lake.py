"""`lake` with small files that notes what it evicts, and may have a bug.

    python -m tests.crash.keyed_lake BUG serve ...

Before a value is evicted, a line with the time, the space's number and the key is appended to the file that the
variable KEYED_EVICTED names.  So a key that is missing was evicted, or was lost.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from tests.crash import small_lake

VARIABLE: Final = "KEYED_EVICTED"


def note_evictions(path: str) -> None:
    """Note each victim of an eviction in a file."""
    from engine.format.keyed import space_and_key
    from engine.keyed.upkeep import KeyedUpkeep

    victim = KeyedUpkeep._victim
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def noted(upkeep: Any, view: Any, number: int) -> bytes | None:
        place = victim(upkeep, view, number)
        if place is not None:
            key = space_and_key(place)[1]
            os.write(descriptor, b"%d %d %s\n" % (time.monotonic_ns(), number, key.hex().encode()))
        return place

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
    from engine.requests.keyed_load import _Wanted

    add = _Wanted.add
    last: list[Any] = [None]

    def wrong(wanted: Any, index: int, value: Any) -> None:
        is_wrong = value is not None and last[0] is not None and random.random() < 0.02
        add(wanted, index, last[0] if is_wrong else value)
        last[0] = value or last[0]

    _Wanted.add = wrong  # type: ignore[method-assign,assignment]


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
