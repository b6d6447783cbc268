"""Members whose folders lie on one device: they are lost together, so they are one domain."""

from __future__ import annotations

from collections import Counter

import pytest

from lakefs.errors import PreconditionFailed
from tests.unit.engine.cluster.test_walker_pass import Running, running, small_rings
from tests.unit.engine.cluster.walker_rig import PROTECTION, member_id

__all__ = ["small_rings"]


def test_members_of_one_device_are_one_domain_of_the_next_table_and_none_is_drained_into_it() -> None:
    async def scenario(one: Running) -> None:
        for number in range(6):
            await one.register(number, f"disk {number // 2}", "host")
        await one.turn()
        table = one.made.tables[0]
        assert [each.device for each in table.members] == [member_id(number // 2 * 2).hex() for number in range(6)]
        for row in table.rows:
            devices = Counter(table.members[index].device for index in row[: PROTECTION.width])
            assert max(devices.values()) <= PROTECTION.parity
        with pytest.raises(PreconditionFailed, match="5 members on 3 devices have places, and 3 are needed"):
            for number in (0, 1):  # all folders of one device
                await one.membership.drain(member_id(number))

    running(scenario)
