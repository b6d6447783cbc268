"""`LakeUpkeep`: what keeps a lake whole, in the process of its names.

    run          gc every `gc_interval_s`; and, while this process is the one that walks:
                 the walker (dirty partitions at once, all of them once a week), and the members' states and tables
    requests     handlers of RunGc, RunFsck and RunScrub for the service of the names
    status       the lake's part of the names' status

Rules kept here:
- One process walks and changes states and tables: the one with the walker's lease.  Silence of members counts from
  then on: what happened before, this process has not seen.
- Names refuse answers of a ring epoch before it is retired; what is retired when names start is refused from then on:
  in a lake with etcd only who leads the names retires, and the next one reads what is retired before it serves.  Other
  names shards have it in their logs (`engine.lake_gc.names_port`).
- Errors of the coordinator and of members are logged, and all is tried again; nothing but a bug ends `run`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import structlog
import trio

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.lake_state import LakeState
from engine.format.group_parts import FIRST_SHARD
from engine.host.tasks import plain_errors, run_all
from engine.lake_gc.joined_generation import JoinedGeneration
from engine.lake_gc.lake_gc import LakeGc
from engine.lake_gc.names_in_process import NamesInProcess
from engine.lake_upkeep.lake_fsck import LakeFsck
from engine.lake_upkeep.lake_scrub import LakeScrub
from engine.lake_upkeep.lake_status import LakeStatus
from engine.lake_upkeep.names_replicas import NamesReplicas
from engine.lake_upkeep.other_shards import NO_OTHER_SHARDS, OtherShards
from engine.lake_upkeep.upkeep_requests import LakeUpkeepRequests
from engine.members.ports import Members, Stripes
from engine.members.read_memory import Take, take_anew
from engine.requests.bind import BindGate
from engine.requests.dispatch import Group
from engine.store.names_store import NamesStore
from engine.walker.membership import Membership, MembershipSettings
from engine.walker.walker import Walker
from engine.walker.walker_pace import Pace
from engine.walker.walker_pass import PassSettings, WalkerPass
from lakefs.cluster.erasure import ErasureCode
from lakefs.errors import LakeError
from lakefs.ids import NamesShard, RingEpoch, new_id16
from lakefs.limits import GC_BATCH
from lakefs.ports import Offload
from lakefs.wire.engine_port import nothing

GC_INTERVAL_S: Final = 600.0
"""Time between cycles, as of an engine's own gc."""
LOOK_INTERVAL_S: Final = 10.0
"""Members are asked for a sign of life that often: 60 times before one that is silent is out."""
STEP_PAUSE_S: Final = 0.5
"""Least time between two steps of tables."""
WALK_SHARE: Final = 0.5
"""Share of the time in which the walker works: a lake that heals serves its clients with what is left."""
OnChange = Callable[[Callable[[], None]], Callable[[], None]]
"""Calls the given function after each change, until the returned one is called."""
_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True)
class UpkeepSettings:
    """Times in seconds.  `upload_expiry_s`: age at which unfinished uploads are removed; 0: never.

    `name` is the lake's, for status.  The walker moves at most `walk_rate_bytes_per_s` (0: no limit), and works during
    at most `walk_share` of the time.
    """

    name: str = ""
    gc_interval_s: float = GC_INTERVAL_S
    look_interval_s: float = LOOK_INTERVAL_S
    upload_expiry_s: float = 0.0
    walk_rate_bytes_per_s: int = 0
    walk_share: float = WALK_SHARE
    gc_batch: int = GC_BATCH
    walks: PassSettings = field(default_factory=PassSettings)
    membership: MembershipSettings = field(default_factory=MembershipSettings)


