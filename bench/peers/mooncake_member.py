"""`python -m bench.peers.mooncake_member PACKAGE OWN MASTER BYTES`: gives memory to a Mooncake store."""

from __future__ import annotations

import os
import signal
import sys

from bench.peers.kv_clients import mooncake_store


def main() -> int:
    """Serve until SIGTERM."""
    said = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    package, own, master, given = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # also in the threads that it starts
    store = mooncake_store(package, own, master, int(given))
    said.write(b"ready\n")
    signal.sigwait({signal.SIGTERM})
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
