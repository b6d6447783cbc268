"""A process of a lake with etcd is listed while its lease lasts; its members take shards for half of that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio

from engine.coordinator.records import HeadRecord, decode, present_key
from engine.host.clock import BoottimeClock
from engine.host.shared_deadline import SharedDeadline
from engine.lake.machine import MachineRecord
from engine.lake.member_processes import MemberPlan
from engine.lake.plan import LakePlan
from engine.lake.presence import PRESENT_LEASE_S, present, with_deadline
from lakefs.cluster.protection import Protection
from lakefs.errors import ConfigError, EngineUnreachable
from lakefs.ids import LeaseId
from tests.e2e.served import environment
from tests.memory_coordinator import MemoryCoordinator, memory_coordinator
from tests.sim.world.clock import SimClock
from tests.unit.support.metadata_rig import run

HEAD = HeadRecord("machine", "host", 7, 1_000, True)
HALF = PRESENT_LEASE_S / 2


class CutOff(MemoryCoordinator):
    """A coordinator that cannot be asked for a while."""

    is_cut = False

    def __init__(self, deadline: SharedDeadline) -> None:
        super().__init__()
        self._deadline = deadline
        self.held_at_revoke: bool | None = None

    async def keep_alive(self, lease: LeaseId) -> bool:
        if self.is_cut:
            raise EngineUnreachable("cut off")
        return await super().keep_alive(lease)

    async def lease(self, ttl_s: int) -> LeaseId:
        if self.is_cut:
            raise EngineUnreachable("cut off")
        return await super().lease(ttl_s)

    async def revoke(self, lease: LeaseId) -> None:
        self.held_at_revoke = self._deadline.holds()
        await super().revoke(lease)


def listed(coordinator: MemoryCoordinator) -> list[HeadRecord]:
    return [decode(HeadRecord, entry.value) for key, entry in coordinator.entries.items() if key > present_key(b"")]


def test_members_take_shards_until_half_of_the_lease_has_passed_without_a_renewal() -> None:
    async def scenario() -> None:
        deadline = SharedDeadline(clock=SimClock())
        coordinator = CutOff(deadline)
        assert not deadline.holds(), "before the first lease they take none"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.end_leases)
            async with present(coordinator, HEAD, deadline, SimClock()):
                for _ in range(100):
                    await trio.sleep(1)
                    assert deadline.holds()
                assert listed(coordinator) == [HEAD]
                coordinator.is_cut = True
                await trio.sleep(HALF - PRESENT_LEASE_S / 4 - 1)
                assert deadline.holds()
                await trio.sleep(PRESENT_LEASE_S / 4 + 1)
                assert not deadline.holds()
                assert listed(coordinator) == [HEAD], "the lease itself lasts"
                await trio.sleep(HALF + 1)
                assert listed(coordinator) == [], "it disappears by itself"
                coordinator.is_cut = False
                await trio.sleep(3)
                assert deadline.holds()
                assert listed(coordinator) == [HEAD]
            assert listed(coordinator) == []
            assert coordinator.held_at_revoke is False, "members take nothing by then"
            nursery.cancel_scope.cancel()

    run(scenario)


def test_a_head_without_members_is_listed_too() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator:
            async with present(coordinator, HEAD, clock=SimClock()):
                await trio.sleep(1)
                assert listed(coordinator) == [HEAD]
            assert listed(coordinator) == []

    run(scenario)


def test_a_deadline_passes_for_other_processes_while_the_one_that_writes_it_stands() -> None:
    deadline = SharedDeadline()
    code = (
        "import sys, time; from engine.host.shared_deadline import SharedDeadline\n"
        "shared = SharedDeadline(int(sys.argv[1]))\n"
        "for line in sys.stdin: print(shared.holds(), flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(deadline.descriptor)],
        pass_fds=[deadline.descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as child:

        def asked() -> str:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("?\n")
            child.stdin.flush()
            return child.stdout.readline().strip()

        assert asked() == "False"
        now = BoottimeClock().monotonic()
        deadline.set(now + 3600)
        assert asked() == "True"
        deadline.set(now - 1)
        assert asked() == "False"
        deadline.set(now + 3600)
        deadline.end()
        assert asked() == "False"
        child.send_signal(signal.SIGTERM)


def test_members_inherit_the_deadline_before_the_socket_to_their_parent(tmp_path: Path) -> None:
    member = MemberPlan(tmp_path, tmp_path / "s", ["lake", "--parent"], descriptors=(9,))
    machine = MachineRecord(lake="00" * 16, machine="m")
    plan = LakePlan(machine, "", False, [member], Protection(1, 1), False, False, False)

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            leased, deadline = with_deadline(plan, stack)
            [told] = leased.members
            assert told.command == ["lake", "--deadline", str(deadline.descriptor), "--parent"]
            assert told.descriptors == (9, deadline.descriptor)
            assert not deadline.holds()

    trio.run(scenario)


def test_what_is_no_deadline_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12")
    with (tmp_path / "file").open() as file, pytest.raises(ConfigError, match="no deadline"):
        SharedDeadline(os.dup(file.fileno()))
