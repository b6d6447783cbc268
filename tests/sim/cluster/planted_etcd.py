"""Rules weakened on purpose in lakes over an etcd, as `tests.sim.cluster.planted`: run as that is."""

from __future__ import annotations

from typing import Final

from tests.sim.cluster.planted import epochs_are_retired_unsaid, epochs_are_retired_unwalked, main
from tests.sim.cluster.weakening import Weakening
from tests.sim.replicas.planted import reads_without_the_lease, trimmed_behind_one

OVER_ETCD: Final = [
    weakened.over_etcd()
    for weakened in (
        Weakening("epochs are retired before all members know, over an etcd", epochs_are_retired_unsaid).in_scene(
            "a head learns late of a table", first=2
        ),
        Weakening("epochs are retired before the walks, over an etcd", epochs_are_retired_unwalked).in_scene(
            "two members are drained at once", first=2
        ),
        Weakening("a lake reads names without the lease", reads_without_the_lease).in_scene(
            "two replicas of the names lead"
        ),
        Weakening("a lake's names are trimmed that only the leader has", trimmed_behind_one),
    )
]


if __name__ == "__main__":
    raise SystemExit(main(OVER_ETCD, "planted_etcd"))
