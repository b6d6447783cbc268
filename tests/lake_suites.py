"""The suites that are too long for `make lake-suites`, at a running lake of six members; a part of `make torture`.

    python -m tests.lake_suites

What is about one engine is skipped, and says why (the marker `one_engine`).  docs/internals/cluster.md says which
suites do not run at a lake.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

DEVICES: Final = 6
LONG: Final = (
    "mount/test_tools.py",
    "mount/test_close_to_open.py",
    "mount/test_appends_elsewhere.py",
    "mount/test_small_opens.py",
    "mount/test_loaders.py",
    "mount/test_native.py",
    "e2e/test_cli_files.py",
    "e2e/test_cli_names.py",
    "e2e/test_cli_kv.py",
    "e2e/test_reconnecting.py",
    "e2e/test_shared_memory.py",
)
WITH_THOROUGH: Final = (
    "e2e/test_bucket_names.py",
    "e2e/test_cli_errors.py",
    "e2e/test_cli_keys.py",
    "e2e/test_cli_streams.py",
    "e2e/test_cli_trees.py",
    "e2e/test_direct_reads.py",
    "e2e/test_dram_tier.py",
    "e2e/test_every_way.py",
    "e2e/test_exhaustion.py",
    "e2e/test_exposure.py",
    "e2e/test_fair_shares.py",
    "e2e/test_faults_connections.py",
    "e2e/test_faults_names.py",
    "e2e/test_gateway.py",
    "e2e/test_interrupted.py",
    "e2e/test_keyed_faults.py",
    "e2e/test_lake_forks.py",
    "e2e/test_lost_lendings.py",
    "e2e/test_lying_client.py",
    "e2e/test_mapped.py",
    "e2e/test_mount_machine.py",
    "e2e/test_mount_served.py",
    "e2e/test_opened_reads.py",
    "e2e/test_s3_bad_http.py",
    "e2e/test_s3_bad_input.py",
    "e2e/test_s3_door.py",
    "e2e/test_s3_first_start.py",
    "e2e/test_s3_forms.py",
    "e2e/test_s3_many_parts.py",
    "e2e/test_s3_odd_keys.py",
    "e2e/test_s3_operated.py",
    "e2e/test_s3_settings.py",
    "e2e/test_s3_tls.py",
    "e2e/test_silence.py",
    "e2e/test_staged.py",
    "e2e/test_stopped_lendings.py",
    "known/test_registers.py",
    "door/test_abuse.py",
    "door/test_bytes.py",
    "door/test_counts.py",
    "door/test_dormant.py",
    "door/test_limits.py",
    "door/test_oracle.py",
    "door/test_pieces.py",
    "door/test_puts.py",
    "door/test_registers.py",
    "mount/test_at_once.py",
    "mount/test_close_to_open_faults.py",
    "mount/test_faults.py",
    "mount/test_handles.py",
    "mount/test_hot_faults.py",
    "mount/test_hot_kills.py",
    "mount/test_hot_users.py",
    "mount/test_model.py",
    "mount/test_native_writes.py",
    "mount/test_operations.py",
    "mount/test_posix.py",
    "mount/test_races.py",
    "mount/test_restarts.py",
    "mount/test_shared_model.py",
    "plugins/fsspec/test_against_local_files.py",
    "plugins/fsspec/test_processes.py",
    "plugins/fsspec/test_written.py",
)
"""Files of which the tests that are marked `thorough` run here, too."""
_TESTS: Final = Path(__file__).parent


def main() -> int:
    """Run these files; exit code 0 when nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.lake_suites")
    parser.add_argument("--seed", type=int, default=1, help="not used: these tests make up nothing")
    parser.parse_args()
    failed = [_run(LONG, "not thorough and not plugins"), _run(WITH_THOROUGH, "not plugins")]
    return max(failed)


def _run(files: Sequence[str], marked: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-m", marked, *(str(_TESTS / name) for name in files)]
    environment = os.environ | {"SERVED_DEVICES": str(DEVICES)}
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
