"""`make demo-cluster`: one lake on three machines, whose devices are killed, replaced and added while it is used.

Three machines have two devices each: six members at 4+2.  Each machine, and each node of the etcd, is processes in a
network namespace of its own, where those can be made (as root, with iproute2), else processes with a loopback address.
Devices are folders of one disk here, so a machine counts as one device of those that may be lost.  A real model (see
`bench.demo`) is stored through S3 on one machine and loaded from a mount on another.  Under a load that never pauses,
two members are killed and their content is lost; everything is still read and written; they are replaced and healed, a
seventh is added, garbage is collected, and a KV cache is kept over all.  An etcd of three nodes has the log of the
names, and each machine a replica of them: the machine that leads is killed, then the leader of the etcd, then the
machine that leads now is cut off from the network.  Every answer is compared.  Exits with 0 if every check held.
Nothing leaves this machine, and nothing is left on it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import boto3
from safetensors import safe_open

import lakefs
from bench.demo import FAILURES, KEPT, SMALL, DemoFailed, fetch_model
from bench.harness.etcd import EtcdCluster, running_etcd
from bench.harness.hosts import Host, hosts, hosts_can_be_made
from bench.harness.lake_load import Load
from bench.harness.machines import LakeMachine
from bench.harness.mounts import lake_mounted

WAIT_S: Final = 300.0
ETCD_HOSTS: Final = ("e1", "e2", "e3")
MACHINES: Final = ("m1", "m2", "m3")
BLOCK_BYTES: Final = 64 << 10
BLOCKS: Final = 64
MIB: Final = 1 << 20
_BEGAN: Final = time.monotonic()


def main() -> int:
    """Run the command; return its exit code."""
    try:
        model = fetch_model(SMALL)
        KEPT.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT, prefix="cluster-") as folder:
            _run(model, Path(folder))
    except FAILURES as error:
        print(f"\ndemo-cluster: FAILED: {error}", file=sys.stderr)
        return 1
    _say("all of it was as it should be")
    return 0


def _run(model: Path, folder: Path) -> None:
    with ExitStack() as stack:
        found = _hosts(stack)
        etcd = _etcd(stack, folder, found)
        machines = _make_lake(stack, folder, etcd, found)
        first, second, third = machines
        s3 = _s3(second, first)
        keys = _store_through_s3(s3, model)
        mount = _mounted(stack, third, folder)
        _load_from_mount(mount, model)
        with Load(machines) as load:
            lost = _kill_two(machines, model, mount)
            _same_through_s3(s3, keys)
            _check_load(load, "two members are gone for ever")
            for machine, device, member in lost:
                machine.lake("cluster", "replace", member, str(device))
                _say(f"lake cluster replace {member[:8]} {device.name}", "an empty disk in its place")
            _wait_whole(first, 6, "healed")
            _check_load(load, "healed")
            _grow(first, second)
            _check_load(load, "a seventh member has its share")
            _collect(first, folder)
            _keep_kv(machines)
            if etcd is not None:
                _lose_the_leader(machines, load)
                _lose_etcd_s_leader(etcd, load)
                _cut_the_leader_off(machines, found, load)
        _check_load(load, "the load has ended", is_last=True)
        _same_through_s3(s3, keys)
        _say("$ lake fsck", _checked(first))
        print(first.lake("cluster", "status"))


# --- the lake ----------------------------------------------------------------------------------------


def _hosts(stack: ExitStack) -> dict[str, Host]:
    """Return the hosts of the etcd's nodes and of the machines; none where they cannot be made."""
    if not hosts_can_be_made():
        _say("network namespaces", "left out: they take root, and iproute2; all listen on loopback addresses")
        return {}
    _say("network namespaces", "a host for each machine and each node of the etcd, at one bridge")
    return dict(stack.enter_context(hosts(*ETCD_HOSTS, *MACHINES)))


def _etcd(stack: ExitStack, folder: Path, found: dict[str, Host]) -> EtcdCluster | None:
    """Run an etcd of three nodes; None where there is none."""
    if shutil.which("etcd") is None or shutil.which("etcdctl") is None:
        _say("etcd", "left out: it is not installed (Debian's etcd-server and etcd-client); names stay on machine 1")
        return None
    etcd = stack.enter_context(running_etcd(folder / "etcd", 3, at=[found[name] for name in ETCD_HOSTS if found]))
    _say("etcd", "three nodes, for the log of the names")
    return etcd


