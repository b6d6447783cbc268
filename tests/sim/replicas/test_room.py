"""Names take little room at an etcd, however long they are changed: groups are trimmed, and forgotten."""

from __future__ import annotations

import pytest

from lakefs.limits import MIB
from tests.sim.replicas.room import AWAY_SHARE, NAME_BYTES, NAMES_PER_S, room_of

pytestmark = pytest.mark.slow


def test_what_is_trimmed_is_forgotten_and_replicas_that_are_away_keep_only_what_they_lack() -> None:
    seconds = 480
    room = room_of(seconds)
    a_second = NAMES_PER_S * NAME_BYTES
    assert 10 * a_second < room.before_bytes < 100 * a_second, "a minute or so of groups, not all"
    assert room.file_bytes < room.before_bytes + (seconds // AWAY_SHARE + 10) * a_second
    assert room.left_bytes < MIB
