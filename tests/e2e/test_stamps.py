"""Stamps of a real engine: its clients repeat answers for exactly as long as it serves them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lakefs.client.blocking.engine import connect_blocking
from lakefs.client.connect import connect
from lakefs.host.descriptors import close_all
from lakefs.stamps.stamps import StampReader
from lakefs.wire.messages import FEATURE_STAMPS, NameResults, OpenStamps, StatNames
from tests.e2e.served import Served, serving
from tests.lengths import repeated

pytestmark = pytest.mark.slow


def _reader(address: str) -> StampReader:
    with connect_blocking(address) as client:
        assert client.hello.features & FEATURE_STAMPS
        reply = client.finish(client.start(OpenStamps()))
        reader = StampReader(reply.descriptors[0])
        close_all(reply.descriptors)
    return reader


def _stamps(address: str, key: str) -> bytes:
    with connect_blocking(address) as client:
        reply = client.finish(client.start(StatNames([("bkt", key)], stamps=True)))
    assert isinstance(reply.message, NameResults)
    [result] = reply.message.results
    assert result.stat is not None
    return result.stamps


@pytest.mark.parametrize("end", [Served.kill, Served.stop, Served.interrupt])
def test_no_answer_of_an_engine_stands_when_it_has_ended_and_the_next_has_stamps_of_its_own(
    folder: Path, end: Callable[[Served], int]
) -> None:
    with serving(folder) as engine:
        engine.good("put", "-", "bkt/a", stdin=b"content")
        first, answer = _reader(engine.server), _stamps(engine.server, "a")
        assert first.stand(answer)
        end(engine)
        assert (first.is_live, first.stand(answer)) == (False, False)
        engine.start()
        second = _reader(engine.server)
        assert second.stand(_stamps(engine.server, "a"))
        assert not first.stand(answer)


def test_no_reader_sees_an_old_answer_stand_after_a_put_was_answered(folder: Path) -> None:
    with serving(folder) as engine, connect(engine.server) as writer:
        writer.put("bkt/a", b"0", create_bucket=True)
        reader = _reader(engine.server)
        ended = threading.Event()
        kept = [_stamps(engine.server, "a")]
        stood = 0

        def look() -> None:
            nonlocal stood
            while not ended.is_set():
                stood += reader.stand(kept[-1])

        looking = threading.Thread(target=look)
        looking.start()
        try:
            for number in range(repeated(120, 300)):
                writer.put("bkt/a", b"%d" % number)
                assert not any(map(reader.stand, kept))
                kept.append(_stamps(engine.server, "a"))
                writer.put(f"bkt/{number}", b"another name")
        finally:
            ended.set()
            looking.join()
        assert stood > 0
