"""vLLM makes its tiers from an entry of `--kv-transfer-config`, as `vllm serve` does; no GPU is used.

Run with the Python of `.venv-plugins` and the entry as the argument; LAKE_SERVER names the engine.  Prints the class of
each tier, the name of its space, and if the engine is lent the blocks.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from vllm.config import KVTransferConfig
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from tests.plugins.kv.vllm_host import BLOCK, offloading_config

ROWS = 16


def main() -> None:
    entry: dict[str, Any] = json.loads(sys.argv[1])
    entry["kv_connector_extra_config"]["cpu_bytes_to_use"] = ROWS * BLOCK
    transfer = KVTransferConfig(**entry)
    assert transfer.is_kv_transfer_instance
    assert transfer.kv_connector == "OffloadingConnector"
    extra = transfer.kv_connector_extra_config
    spec = OffloadingSpecFactory.create_spec(offloading_config("llama/8b", extra, f"lake-page-{os.getpid()}"))
    manager = spec.get_manager()
    for tier in manager.secondary_tiers:
        sys.stdout.write(f"{type(tier).__name__} {tier.space_name} {tier._moves.is_lent}\n")
    manager.shutdown()


if __name__ == "__main__":
    main()
