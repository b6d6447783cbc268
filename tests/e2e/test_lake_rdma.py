"""A lake of several devices with RDMA: its process opens the device, and clients get what they get at one engine.

The device is a simulated one where the lake is served by this process; where heads are processes of their own, this
machine has none.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
import trio

import lakefs
from cli.serve.serve import head_command, member_command
from engine.lake.lake_process import LakeOptions, RunningLake, plan_head, run_lake, tier_share
from lakefs.client.trio.lake import TrioLake
from lakefs.client.trio.reconnecting import connect_reconnecting
from lakefs.config.settings import Config, load
from lakefs.fabric.client_fabric import ClientFabric
from lakefs.grants.dram_slabs import SLAB_BYTES
from lakefs.limits import MIB
from tests.e2e.served import environment, lake
from tests.e2e.test_lake_heads import OPTIONS, heads_of
from tests.e2e.test_lake_on_devices import served
from tests.simulated_fabric import SimulatedFabric, SimulatedWire

pytestmark = [pytest.mark.slow]
FOLDERS: Final = 3
SETTINGS: Final = {
    "protect": "2+1",
    "s3": "off",
    "admin": "off",
    "native": "127.0.0.1:0",
    "dram_tier_bytes": str(2 * SLAB_BYTES),
}
Body = Callable[[RunningLake, TrioLake], Awaitable[None]]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have members start without the developer's settings."""
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])


def config_of(folder: Path, **settings: str) -> Config:
    """Return the settings of a lake of three folders."""
    data = tuple(str(folder / f"d{number}") for number in range(FOLDERS))
    flags = {"data": data, "socket": str(folder / "s"), **SETTINGS, **settings}
    return load(file=os.devnull, environ=environment(), flags=flags)


def in_process(config: Config, wire: SimulatedWire, body: Body) -> SimulatedFabric:
    """Serve a lake in this process with a device of the wire, and run a client with another one; return the lake's."""
    device: SimulatedFabric = wire.fabric()

    async def use(running: RunningLake, *, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        address = next(each for each in running.addresses if each.startswith("tcp://"))
        token = (config.data / "native.token").read_text().strip()
        async with connect_reconnecting(address, token=token) as engine:
            fabric = ClientFabric(engine, lambda name: wire.fabric())
            client = TrioLake(engine, running.offload, network=True, fabric=fabric)
            try:
                await body(running, client)
            finally:
                with trio.CancelScope(shield=True):
                    await client.aclose()
        os.kill(os.getpid(), signal.SIGTERM)  # the lake serves until then

    async def main() -> None:
        with trio.fail_after(120):
            await run_lake(
                config,
                printer=lambda line: None,
                member_command=partial(member_command, config),
                faces=[use],
                options=LakeOptions(accept_loss=True),
                open_fabric=lambda name: device,
            )

    trio.run(main)
    return device


def test_a_lake_moves_bytes_by_rdma_also_while_a_member_is_away(tmp_path: Path) -> None:
    content = random.Random(1).randbytes(9 * MIB)
    parts = [random.Random(number).randbytes(MIB) for number in range(4)]

    async def body(running: RunningLake, client: TrioLake) -> None:
        await client.put("bkt/object", content, create_bucket=True)
        assert client.rdma.bytes >= 8 * MIB
        for _ in range(3):
            assert await client.get("bkt/object") == content
        with trio.fail_after(30):
            while (state := (await client.status())["rdma"])["registered_bytes"] < SLAB_BYTES:
                await client.get("bkt/object")
        assert (state["state"], state["device"], state["reason"]) == ("on", "simulated", "")
        for number, part in enumerate(parts):
            await client.put(f"bkt/{number}", part)
        names = [f"bkt/{number}" for number in range(4)]
        async with client.pool(size_bytes=4 * MIB) as pool:
            for turn in range(2):
                before = client.rdma.bytes
                await client.load_many(names, pool, [number * MIB for number in range(4)])
                assert bytes(pool.buffer) == b"".join(parts)
                assert client.rdma.bytes == before + 4 * MIB
                pool.buffer[:] = bytes(4 * MIB)
                if not turn:
                    process = running.parts.processes.all[1].process
                    assert process is not None
                    process.kill()
        assert not client.rdma.reason

    with SimulatedWire() as wire:
        device = in_process(config_of(tmp_path), wire, body)
        assert not device.regions
        assert not device.links


@pytest.mark.parametrize("heads", ["1", "2"])
def test_a_device_that_was_named_has_to_be_usable(tmp_path: Path, heads: str) -> None:
    data = [part for number in range(FOLDERS) for part in ("--data", tmp_path / f"d{number}")]
    options = (*OPTIONS[:-2], "--heads", heads, "--native", "127.0.0.1:0", "--rdma", "mlx5_9")
    refused = lake("serve", *data, "--socket", tmp_path / "s", "--s3", "off", "--admin", "off", *options)
    assert refused.code == 78, refused
    assert "rdma = mlx5_9: " in refused.err


def test_heads_say_each_why_they_have_no_rdma(tmp_path: Path) -> None:
    folders = [tmp_path / f"d{number}" for number in range(FOLDERS)]
    with served(tmp_path, folders, *OPTIONS, "--native", "127.0.0.1:0") as lake_:
        assert len(heads_of(lake_)) == 2
        for _ in range(4):
            with lakefs.connect(lake_.server) as client:
                state: dict[str, Any] = client.status()["rdma"]
            assert state == {"state": "off", "reason": "there is no RDMA device"}


def test_a_head_gets_the_lake_s_device_and_its_share_of_memory(tmp_path: Path) -> None:
    config = config_of(tmp_path, heads="3", rdma="mlx5_0:1", dram_tier_bytes=str(8 * SLAB_BYTES))
    words = head_command(config, 1, [5, 6], "unix:/names")
    flags = dict(pairwise(words))
    given = {name: flags[f"--{name.replace('_', '-')}"] for name in ("rdma", "heads", "dram_tier_bytes", "native")}
    own = config_of(tmp_path, **given)
    assert (own.rdma, own.heads) == ("mlx5_0:1", 3)
    for number in range(FOLDERS):
        (tmp_path / f"d{number}").mkdir()
    assert plan_head(own, "unix:/names").tier.size_bytes == tier_share(config) == 2 * SLAB_BYTES
