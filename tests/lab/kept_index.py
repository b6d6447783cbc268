"""An engine whose shared index is kept at some place: over a clean stop, not over a kill, and never for another."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from lakefs.client.connect import connect
from tests.e2e.served import Served
from tests.lab.hardware import wait_for

_OBJECTS: Final = {f"lab/k{number}": bytes([number]) * (100 + 9_000 * number) for number in range(20)}


def index_of(served: Served) -> dict[str, Any]:
    """Return what `lake status` says of the shared index."""
    found: dict[str, Any] = json.loads(served.good("status", "--json").text)["hot_index"]
    return found


def is_kept_over_stops_and_not_over_kills(folder: Path, place: Path, backing: str) -> None:
    """Start, put, stop, start, kill, start: the table is the old one behind the stop alone, and objects are whole."""
    served = Served(folder, "--hot-index", str(place), "--hot-index-entries", "1024")
    try:
        with connect(served.server) as client:
            client.create_bucket("lab")
            client.put_many(list(_OBJECTS.items()))
        _is(served, kept=False, backing=backing)
        assert served.stop() == 0
        served.start()
        _is(served, kept=True, backing=backing)
        served.kill()
        served.start()
        _is(served, kept=False, backing=backing)
        assert served.stop() == 0
        served.start()
        _is(served, kept=True, backing=backing)
    finally:
        with suppress(AssertionError):
            served.kill()


def _is(served: Served, *, kept: bool, backing: str) -> None:
    wait_for(lambda: index_of(served)["state"] == "ready", "the shared index is not ready")
    status = index_of(served)
    assert (status["was_kept"], status["backing"]) == (kept, backing), status
    with connect(served.server) as client:
        assert {name: bytes(client.get(name)) for name in _OBJECTS} == _OBJECTS
        entries = index_of(served)["entries"]
        assert entries >= len(_OBJECTS), index_of(served)
