"""Names that are read together are as of one moment, answered by the client itself or by an engine or a lake."""

from __future__ import annotations

import threading

from lakefs.client.blocking.lake import Lake
from tests.e2e.served import Served
from tests.known.clients import learned, reader
from tests.known.history import BUCKET
from tests.served_devices import DEVICES

PAIRS = 300 if DEVICES else 1500
"""Reads in each order: of a lake each is a request."""


def test_get_many_is_one_moment(engine: Served, writer: Lake, kind: str) -> None:
    """A writer counts up, first one name, then the other: at no moment is the other ahead."""
    names = [f"{BUCKET}/first", f"{BUCKET}/second"]
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            for name in names:
                writer.put(name, b"%d" % number)

    for name in names:
        writer.put(name, b"0")
    with reader(kind, engine.server) as client:
        if not DEVICES:
            learned(client, *names)
        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(PAIRS):
                first, second = map(int, client.get_many(names))
                assert first - second in (0, 1)
                second, first = map(int, client.get_many(names[::-1]))
                assert first - second in (0, 1)
        finally:
            stop.set()
            thread.join()
