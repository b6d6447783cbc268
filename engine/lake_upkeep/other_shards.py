"""The other names shards of a lake, as the leader of shard 0 asks them: by requests, or in its own process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from engine.lake_gc.names_by_requests import names_by_requests
from engine.lake_gc.names_port import OtherNames, no_other_names
from engine.lake_gc.shard_links import ConnectShard
from engine.lake_upkeep.names_fsck import NamesChecked
from engine.lake_upkeep.names_fsck_requests import check_by_requests
from engine.lake_upkeep.shard_upkeep import ShardUpkeep
from lakefs.errors import PreconditionFailed
from lakefs.ids import NamesShard

CheckShard = Callable[[NamesShard, bool], Awaitable[NamesChecked]]
"""Checks a shard, whole if the flag is set; LakeErrors if it cannot be asked."""


@dataclass(frozen=True)
class OtherShards:
    """The names of all shards but the first."""

    names: OtherNames
    check: CheckShard


def shards_by_requests(connect: ConnectShard) -> OtherShards:
    """Return what asks the leaders of other shards; `connect` returns what connects to one."""
    return OtherShards(names_by_requests(connect), partial(check_by_requests, connect))


def shards_in_process(upkeeps: Mapping[NamesShard, ShardUpkeep]) -> OtherShards:
    """Return the shards that this process leads, too: all of the lake."""

    async def check(shard: NamesShard, full: bool) -> NamesChecked:
        return await upkeeps[shard].fsck.run(full=full)

    return OtherShards(lambda shard: upkeeps[shard].names, check)


async def _no_check(shard: NamesShard, full: bool) -> NamesChecked:
    raise PreconditionFailed(f"the lake has several names shards, and this process cannot ask shard {shard}")


NO_OTHER_SHARDS: Final = OtherShards(no_other_names, _no_check)
