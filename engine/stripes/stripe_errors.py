"""Errors of stripes: they say which chunk, how many shards, and which members are away or full."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from engine.stripes.stripe_layout import is_stored, placed
from engine.stripes.stripe_shards import Stripe
from lakefs.cluster.table import Table
from lakefs.errors import (
    ChunkDamaged,
    ChunkNotFound,
    ClusterDegraded,
    CoordinatorLost,
    EngineUnreachable,
    LakeError,
    OperationalError,
    StoreFull,
)
from lakefs.ids import ChunkId, MemberId, id_text

_AWAY = EngineUnreachable("away")


def not_stored(
    table: Table, stripe: Stripe, failed: Mapping[MemberId, LakeError], is_up: Callable[[MemberId], bool]
) -> OperationalError:
    """Return the error for a chunk that does not count as stored: StoreFull if room alone is what it lacks."""
    homes, text = table.homes(stripe.chunk), id_text(stripe.chunk)
    row = dict.fromkeys((*homes, *table.substitutes(stripe.chunk)))
    reasons = {member: failed.get(member, _AWAY) for member in row if member in failed or not is_up(member)}
    full = {member for member, error in reasons.items() if isinstance(error, StoreFull)}

    def would_take(member: MemberId, _: int) -> bool:
        return member in full or member not in reasons

    missing = [shard for shard in stripe.shards if shard not in stripe.stored]
    if_room = stripe.stored | placed(table, stripe.chunk, stripe.stored, missing, would_take)
    have = f"{len(stripe.stored)} of {len(stripe.shards)} shards of chunk {text} found a place"
    if full and is_stored(if_room, stripe.data_shards, len(stripe.shards)):
        return StoreFull(f"{have}: {_named(full)} full; remove objects and run: lake gc, or add members", subject=text)
    ended = {member for member, error in reasons.items() if isinstance(error, CoordinatorLost)}
    others = [member for member in reasons if member not in full | ended]
    lacking = [f"{_named(others)} away"] * bool(others) + [f"{_named(full)} full"] * bool(full)
    lacking += [f"{_named(ended)} without a lease at the lake's coordinator"] * bool(ended)
    return ClusterDegraded(
        f"{have}, too few to outlive another loss: {', and '.join(lacking) or 'its row has no other place'}; "
        "see: lake status",
        subject=text,
    )


def not_read(chunk: ChunkId, found: int, needed: int, away: Iterable[MemberId], damaged_count: int) -> LakeError:
    """Return the error for a chunk that was found, but too few of its shards.

    `away`: members that could not be asked; ClusterDegraded, unless there are none and shards are damaged.
    """
    text, away = id_text(chunk), [*away]
    if damaged_count and not away:
        return damaged(chunk, f"{found} of the {needed} shards that it needs are whole")
    where = f": {_named(away)} away" if away else ""
    return ClusterDegraded(
        f"{found} shards of chunk {text} were found, and {needed} are needed{where}; see: lake status", subject=text
    )


def not_found(chunk: ChunkId, away: Iterable[MemberId], parity: int) -> LakeError:
    """Return the error for a chunk without any shard: ClusterDegraded if so many members are away that they may hide
    a stored chunk."""
    text, away = id_text(chunk), [*away]
    if len(away) <= parity:
        return ChunkNotFound(f"chunk {text} is not in the lake", subject=text)
    return ClusterDegraded(f"no shard of chunk {text} was found: {_named(away)} away; see: lake status", subject=text)


def damaged(chunk: ChunkId, why: str) -> ChunkDamaged:
    """Return the error for a chunk whose shards do not make it."""
    text = id_text(chunk)
    return ChunkDamaged(f"chunk {text} is damaged: {why}; other objects are served; see: lake fsck", subject=text)


def _named(members: Iterable[MemberId]) -> str:
    """Return members for people: `members 0a1b2c3d4e5f, ... are`."""
    names = [member.hex()[:12] for member in members]
    return f"member {names[0]} is" if len(names) == 1 else f"members {', '.join(names)} are"
