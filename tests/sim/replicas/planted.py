"""Rules of names on a log weakened on purpose, to see that histories notice: `python -m tests.sim.replicas.planted`.

Each is said by the head of the module that it changes.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final
from unittest import mock

import structlog
import trio

from engine.coordinator.coordinator import HasRevision, IsAbsent, Operation
from engine.coordinator.held_lease import HeldLease
from engine.group_log import leader_log, replica
from engine.group_log.follower import Follower
from engine.group_log.leader_log import LeaderLog
from engine.group_log.trimming import Trimming, _Kept as TrimmedBy
from engine.lake import names_replica
from engine.metadata.group_log import ClosedGroup, PayloadBatch
from lakefs.ids import Revision, Sequence
from tests.sim.cluster.__main__ import say
from tests.sim.replicas.places import DriftingClock
from tests.sim.replicas.scenes import ReplicaScene
from tests.sim.replicas.world import ReplicasWorld

Plant = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Weakening:
    """A rule that is weakened, and the number of seeds within which that must be noticed."""

    what: str
    plant: Plant
    first: int = 0
    """The seed that is tried first: it noticed it when this was written."""
    seeds: int = 60
    scene: str = ""
    """The scene whose seeds are run; without it, whole histories."""

    def in_scene(self, scene: str) -> Weakening:
        """Return it as it is looked for in a scene."""
        return replace(self, scene=scene, seeds=5)

    def world(self, seed: int) -> ReplicasWorld:
        """Return the world of a seed."""
        return ReplicaScene(self.scene, seed) if self.scene else ReplicasWorld(seed)


def seeds_to_notice(weakened: Weakening) -> tuple[int, str] | None:
    """Return the number of seeds until one failed, `first` before the others, and the failure; None if none did."""
    order = [weakened.first, *(seed for seed in range(weakened.seeds) if seed != weakened.first)]
    with weakened.plant():
        for count, seed in enumerate(order, 1):
            try:
                weakened.world(seed).run()
            except Exception as error:  # noqa: BLE001 - a weaker rule may break anything
                return count, f"seed {seed}: {type(error).__name__}: {error}"
    return None


def _instead(owner: object, name: str, instead: object) -> AbstractContextManager[Any]:
    return mock.patch.object(owner, name, instead)


# --- the leader's log --------------------------------------------------------------------------------


def reads_without_the_lease() -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(_instead(LeaderLog, "check", lambda self: None))
    stack.enter_context(_instead(replica, "_end_with_lease", _never))
    return stack


async def _never(lease: HeldLease, log: LeaderLog) -> None:
    await trio.sleep_forever()


def _answered_before_the_log_has_it() -> AbstractContextManager[Any]:
    original = LeaderLog._put

    async def put(self: LeaderLog, key: bytes, value: bytes) -> None:
        if self._lease.left_s() > 4.5:
            await original(self, key, value)

    return _instead(LeaderLog, "_put", put)


def _journal_before_the_log() -> AbstractContextManager[Any]:
    original = LeaderLog.append

    async def append(self: LeaderLog, group: ClosedGroup | None, payload: PayloadBatch | None) -> None:
        await self._journal.append(group, payload)
        journal, self._journal = self._journal, _Kept(self._journal.kept)  # type: ignore[assignment]
        try:
            await original(self, group, payload)
        finally:
            self._journal = journal

    return _instead(LeaderLog, "append", append)


class _Kept:
    def __init__(self, kept: Sequence) -> None:
        self.kept = kept

    async def append(self, group: ClosedGroup | None, payload: PayloadBatch | None) -> None:
        """Do nothing: the journal has it."""


def _append_does_not_compare_the_leader() -> AbstractContextManager[Any]:
    return _instead(leader_log, "HasRevision", lambda key, revision: IsAbsent(b"nothing"))


# --- leases ------------------------------------------------------------------------------------------


def _lease_counts_from_the_receipt() -> AbstractContextManager[Any]:
    async def is_kept(self: HeldLease) -> bool:
        kept = await self._coordinator.keep_alive(self.id)
        if kept:
            self._until = self._clock.monotonic() + self.ttl_s
        return kept

    return _instead(HeldLease, "_is_kept", is_kept)


def _no_lease_prolongs_it() -> AbstractContextManager[Any]:
    async def is_kept(self: HeldLease) -> bool:
        sent = self._clock.monotonic()
        await self._coordinator.keep_alive(self.id)
        self._until = sent + self.ttl_s
        return True

    return _instead(HeldLease, "_is_kept", is_kept)


def _clock_stands_while_suspended() -> AbstractContextManager[Any]:
    return _instead(DriftingClock, "stands_with_process", True)


# --- taking over -------------------------------------------------------------------------------------


def _new_leader_does_not_read_to_the_end() -> AbstractContextManager[Any]:
    async def finish(self: Follower, term: Revision) -> None:
        await self._metadata.sync()

    return _instead(Follower, "finish", finish)


def _leftover_parts_stay() -> AbstractContextManager[Any]:
    async def finish(self: Follower, term: Revision) -> None:
        await self.catch_up()
        await self._metadata.sync()

    return _instead(Follower, "finish", finish)


def _part_is_a_group() -> AbstractContextManager[Any]:
    original = Follower.finish

    async def finish(self: Follower, term: Revision) -> None:
        await self.catch_up()
        if self._assembly.left_over:
            self._assembly.next_sequence = Sequence(self._assembly.next_sequence + 1)
            self._assembly.read_anew()
        await original(self, term)

    return _instead(Follower, "finish", finish)


def _old_replica_leads() -> AbstractContextManager[Any]:
    return _instead(Follower, "_refuse_behind", lambda self, trimmed: None)


# --- trimming and beginning anew ---------------------------------------------------------------------


def trimmed_behind_one() -> AbstractContextManager[Any]:
    async def kept(self: Trimming, own_kept: Sequence) -> list[TrimmedBy]:
        return [TrimmedBy(own_kept, b"", Revision(0))]

    return _instead(Trimming, "_kept", kept)


def _trimmed_unsaid() -> AbstractContextManager[Any]:
    original = Trimming._remove

    async def remove(self: Trimming, removed: list[Operation], upto: Sequence, counted: list[HasRevision]) -> None:
        await original(self, removed, Sequence(0) if upto < 20 else upto, counted)
        self._tail.trim(upto)

    return _instead(Trimming, "_remove", remove)


def _hold_is_kept() -> AbstractContextManager[Any]:
    return _instead(names_replica, "leading", lambda metadata, place, caught_up: replica.leading(metadata, place))


def _lost_replicas_count() -> AbstractContextManager[Any]:
    return _instead(names_replica, "decode", lambda kind, value: _Elsewhere())


class _Elsewhere:
    machine = "another"
    is_removed = False


WEAKENED: Final = (
    Weakening("reads without the lease", reads_without_the_lease, first=3),
    Weakening("answers before the log has the group", _answered_before_the_log_has_it, first=1),
    Weakening("the journal has a group before the log", _journal_before_the_log),
    Weakening("the clock stands while the process does", _clock_stands_while_suspended, first=257),
    Weakening("a new leader does not read to the end", _new_leader_does_not_read_to_the_end, first=1),
    Weakening("parts without their group stay", _leftover_parts_stay, first=13),
    Weakening("a part is taken for a group", _part_is_a_group, first=13),
    Weakening("a replica that is too old leads", _old_replica_leads),
    Weakening("groups are trimmed that only the leader has", trimmed_behind_one, first=28),
    Weakening("it is not said up to where the log was trimmed", _trimmed_unsaid, first=3),
    Weakening("the log is held as long as a new replica follows", _hold_is_kept),
    Weakening("a replica that was lost counts for ever", _lost_replicas_count),
    Weakening("an append does not compare the leader", _append_does_not_compare_the_leader).in_scene(
        "an append is late"
    ),
    Weakening("a lease is counted from the receipt of its answer", _lease_counts_from_the_receipt).in_scene(
        "an answer to a keep-alive is late"
    ),
    Weakening('the answer "no lease" prolongs a lease', _no_lease_prolongs_it).in_scene("a clock stands"),
)


def main() -> int:
    """Try every weakening; return 0 when each was noticed, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.replicas.planted")
    parser.add_argument("words", nargs="*", help="only those whose name contains one of these")
    asked = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    missed = 0
    for weakened in WEAKENED:
        if asked.words and not any(word in weakened.what for word in asked.words):
            continue
        noticed = seeds_to_notice(weakened)
        missed += noticed is None
        say(f"{weakened.what}: " + ("NOT NOTICED" if noticed is None else f"{noticed[0]} seeds, {noticed[1][:200]}"))
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
