"""NIXL's OBJ backend: blocks of memory as objects."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client(
    "nixl",
    "nixl-cu12",
    lacks=(
        "ranges",
        "list",
        "delete",
        "buckets",
        "multipart",
        "copy",
        "metadata",
        "conditions",
        "presigned",
        "virtual host",
    ),
    also="asks which blocks are there",
)


@works("put", "get", "checksums")
def test_blocks_of_memory_are_written_read_and_asked_for(gateway: Gateway) -> None:
    gateway.python(
        "nixl",
        """
        import time, torch

        def move(operation, key, tensor):
            here = agent.register_memory([tensor], backends=["OBJ"])
            there = agent.register_memory([(0, tensor.numel(), 7, key)], "OBJ", backends=["OBJ"])
            moving = agent.initialize_xfer(operation, agent.get_xfer_descs([tensor]), there.trim(), "client")
            state = agent.transfer(moving)
            while state == "PROC":
                time.sleep(0.002)
                state = agent.check_xfer_state(moving)
            assert state == "DONE", state
            agent.release_xfer_handle(moving)
            agent.deregister_memory(there)
            agent.deregister_memory(here)

        for size in (1, 4096, 9_000_000):
            block = torch.randint(0, 255, (size,), dtype=torch.uint8)
            back = torch.zeros_like(block)
            move("WRITE", f"kv@{size}", block)
            move("READ", f"kv@{size}", back)
            assert torch.equal(block, back)
        asked = [(0, 0, 0, "kv@4096"), (0, 0, 0, "kv@none")]
        found = agent.query_memory(asked, "OBJ", mem_type="OBJ")
        assert [one is not None for one in found] == [True, False], found
        """,
    )
