"""`ShardUpkeep`: what the leader of a names shard other than the first adds to the service of its names.

    begin        before it serves: the shard has joined the present generation, and refuses what is retired
    requests     what the leader of shard 0 asks, which drives gc, epochs and checks

Rules kept here:
- It drives nothing: its shard joins, is walked and checked when it is asked to.
- A leader refuses what its log says: epochs are retired only when the log of each shard has them, and a walk begins
  only when the log has joined.  So another leader needs to read nothing from the coordinator.  The first one of a new
  shard has an empty log, and one that was made from an earlier state of the names an old one: so each reads what is
  joined and retired all the same, and records it in its log before it serves.
"""

from __future__ import annotations

from typing import Final

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.lake_state import LakeState
from engine.lake_gc.joined_generation import JoinedGeneration
from engine.lake_gc.names_in_process import NamesInProcess
from engine.lake_gc.names_requests import names_group
from engine.lake_upkeep.names_fsck import FsckParts, ShardFsck
from engine.lake_upkeep.names_fsck_requests import fsck_group
from engine.members.ports import Members, Stripes
from engine.requests.dispatch import Group
from engine.store.names_store import NamesStore
from lakefs.cluster.erasure import ErasureCode
from lakefs.ids import NamesShard
from lakefs.limits import GC_BATCH


class ShardUpkeep:
    """The upkeep of one names shard, in the process that leads it.  Used on the loop."""

    def __init__(
        self,
        shard: NamesShard,
        coordinator: Coordinator,
        members: Members,
        stripes: Stripes,
        names: NamesStore,
        joined: JoinedGeneration,
        *,
        upload_expiry_s: float = 0.0,
        batch: int = GC_BATCH,
    ) -> None:
        """`joined` is that of the names' service.  `upload_expiry_s`: age at which uploads are removed; 0: never."""
        self._state = LakeState(coordinator)
        protection = members.tables[0].protection
        code = ErasureCode(protection.data, protection.parity)
        self.fsck: Final = ShardFsck(shard, FsckParts(members, self._state, stripes, names.metadata, code))
        self._joined = joined
        self.names: Final = NamesInProcess(names, joined, expiry_s=upload_expiry_s, batch=batch)
        """The shard's names, where shard 0 is led by this very process."""

    @property
    def requests(self) -> Group:
        """Handlers of the requests of shard 0's leader: `NamesService(..., upkeep=...)`."""
        groups = names_group(self.names), fsck_group(self.fsck)
        return Group([part for group in groups for part in group.parts], ends=[end for g in groups for end in g.ends])

    async def begin(self) -> None:
        """Join what is joined, and refuse what is retired, durably; before names are served.

        Errors of `Coordinator`, and of the shard's log.
        """
        await self._joined.join(await self._state.generation())
        if tables := await self._state.epoch_tables():
            await self._joined.refuse_below(min(tables))
