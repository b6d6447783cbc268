"""The role of a store: the store of one engine, a member of a lake, or its names; one is never taken for another.

A store has its role from its making on, in its superblock.  Whoever opens it says which role it wants.
"""

from __future__ import annotations

from engine.format.features import Feature
from engine.format.group_parts import FIRST_SHARD
from engine.superblock.superblock import NO_CLUSTER, SUPERBLOCK_PATH, Superblock
from lakefs.errors import StoreUnusable
from lakefs.ids import NamesShard


def refuse_other_role(
    superblock: Superblock, cluster_id: bytes, *, has_names: bool = False, names_shard: NamesShard = FIRST_SHARD
) -> None:
    """Raise StoreUnusable unless the store is a member of this lake, or with `has_names` holds its names of a shard.

    With NO_CLUSTER: unless it is the store of one engine.
    """
    features = superblock.incompat_features
    is_in_lake = bool(features & (Feature.CLUSTER | Feature.ERASURE_SHARDS))
    holds_names = bool(features & Feature.CLUSTER_NAMES)
    found = "holds the names" if holds_names else "is a member"
    refused = ""
    if is_in_lake and cluster_id == NO_CLUSTER:
        part = "names without content" if holds_names else "parts of chunks"
        refused = (
            f"the folder {found} of the lake {superblock.cluster_id.hex()}, and is no lake by itself: most of what it "
            f"holds are {part}; start the lake with all its folders"
        )
    elif not is_in_lake and cluster_id != NO_CLUSTER:
        refused = (
            "the folder is the store of one engine, and is not made a part of a lake; copy its objects over S3, or "
            "give an empty folder"
        )
    elif is_in_lake and superblock.cluster_id != cluster_id:
        refused = f"the folder {found} of another lake, {superblock.cluster_id.hex()}, not of {cluster_id.hex()}"
    elif holds_names != has_names:
        wanted = "the names" if has_names else "a member"
        refused = f"the folder {found} of the lake {superblock.cluster_id.hex()}, and is not opened as {wanted}"
    elif superblock.names_shard != names_shard:
        refused = (
            f"the folder holds the names of shard {superblock.names_shard} of the lake {superblock.cluster_id.hex()}, "
            f"not of shard {names_shard}: were folders moved?"
        )
    if refused:
        raise StoreUnusable(refused, subject=SUPERBLOCK_PATH)
