"""The coordinator on an etcd of three nodes, of which one dies or stops."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import pytest
import trio

from engine.coordinator.coordinator import Compare, Coordinator, HasRevision, IsAbsent, Outcome, Put
from engine.etcd.etcd_bounds import ETCD_CALL_S
from engine.etcd.etcd_coordinator import open_etcd_coordinator
from engine.etcd.etcd_link import EtcdAccess
from lakefs.ids import Revision
from tests.contract.coordinators import next_changes, put
from tests.etcd_rig import EtcdCluster, EtcdNode, running_etcd

WATCHED_AGAIN_S: Final = 6.0
"""ETCD_LOOK_S and ETCD_TRY_S, and as much again for a busy machine."""
_lakes: Final = itertools.count()


async def _until(holds: Callable[[], bool]) -> None:
    """Wait until something holds that a server, or another thread, makes true."""
    while not holds():  # noqa: ASYNC110 - nothing of this process knows when
        await trio.sleep(0.01)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with running_etcd(tmp_path_factory.mktemp("three") / "etcd", 3) as cluster:
        yield cluster


@contextmanager
def killed(node: EtcdNode, cluster: EtcdCluster) -> Iterator[None]:
    node.kill()
    try:
        yield
    finally:
        node.start(cluster.names)


@contextmanager
def stopped(node: EtcdNode, _: EtcdCluster) -> Iterator[None]:
    node.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        node.signal(signal.SIGCONT)


async def _puts(coordinator: Coordinator, key: bytes) -> None:
    """Put a key four times a second, until cancelled."""
    for number in itertools.count():
        await put(coordinator, key, b"%d" % number)
        await trio.sleep(0.25)


@pytest.mark.parametrize("is_busy", [True, False], ids=["right behind a change", "behind a silence"])
def test_a_watch_at_a_node_that_stands_still_goes_on_at_another_though_nothing_else_is_asked(
    three: EtcdCluster, is_busy: bool
) -> None:
    """gRPC itself finds out after 9 s; it took 66 s while its pings waited a minute for their answers."""
    leader = three.leader()
    away = next(node for node in three.nodes if node is not leader)
    urls = (away.url, *(node.url for node in three.nodes if node is not away))
    lake = f"watched-{next(_lakes)}"

    async def scenario() -> None:
        async with (
            open_etcd_coordinator(EtcdAccess(urls, first=0), lake) as watching,
            open_etcd_coordinator(EtcdAccess((leader.url,)), lake) as changing,
            watching.watch(b"a", b"b", Revision(1)) as watch,
            trio.open_nursery() as nursery,
        ):
            await put(changing, b"a")
            await next_changes(watch)
            await trio.sleep(0.0 if is_busy else 2.0)
            with stopped(away, three):
                nursery.start_soon(_puts, changing, b"a")
                with trio.fail_after(WATCHED_AGAIN_S):
                    seen = await next_changes(watch)
                    while seen.changes[0].entry is None or seen.changes[0].entry.value != b"2":
                        seen = await next_changes(watch)
            nursery.cancel_scope.cancel()

    trio.run(scenario)


async def _count(coordinator: Coordinator, gaps: list[float], until: Callable[[], bool]) -> int:
    """Raise the number under a key by compare and swap until then; note the time that each step took."""
    number, revision = 0, None
    while not until():
        begun = trio.current_time()
        compare: Compare = IsAbsent(b"count") if revision is None else HasRevision(b"count", revision)
        done = await coordinator.transact([compare], [Put(b"count", b"%d" % (number + 1))])
        assert done.outcome is Outcome.DONE, "nobody else changes it, and each step is done once"
        number, revision = number + 1, done.revision
        gaps.append(trio.current_time() - begun)
    return number


@pytest.mark.parametrize("which", ["leader", "other"])
@pytest.mark.parametrize("fault", [killed, stopped], ids=lambda fault: fault.__name__)
def test_a_number_is_raised_once_a_step_and_a_watch_sees_each_while_a_node_is_away(
    three: EtcdCluster, fault: Callable[[EtcdNode, EtcdCluster], AbstractContextManager[None]], which: str
) -> None:
    """The node in use goes away: the leader, or one that follows it."""
    leader = three.leader()
    away = leader if which == "leader" else next(node for node in three.nodes if node is not leader)
    urls = (away.url, *(node.url for node in three.nodes if node is not away))

    async def scenario() -> None:
        gaps: list[float] = []
        counted: list[int] = []
        seen: list[int] = []
        is_over = False
        async with open_etcd_coordinator(EtcdAccess(urls, first=0), f"count-{next(_lakes)}") as coordinator:
            begun = (await coordinator.get(b"count")).revision
            lease = await coordinator.lease(10)

            async def count() -> None:
                counted.append(await _count(coordinator, gaps, lambda: is_over))
                await put(coordinator, b"count", b"0")

            async def follow() -> None:
                async with coordinator.watch(b"count", b"d", Revision(begun + 1)) as watch:
                    while seen[-1:] != [0]:
                        event = await next_changes(watch)
                        seen.extend(int(change.entry.value) for change in event.changes if change.entry)

            with trio.fail_after(40):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(count)
                    nursery.start_soon(follow)
                    await trio.sleep(0.2)
                    with fault(away, three):
                        before = len(gaps)
                        await _until(lambda: len(gaps) >= before + 5)
                        assert await coordinator.keep_alive(lease)
                    await trio.sleep(0.2)
                    is_over = True
            assert seen == [*range(1, counted[0] + 1), 0]
            assert max(gaps) < ETCD_CALL_S

    trio.run(scenario)