def _make_lake(stack: ExitStack, folder: Path, etcd: EtcdCluster | None, found: dict[str, Host]) -> list[LakeMachine]:
    alone = f"127.{os.getpid() >> 8 & 0xFF}.{os.getpid() & 0xFF}"
    where = [found[name] if found else f"{alone}.{number}" for number, name in enumerate(MACHINES, 1)]
    doors = [f"{each.address if isinstance(each, Host) else each}:0" for each in where]
    first, *others = machines = [
        LakeMachine(folder / "machine1", where[0], 2, "--s3", doors[0]),
        LakeMachine(folder / "machine2", where[1], 2, "--s3", doors[1], spares=1),
        LakeMachine(folder / "machine3", where[2], 2),
    ]
    _say(f"lake cluster init demo --listen {first.listen}", "names, and two devices")
    with_etcd = () if etcd is None else ("--etcd", ",".join(etcd.urls))
    first.init("demo", "--protect", "4+2", "--accept-loss", *with_etcd)
    stack.enter_context(first)
    for machine in others:
        _say(f"lake cluster join {first.listen} --listen {machine.listen}", "two devices")
        machine.join(first)
        stack.enter_context(machine)
    _wait_whole(first, 6, "six members in three machines, four data and two parity shards of each chunk")
    if etcd is not None:
        _eventually(lambda: len(_replicas(first, "leads", "follows")) == 3, "each machine has a replica of the names")
        _say("each machine has a replica of the names", _outlives(first))
    return machines


def _wait_whole(machine: LakeMachine, members: int, what: str) -> None:
    """Wait until so many members are up and have places, and nothing is to be moved or made anew."""

    def is_whole() -> bool:
        found = machine.status()
        up = [each for each in found["members"] if each["up"] and each["places"]]
        is_settled = found["ring_epochs"] == 1 and not found["walker"]["dirty_partitions"]
        return len(up) == members and is_settled and found["outlives"]["machines"] == 1

    began = time.monotonic()
    try:
        _eventually(is_whole, what)
    except DemoFailed:
        print(machine.lake("cluster", "status"), file=sys.stderr)
        raise
    _say(what, f"after {time.monotonic() - began:.1f} s; {_outlives(machine)}")


def _outlives(machine: LakeMachine) -> str:
    lines = machine.lake("cluster", "status").splitlines()
    return next(line for line in lines if line.startswith(("outlives", "too few")))


# --- clients -----------------------------------------------------------------------------------------


def _s3(machine: LakeMachine, first: LakeMachine) -> Any:
    """Return a client of a machine's gateway, with the access key that the lake's first start has made."""
    [url] = [line.split()[1] for line in machine.printed if line.startswith("s3 ")]
    _, access_key, secret_key = first.s3()
    return boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id=access_key, aws_secret_access_key=secret_key
    )


def _store_through_s3(s3: Any, model: Path) -> dict[str, str]:
    """Store the model's files; return the SHA-256 of each key's content."""
    s3.create_bucket(Bucket="models")
    began, keys, total = time.monotonic(), {}, 0
    for path in sorted(path for path in model.rglob("*") if path.is_file()):
        content = path.read_bytes()
        key = f"v1/{path.relative_to(model)}"
        s3.put_object(Bucket="models", Key=key, Body=content)
        keys[key] = hashlib.sha256(content).hexdigest()
        total += len(content)
    _say(f"boto3 put {len(keys)} files", f"{total / MIB:.1f} MiB in {time.monotonic() - began:.1f} s, machine 2")
    return keys


def _same_through_s3(s3: Any, keys: dict[str, str]) -> None:
    for key, digest in keys.items():
        content = s3.get_object(Bucket="models", Key=key)["Body"].read()
        _expect(hashlib.sha256(content).hexdigest() == digest, f"other bytes of {key} through S3")
    _say("boto3 get", f"{len(keys)} files, compared byte by byte: the same")


