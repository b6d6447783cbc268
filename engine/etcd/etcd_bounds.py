"""Bounds of the client of etcd, with the arithmetic beside them."""

from __future__ import annotations

from typing import Final

from lakefs.limits import MIB

ETCD_TRY_S: Final = 1.5
"""Time that one endpoint of etcd has for an answer before the next one is asked.  A follower that is asked while a
leader is chosen may send the request to the old one, and answer nothing; so the next two have no longer either."""
ETCD_QUICK_TRIES: Final = 3
"""Tries that take so long; each later one has twice the time of the one before it, for what takes long itself."""
ETCD_CALL_S: Final = 10.0
"""Time for all tries of a call: etcd has another leader after 1 to 3 s, and the first tries take 1.5, 1.5, 1.5, 3 s."""
ETCD_REFUSED_S: Final = 3.0
"""The same while nobody listens at any endpoint: an etcd that restarts listens again after 1 to 2 s."""
ETCD_LATE_S: Final = 0.5
"""While a call lasts longer, each endpoint is asked if there is another leader, twice in that time.  So an etcd that is
only slow has some reads of its memory more, and no change twice."""
ETCD_LOOK_S: Final = 1.0
"""An endpoint with a watch that was not heard for so long is asked for a sign of life, and has ETCD_TRY_S for it: a
read of its own memory, once a second in a process that does nothing else there."""
ETCD_CANCEL_S: Final = 0.5
"""Time that a cancelled call waits for the answer to what was sent: a transaction takes 2 to 40 ms."""
ETCD_DEFRAGMENT_S: Final = 120.0
"""Time that a node has to write its file anew: 8 GB at 100 MB/s take 80 s."""
ETCD_PAUSE_S: Final = 0.1
"""Pause behind an endpoint that refused at once: 100 tries a call."""
ETCD_ANSWER_BYTES_MAX: Final = 128 * MIB
"""Longest answer: all keys of a lake (COORDINATOR_BYTES_MAX) with their framing take less."""
ETCD_LAKE_NAME_BYTES_MAX: Final = 64
"""Name of a lake, which each key begins with: 4 x 120 keys of a transaction take 30 KiB for it."""
ETCD_SLOTS_ABANDONED_MAX: Final = 64
"""Markers whose transactions had no clear end, before a session is replaced: with those in flight 128 small keys."""
ETCD_SESSION_S: Final = 60
"""A session's lease: its markers are removed so long after its process vanished.  Longer than ETCD_CALL_S."""
ETCD_WATCH_QUEUE: Final = 16
"""Revisions that a watch holds for a slow consumer; etcd holds the others."""
