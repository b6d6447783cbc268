"""Bounds of the log of groups, with the arithmetic beside them."""

from __future__ import annotations

from typing import Final

from lakefs.limits import GIB, MIB

LEADER_LEASE_S: Final = 5
"""A leader's lease: names are served elsewhere at most 10 s after its machine is gone.  It is kept alive every 1.25 s,
so three answers may be lost; etcd has another leader after 1 to 3 s, and its leases run anew then."""
LEADER_MARGIN_S: Final = 1.0
"""Nothing is read or decided when the lease may have less left: clocks drift far less in 5 s."""
APPEND_PAUSE_S: Final = 0.05
"""Pause before an append is tried again that the coordinator could not do."""
KEEPING_BYTES_MAX: Final = 32 * MIB
"""Groups in the log that the leader's own journal has not yet, before appends wait for it: four of the largest."""
KEEPING_GROUPS_MAX: Final = 256
REPORT_EVERY_S: Final = 0.5
"""A replica says so often how far it has come, while it gets on."""
REPLICA_SIGN_S: Final = 10.0
"""A replica says anew that it is there, when it has nothing new to say."""
TRIM_EVERY_S: Final = 0.5
"""The leader looks so often for groups that two replicas have."""
KEPT_BY: Final = 2
"""Replicas that have a group before it is trimmed, if there are so many."""
TAIL_BYTES_MAX: Final = GIB
"""Beyond it the leader's own journal is enough, and replicas that are behind begin anew."""
COMPACT_EVERY_S: Final = 30.0
"""The coordinator forgets trimmed groups so often: 10,000 of 2 KiB in that time."""
ROOM_TRY_S: Final = 0.5
"""Pause before an append is tried again that the coordinator has no room for."""
ROOM_PAUSE_S: Final = 3.0
"""Time from trimming a full log to its being forgotten: those who follow have seen all by then."""
ROOM_PAUSE_S_MAX: Final = 60.0
"""The same when trimming and forgetting have not been enough, as when others fill the coordinator."""
HOLD_LEASE_S: Final = 30
"""Lease of a replica that begins anew: it may be busy with its disk for so long."""
CHECKPOINTS_OPEN_MAX: Final = 4
CHECKPOINT_PIECE_BYTES: Final = MIB
