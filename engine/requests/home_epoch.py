"""The ring epoch by which a head takes a member for the home of keys, looked at by the member."""

from __future__ import annotations

from engine.requests.shards import check_epoch_number
from engine.store.store import Store


def check_home(store: Store, epoch: int) -> None:
    """Raise StaleEpoch if this member has a newer ring epoch: the keys may have another home.  0: none was said.

    The engine of a single store has no epoch, and looks at none.
    """
    check_epoch_number(epoch)
    if epoch and store.member is not None:
        store.member.shards.check_epoch(epoch)
