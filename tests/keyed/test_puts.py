"""Puts of a client that finds keys in the keyed index: a request is sent for those alone that may be absent."""

from __future__ import annotations

import time

import pytest

from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.content.verify import Check
from lakefs.errors import InvalidArgument, SpaceNotFound
from lakefs.limits import CHUNK_BYTES, KIB
from lakefs.put.keyed import Outcome
from lakefs.wire import messages as m
from tests.e2e.served import Served
from tests.keyed.clients import contents
from tests.keyed.test_direct import ROOM, keys_of, value_of, warm
from tests.known.clients import requests


def test_present_keys_are_put_without_a_request_and_others_with_one(engine: Served, writer: Lake) -> None:
    keys = keys_of(6)
    values = [value_of(key, 0, 64 * KIB) for key in keys]
    with connect(engine.server, check=Check.CRC32C) as lake, lake.shared_memory(6 * 64 * KIB) as memory:
        space = lake.space("space")
        slots = [memory.slot(place * 64 * KIB, 64 * KIB) for place in range(6)]
        for slot, value in zip(slots, values, strict=True):
            slot.buffer[:] = value
        assert space.put_many(keys[:4], slots[:4]).outcomes == [Outcome.STORED] * 4
        sent = requests(lake)
        slots[0].buffer[:] = bytes(64 * KIB)
        assert space.put_many(keys[:4], slots[:4]) == space.put_many(keys[:4], values[:4], depths=[1] * 4)
        assert space.put_many(keys[:4], slots[:4]).outcomes == [Outcome.PRESENT] * 4
        assert sent == []
        done = space.put_many([keys[4], keys[0]], [slots[4], slots[0]])
        assert (done.outcomes, done.failures) == ([Outcome.STORED, Outcome.PRESENT], {})
        [put] = sent
        assert isinstance(put, m.KeyedPut)
        assert put.keys == [keys[4]], "only the key that is not known is put"
        done = space.put_many([keys[1], keys[5]], [values[1], values[5]])
        assert done.outcomes == [Outcome.PRESENT, Outcome.STORED]
        assert contents(space, keys, ROOM) == values, "the first value of each key stays"
        with pytest.raises(InvalidArgument):
            space.put_many(keys[:1], [b""])
        with pytest.raises(InvalidArgument):
            space.put_many(keys[:2], values[:1])
        space.remove(keys[:1])
        assert space.put_many(keys[:1], slots[:1]).outcomes == [Outcome.STORED], "a removed key is not present"
        writer.remove_space("space")
        with pytest.raises(SpaceNotFound):
            space.put_many(keys[:1], values[:1])


def test_lengths_are_known_without_a_request_and_another_length_is_replaced(engine: Served, writer: Lake) -> None:
    sizes = [100, 64 * KIB, CHUNK_BYTES + 5]
    keys = keys_of(len(sizes))
    values = [value_of(key, 0, size) for key, size in zip(keys, sizes, strict=True)]
    shorter = [value_of(key, 1, size - 1) for key, size in zip(keys, sizes, strict=True)]
    with connect(engine.server, check=Check.CRC32C) as lake:
        space = lake.space("space")
        space.put_many(keys, values)
        warm(space, keys)
        sent = requests(lake)
        assert space.match([*keys, b"absent"], [*sizes, 1]).present == [True] * 3 + [False]
        assert space.try_match(keys, [size - 1 for size in sizes]) == [False] * 3
        assert space.put_many(keys, values, resize=True).outcomes == [Outcome.PRESENT] * 3
        assert space.put_many(keys, shorter).outcomes == [Outcome.PRESENT] * 3
        assert sent == [], "also of a value of two parts, which lies nowhere that the client knows"
        assert space.put_many(keys, shorter, resize=True).outcomes == [Outcome.STORED] * 3
        assert space.match(keys, sizes).present == [False] * 3, "in the client's view at once"
        assert space.match(keys, [size - 1 for size in sizes]).present == [True] * 3
        buffers = [bytearray(size) for size in sizes]
        assert space.get_many_into(keys, buffers) == [size - 1 for size in sizes]
        assert [bytes(buffer[:-1]) for buffer in buffers] == shorter


def test_a_value_whose_time_is_over_is_put_anew_before_it_is_removed(engine: Served, writer: Lake) -> None:
    with connect(engine.server, check=Check.CRC32C) as lake:
        space, lasting = lake.space("space", ttl="1s"), lake.space("lasting")
        space.put_many([b"k", b"l"], [b"first", b"other"])
        lasting.put_many([b"k"], [b"first"])
        put_at = time.time()
        warm(space, [b"k", b"l"])
        warm(lasting, [b"k"])
        while time.time() < put_at + 1.05:
            time.sleep(0.05)
        sent = requests(lake)
        assert lasting.put_many([b"k"], [b"second"]).outcomes == [Outcome.PRESENT]
        assert sent == []
        assert space.put_many([b"k"], [b"second"]).outcomes == [Outcome.STORED]
        assert space.put_many([b"k"], [b"third"]).outcomes == [Outcome.PRESENT]
        assert all(isinstance(request, m.KeyedPut) for request in sent)
        assert contents(space, [b"k"], 9) == [b"second"]