def _mounted(stack: ExitStack, machine: LakeMachine, folder: Path) -> Path | None:
    if not Path("/dev/fuse").exists():
        _say("lake mount", "left out: this machine has no /dev/fuse")
        return None
    (folder / "mounted").mkdir()
    return stack.enter_context(lake_mounted(machine, folder / "mounted")).folder


def _load_from_mount(mount: Path | None, model: Path) -> None:
    if mount is None:
        return
    weights = next(iter(sorted(model.rglob("*.safetensors"))))
    there = mount / "models" / "v1" / weights.relative_to(model)
    _expect(_tensors(there) == _tensors(weights), "other tensors from the mount")
    _say("lake mount", "safetensors loads the model on machine 3, every tensor the same")


def _tensors(path: Path) -> dict[str, bytes]:
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 - not a mapping


def _check_load(load: Load, when: str, *, is_last: bool = False) -> None:
    _expect(not load.failed, f"{len(load.failed)} operations of the load failed: {load.failed[:1]}")
    _say(f"load: {when}", f"{load.operations} puts and gets, none failed, the longest took {load.longest_s:.2f} s")
    if is_last:
        _expect(load.operations > 100, "the load did next to nothing")


# --- the story ---------------------------------------------------------------------------------------


def _kill_two(machines: list[LakeMachine], model: Path, mount: Path | None) -> list[tuple[LakeMachine, Path, str]]:
    """Kill two members with all that they have; return the machine, the folder and the id of each."""
    first, second, third = machines
    lost = []
    for machine, device in ((second, second.devices[1]), (third, third.devices[0])):
        lost.append((machine, device, machine.lose(device)))
        _say(f"kill -9, and rm -r {device.parent.name}/{device.name}", "under load")
    _load_from_mount(mount, model)
    if mount is not None:
        (mount / "models" / "meanwhile").write_bytes(b"written while two of six are gone")
        _expect(first.lake("cat", "models/meanwhile") == "written while two of six are gone", "other bytes written")
    _say("two of six are gone", _outlives(first))
    return lost


def _grow(first: LakeMachine, second: LakeMachine) -> None:
    [new] = second.spares
    second.add(new)
    _say("lake cluster add disk3", "a seventh device, on machine 2")
    _wait_whole(first, 7, "rebalanced over seven members")


def _collect(machine: LakeMachine, folder: Path) -> None:
    garbage = folder / "garbage"
    garbage.write_bytes(random.Random(1).randbytes(8 * MIB))
    machine.lake("put", str(garbage), "models/garbage")
    machine.lake("rm", "models/garbage")
    freed = [json.loads(machine.lake("gc", "--json"))["freed_bytes"] for _ in range(3)]
    _expect(sum(freed) >= 8 * MIB, f"gc has freed {freed} bytes, and not what was removed")
    _say("lake rm, then lake gc", f"three cycles free {sum(freed) / MIB:.1f} MiB, with parity")


def _checked(machine: LakeMachine) -> str:
    """Return the last line of a check in which every member has answered; one may just be connected to anew."""
    said: list[str] = []

    def is_checked() -> bool:
        try:
            said.append(machine.lake("fsck").strip().splitlines()[-1])
        except RuntimeError as error:
            if "exited with 2" not in str(error):
                raise
        return bool(said)

    _eventually(is_checked, "lake fsck checks all of it", 1.0)
    return said[0]


def _keep_kv(machines: list[LakeMachine]) -> None:
    """Store blocks by each machine, and load all of them on every machine."""
    rng = random.Random(2)
    blocks = {hashlib.sha256(b"%d" % number).digest(): rng.randbytes(BLOCK_BYTES) for number in range(BLOCKS)}
    keys = list(blocks)
    for number, machine in enumerate(machines):
        with lakefs.connect(machine.address) as lake:
            part = keys[number :: len(machines)]
            lake.space("kv", quota="1G").put_many(part, [blocks[key] for key in part])
    for machine in machines:
        with lakefs.connect(machine.address) as lake, lake.pool(size_bytes=BLOCKS * BLOCK_BYTES) as pool:
            space = lake.space("kv")
            lengths = space.load(keys, pool, [number * BLOCK_BYTES for number in range(BLOCKS)])
            _expect(lengths == [BLOCK_BYTES] * BLOCKS, "blocks of the KV cache are missing")
            for number, key in enumerate(keys):
                place = slice(number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES)
                _expect(bytes(pool.buffer[place]) == blocks[key], "another block of the KV cache")
    _say("KV cache", f"{BLOCKS} blocks of 64 KiB stored by three machines, each loads all of them")


