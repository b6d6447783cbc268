"""Events of a simulated lake: drawn one after the other, and each also ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from tests.sim.cluster.etcd_names import EtcdNames
from tests.sim.cluster.forgetting import Forgetting
from tests.sim.cluster.lake import SimLake
from tests.sim.cluster.member_faults import MemberFaults
from tests.sim.cluster.names_faults import HeadFaults, NamesFaults
from tests.sim.cluster.names_place import NamesPlace
from tests.sim.cluster.operating import Operator
from tests.sim.cluster.putting_back import PuttingBack
from tests.sim.cluster.replica_faults import ReplicaFaults
from tests.sim.judges.history import SimFailure

Event = Callable[[], Awaitable[None]]
EVENT_S = 400.0
"""Every event has ended by then: what was stopped or broken works again."""


class Faults:
    """The events of one history."""

    def __init__(self, lake: SimLake) -> None:
        self._lake = lake
        members, operator = MemberFaults(lake), Operator(lake)
        forgetting = Forgetting(lake, operator)
        self._kinds: list[tuple[int, Event]] = [
            (6, members.crash_member),
            (6, members.cut_off),
            (4, members.trouble_way),
            (3, members.slow_member),
            (3, members.fill_member),
            (3, members.lie),
            (2, members.fail_disk),
            (3, forgetting.forget),
            (3, PuttingBack(lake, operator).put_back),
            *_of_names(lake),
            (2, HeadFaults(lake).kill_head),
            (3, operator.lose_device),
            (3, operator.rot),
            (2, operator.drain),
            (2, operator.add_member),
            (3, operator.collect),
            (2, operator.check),
        ]

    async def run(self, count: int) -> None:
        """Let that many events happen, and wait until each has ended."""
        rng = self._lake.rng
        kinds, weights = [kind for _, kind in self._kinds], [weight for weight, _ in self._kinds]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_if_healed)
            nursery.start_soon(self._lake.names.watch)
            async with trio.open_nursery() as events:
                for _ in range(count):
                    await trio.sleep(rng.choice((0.2, 2.0, 6.0, 15.0)))
                    events.start_soon(self._bounded, rng.choices(kinds, weights)[0])
            nursery.cancel_scope.cancel()

    async def _bounded(self, kind: Event) -> None:
        """Run an event, which has to end."""
        with trio.move_on_after(EVENT_S) as bound:
            await kind()
        if bound.cancelled_caught:
            raise SimFailure(f"{getattr(kind, '__name__', kind)} has not ended in {EVENT_S:g} s")

    async def _look_if_healed(self) -> None:
        """Note when the lake says that it is healed."""
        lake = self._lake
        while True:
            await trio.sleep(2.0)
            if lake.health.hurt or lake.lost or not lake.health.was_hurt:
                continue
            if await lake.is_healed():
                lake.log("the lake is healed")
                lake.met["healed"] += 1
                lake.health.healed()


def _of_names(lake: SimLake) -> Sequence[tuple[int, Event]]:
    if isinstance(lake.names, NamesPlace):
        names = NamesFaults(lake, lake.names)
        return [(3, names.crash_names), (4, names.break_names_device), (2, names.trouble_names)]
    assert isinstance(lake.names, EtcdNames)
    return ReplicaFaults(lake, lake.names).kinds
