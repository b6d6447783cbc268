"""The buckets of customers of a simulated lake: one; or several, so that every names shard has some.

A key of the promises is BUCKET/NAME, or a name in the one bucket of a lake with one names shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from lakefs.ids import NamesShard
from tests.sim.cluster.etcd_names import EtcdNames

BUCKET: Final = "bkt"
BUCKETS_A_SHARD: Final = 2


class Buckets(Protocol):
    """The buckets in which customers have their names."""

    are_many: bool
    """Customers list them, and upload, too."""

    def all(self) -> Sequence[str]:
        """Return those that are used now; "" for the one of a lake with one names shard."""
        ...

    def is_across(self, bucket: str, other: str) -> bool:
        """Return True if two buckets, which exist and stay, are in different names shards."""
        ...


class OneBucket:
    """The bucket of a lake with one names shard."""

    are_many = False

    def all(self) -> Sequence[str]:
        """See `Buckets`."""
        return ("",)

    def is_across(self, bucket: str, other: str) -> bool:
        """See `Buckets`."""
        return False


class ManyBuckets:
    """More buckets with each names shard: new ones are made where there are fewest."""

    are_many = True

    def __init__(self, names: EtcdNames) -> None:
        self._names = names

    def all(self) -> Sequence[str]:
        """See `Buckets`."""
        return [f"{BUCKET}{number}" for number in range(BUCKETS_A_SHARD * self._names.count)]

    def shard_of(self, bucket: str) -> NamesShard | None:
        """Return the shard of a bucket."""
        return self._names.shard_of(bucket)

    def is_across(self, bucket: str, other: str) -> bool:
        """See `Buckets`."""
        return None not in (found := {self.shard_of(bucket), self.shard_of(other)}) and len(found) > 1


def place_of(key: str) -> tuple[str, str]:
    """Return bucket and name of a key of the promises; those without a bucket, and folders, are in the usual one."""
    bucket, slash, name = key.rpartition("/")
    return (bucket, name) if slash and name else (BUCKET, key)


def path_of(key: str) -> str:
    """Return BUCKET/NAME of a key of the promises."""
    return "/".join(place_of(key))
