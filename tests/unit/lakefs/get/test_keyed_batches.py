"""Loads of values are cut into requests: two of an engine, so that one is checked meanwhile, and fewer of a head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lakefs.content.verify import Check
from lakefs.get.keyed import _KeyedLoading
from lakefs.steps.steps import Send, Start, Wait
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import FEATURE_EACH, FEATURE_KEY_HOMES, FEATURE_LENT_MEMORY, KeyedLoad, KeyedLoaded
from lakefs.wire.offers import Offers


def sizes_of(features: int, count: int, check: Check = Check.CRC32C) -> list[int]:
    """Return the number of keys of each request of a load, none of which has a value."""
    access: Any = SimpleNamespace(offers=Offers(features, by_memory=True), check=check)
    pool: Any = None
    lent: Any = SimpleNamespace(number=1, fabric=None)
    keys = [b"%d" % index for index in range(count)]
    steps = _KeyedLoading(access, pool, 1, keys, [0] * count, [1] * count).run(lent)
    sizes, answer = list[int](), None
    while True:
        try:
            effect: Any = steps.send(answer)
        except StopIteration as end:
            lengths = end.value
            break
        if isinstance(effect, Start):
            assert isinstance(effect.effect, Send)
            request: Any = effect.effect.request
            assert isinstance(request, KeyedLoad)
            sizes.append(len(request.keys))
            answer = SimpleNamespace(keys=request.keys)
        else:
            assert isinstance(effect, Wait)
            ticket: Any = effect.ticket
            answer = Reply(KeyedLoaded([0] * len(ticket.keys), [], [], []))  # type: ignore[assignment]
    assert lengths == [0] * count
    return sizes


@pytest.mark.parametrize(
    ("count", "at_engine", "at_head"),
    [(4, [4], [4]), (16, [8, 8], [16]), (32, [16, 16], [32]), (40, [20, 20], [32, 8]), (128, [64, 64], [64, 64])],
)
def test_a_head_is_asked_once_for_as_many_keys_as_an_engine_is_asked_twice(
    count: int, at_engine: list[int], at_head: list[int]
) -> None:
    engine = FEATURE_EACH | FEATURE_LENT_MEMORY
    assert sizes_of(engine, count) == at_engine
    assert sizes_of(engine | FEATURE_KEY_HOMES, count) == at_head
    assert sizes_of(engine, count, Check.NONE) == [count]