class LakeUpkeep:
    """The upkeep of one lake.  Used on the loop of the names' process."""

    def __init__(
        self,
        coordinator: Coordinator,
        members: Members,
        stripes: Stripes,
        names: NamesStore,
        gate: BindGate,
        joined: JoinedGeneration,
        offload: Offload,
        settings: UpkeepSettings | None = None,
        *,
        names_state: Callable[[], dict[str, Any]] = dict,
        etcd_state: Callable[[], dict[str, Any]] | None = None,
        on_change: OnChange | None = None,
        take: Take = take_anew,
        others: OtherShards = NO_OTHER_SHARDS,
    ) -> None:
        """`gate` and `joined` are those of the names' service.  `take`: memory for shards that the walker reads.

        `names`: those of names shard 0; `others` has the ones of all further shards.

        `names_state`: where names lie, for status (`LocalNames.state`).  `etcd_state`: the state of the lake's etcd,
        with which names have replicas; None: it has none.  `on_change`: calls a function after each change of the
        lake's records (`LakeView.on_change`); without, they are looked at every `look_interval_s`.
        """
        settings = settings or UpkeepSettings()
        table = members.tables[0]
        clock = names.clock
        self._coordinator = coordinator
        self._members = members
        self._gate = gate
        self._others = others
        self._settings = settings
        self._on_change = on_change
        self._changed = trio.Event()
        gate.retire_below(members.tables[-1].ring_epoch)
        self.state: Final = LakeState(coordinator)
        own = NamesInProcess(names, joined, expiry_s=settings.upload_expiry_s, batch=settings.gc_batch)
        self.gc: Final = LakeGc(coordinator, members, stripes, own, clock, others.names)
        pace = Pace(clock, rate_bytes_per_s=settings.walk_rate_bytes_per_s, share=settings.walk_share)
        code = ErasureCode(table.protection.data, table.protection.parity)
        self.walker: Final = Walker(members, self.state, code, offload, pace, take=take)
        self.walks: Final = WalkerPass(self.walker, members, self.state, clock, new_id16(), settings.walks)
        self.membership: Final = Membership(
            members, self.state, self.walker, clock, settings.membership, retiring=self._retiring
        )
        self.scrub: Final = LakeScrub(members, self.state)
        self.fsck: Final = LakeFsck(members, self.state, stripes, names, code, self.walker, others)
        self.replicas: Final = None if etcd_state is None else NamesReplicas(coordinator, names.metadata)
        places = names_state, etcd_state, self.replicas
        parts = members, self.state, self.walks, self.gc, self.scrub, self.membership, clock
        self._status = LakeStatus(*parts, settings.name, *places)

    @property
    def requests(self) -> Group:
        """Handlers of the requests for upkeep: `NamesService(..., upkeep=...)`."""
        parts = self.state, self._members, self.gc, self.fsck, self.scrub, self.membership, self.replicas
        return Group([LakeUpkeepRequests(*parts)])

    async def status(self) -> dict[str, Any]:
        """Return the lake's part of the names' status, JSON-able: `NamesService(..., more_status=...)`."""
        return await self._status.read()

    async def begin(self) -> None:
        """Read which ring epochs are retired, before names are served: this process may have read less than others.

        From then on this one retires them, where its coordinator is that of a term.  Errors of the coordinator.
        """
        tables = await self.state.epoch_tables()
        if tables:
            self._gate.retire_below(min(tables))

    async def run(self) -> None:
        """Keep the lake whole, until cancelled."""
        with plain_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.gc.run_periodically, self._settings.gc_interval_s)
                if self.replicas is not None:
                    nursery.start_soon(self.replicas.run)
                nursery.start_soon(partial(self.walks.run, self._coordinator, beside=self._keep_members))

    async def _keep_members(self) -> None:
        """Look at the members, and make the tables that follow, while this process walks."""
        self.membership.begin()
        ended = self._on_change(self._note_change) if self._on_change is not None else nothing
        try:
            while True:
                next_look = trio.current_time() + self._settings.look_interval_s
                await self._tried(self.membership.look)
                while trio.current_time() < next_look:
                    self._changed = trio.Event()
                    await self._tried(self._follow_members)
                    await trio.sleep(STEP_PAUSE_S)
                    # the walker's progress changes no record, and neither does time
                    is_moving = len(self._members.tables) > 1 or self.membership.is_waiting
                    with trio.move_on_at(trio.current_time() + STEP_PAUSE_S if is_moving else next_look):
                        await self._changed.wait()
        finally:
            ended()

    async def _retiring(self, epoch: RingEpoch, shards: int) -> None:
        """Let the names of all shards refuse answers of older epochs; returns when they do."""
        self._gate.retire_below(epoch)
        others = [self._others.names(NamesShard(shard)) for shard in range(FIRST_SHARD + 1, shards)]
        await run_all(lambda names: names.refuse_below(epoch), others)

    def _note_change(self) -> None:
        self._changed.set()

    async def _follow_members(self) -> None:
        await self.membership.advance()
        await self.membership.retire()

    async def _tried(self, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except LakeError as error:
            _log.warning("the members of the lake were not looked at", reason=error.message)