def _lose_the_leader(machines: list[LakeMachine], load: Load) -> None:
    """Kill the machine whose replica leads the names, under load, and start it again when another one leads."""
    first, second, third = machines
    [leader] = _replicas(second, "leads")
    load.forgives = True
    for device in first.devices:
        for pid in first.pids_of(device):
            os.kill(pid, signal.SIGKILL)
    first.kill()
    began = time.monotonic()
    _say("kill -9 everything on machine 1", "it leads the names, and has two of seven members")
    _eventually(lambda: _is_put(third), "names are served again", 0.05)
    served_s = time.monotonic() - began
    [other] = _replicas(second, "leads")
    _expect(other != leader, "machine 1 still leads")
    _say("another machine's replica leads the names", f"a put was acknowledged after {served_s:.1f} s")
    first.start()
    _wait_whole(second, 7, "machine 1 is back")
    _eventually(lambda: len(_replicas(second, "leads", "follows")) == 3, "its replica follows")
    _say("its replica of the names follows", f"{load.refused} operations failed meanwhile, none acknowledged was lost")


def _lose_etcd_s_leader(etcd: EtcdCluster, load: Load) -> None:
    node, before = etcd.leader(), load.operations
    node.kill()
    _say("kill -9 the leader of the etcd", "one of three nodes")
    _eventually(lambda: load.operations > before + 20, "the load goes on")
    node.start(etcd.names)
    load.forgives = False
    _say("the load goes on without that node", f"{load.refused} operations failed since the machine was lost")


def _cut_the_leader_off(machines: list[LakeMachine], found: dict[str, Host], load: Load) -> None:
    """Take the machine that leads the names from the network, and bring it back when another one leads."""
    if not found:
        return
    [leader] = [each for each in machines if each.leads_names()]
    other = next(each for each in machines if each is not leader)
    host = next(each for each in found.values() if each.address == leader.host)
    load.forgives, before = True, load.refused
    host.cut()
    began = time.monotonic()
    number = machines.index(leader) + 1
    _say(f"pull the cable of machine {number}", "it leads the names; no connection is reset")
    _eventually(lambda: _is_put(other), "names are served again", 0.05)
    served_s = time.monotonic() - began
    _expect(not _is_put(leader), "the machine that is cut off has acknowledged a put")
    _say(
        "another machine's replica leads the names",
        f"a put was acknowledged after {served_s:.1f} s, none at machine {number}",
    )
    host.join()
    _wait_whole(other, 7, f"machine {number} is back")
    _eventually(lambda: len(_replicas(other, "leads", "follows")) == 3, "its replica follows")
    _eventually(lambda: _is_put(leader), "it serves again")
    load.forgives = False
    _say("its replica of the names follows", f"{load.refused - before} operations failed meanwhile")


def _replicas(machine: LakeMachine, *states: str) -> list[str]:
    """Return the ids of the replicas of the names in these states."""
    found = machine.status().get("names", {}).get("replicas", [])
    return [each["id"] for each in found if each["state"] in states]


def _is_put(machine: LakeMachine) -> bool:
    """Return True if a machine acknowledges a put."""
    try:
        with lakefs.connect(machine.address) as lake:
            lake.put("bench/after the leader", b"x")
    except lakefs.LakeError:
        return False
    return True


# --- saying and waiting ------------------------------------------------------------------------------


def _eventually(happens: Callable[[], bool], what: str, pause_s: float = 0.25) -> None:
    end = time.monotonic() + WAIT_S
    while not happens():
        _expect(time.monotonic() < end, f"not after {WAIT_S:g} s: {what}")
        time.sleep(pause_s)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DemoFailed(otherwise)


def _say(what: str, result: str = "") -> None:
    print(f"{time.monotonic() - _BEGAN:6.1f} s  {what:<44} {result}".rstrip(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
