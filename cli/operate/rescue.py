"""`lake cluster rescue`: a lake whose etcd is lost for ever begins again from a replica of its names."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cli.terminal.output import human_bytes, iso_time, json_option, notice, write_json, write_line
from lakefs.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.coordinator.records import NamesCheckpoint
    from engine.lake.machine import MachineRecord
    from engine.lake.plan import LakePlan
    from engine.lake.rescue import ReplicaHere

WHAT_IS_LOST = (
    "what was acknowledged behind its last group is lost: about the last second before the etcd was lost, if no other "
    "replica has a higher group"
)
WHAT_A_CHECKPOINT_LACKS = "what was named since then is lost"


@click.command()
@click.option("--from-here", is_flag=True, help="Begin again from this replica: no other has a higher group.")
@click.option("--from-lake", is_flag=True, help="No replica is left: begin again from a checkpoint in the lake.")
@click.option("--read-only", is_flag=True, help="Let the next start of lake serve serve reads of what it has.")
@click.option("--config", "file", metavar="FILE", help="Instead of /etc/lake/lake.toml.")
@click.option("--data", metavar="DIR", multiple=True, help="A folder on each device; else the settings' ones.")
@json_option
def rescue(
    data: tuple[str, ...], file: str | None, from_here: bool, from_lake: bool, read_only: bool, as_json: bool
) -> None:
    """Let a lake whose etcd is lost for ever begin again from the replica of its names on this machine.

    Without an option nothing is changed: it shows the last group of this replica, and what this replica knows of the
    others.  Stop lake serve on all machines, and run it on each that has a replica.  Then use --from-here on the one
    with the highest group, start it, and let the others join it.

    With --read-only the next start of lake serve lists and reads what this replica has, without the etcd, and refuses
    changes; the start behind that is a normal one.

    Where no machine has a replica any more, --from-lake makes the names anew from the newest checkpoint of them that
    lies in the lake itself.  lake serve runs on the other machines then, so that their members are found.
    """
    from cli.terminal.process import run_loop
    from engine.lake.rescue import etcd_to_be_lost, has_replica, why_lost

    if from_here + from_lake + read_only > 1:
        raise InvalidArgument("give one of --from-here, --from-lake and --read-only")
    plan = _plan(data, file)
    place = etcd_to_be_lost(plan)
    if read_only and place is None:
        raise InvalidArgument("the lake begins again from this replica, and has its names here: start it")
    reason = "" if place is None else run_loop(partial(why_lost, plan, place))
    if from_lake or not has_replica(plan):
        _from_lake(plan, reason, is_meant=from_lake, as_json=as_json)
    else:
        _from_replica(plan, reason, from_here=from_here, read_only=read_only, as_json=as_json)


def _from_replica(plan: LakePlan, reason: str, *, from_here: bool, read_only: bool, as_json: bool) -> None:
    from cli.terminal.process import run_loop
    from engine.lake.reads_only import ask_for_reads
    from engine.lake.rescue import looked_at, rescued

    here = run_loop(partial(looked_at, plan))
    _show(_document(here, plan, reason), rescue_lines(here, reason), as_json=as_json)
    if read_only:
        ask_for_reads(plan)
        notice("lake: the next start of lake serve lists and reads what this replica has, and refuses changes")
        return
    if not from_here:
        notice("lake: nothing was changed; stop lake serve on all machines, and run this on each that has a replica")
        notice(f"lake: {WHAT_IS_LOST}; to begin again from this one: lake cluster rescue --from-here")
        return
    machine = run_loop(partial(rescued, plan))
    notice(f"lake: the lake begins again from this replica, with group {here.sequence}; {WHAT_IS_LOST}")
    _say_how_to_go_on(machine)


def _from_lake(plan: LakePlan, reason: str, *, is_meant: bool, as_json: bool) -> None:
    from cli.terminal.process import run_loop
    from engine.lake.from_lake import begun_from_lake, kept_records

    records = kept_records(plan)
    found = records.checkpoints.checkpoints
    document = {
        "lake": plan.machine.lake,
        "etcd_lost_because": reason,
        "checkpoints": [
            {"of_ns": each.said_ns, "group": each.sequence, "bytes": each.file_bytes, "blob": each.blob.hex()}
            for each in found
        ],
    }
    _show(document, checkpoint_lines(found, reason), as_json=as_json)
    if not is_meant:
        notice("lake: nothing was changed; if a machine has a replica of the names left, run this there")
        notice(f"lake: {WHAT_A_CHECKPOINT_LACKS}; to begin again from the newest: lake cluster rescue --from-lake")
        return
    machine, used = run_loop(partial(begun_from_lake, plan, records))
    notice(f"lake: the lake begins again from its names of {iso_time(used.said_ns)}; {WHAT_A_CHECKPOINT_LACKS}")
    _say_how_to_go_on(machine)


def _show(document: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    if as_json:
        write_json(document)
        return
    for line in lines:
        write_line(line)


def _say_how_to_go_on(machine: MachineRecord) -> None:
    notice("lake: start lake serve here, and then on each other machine, before lake serve is started there:")
    notice(f"lake: lake cluster join {machine.listen} --token-file FILE --listen HOST:PORT --data DIR")


def checkpoint_lines(checkpoints: Sequence[NamesCheckpoint], reason: str) -> list[str]:
    """Return the lines about checkpoints of the names in the lake; `reason`: why the etcd is lost."""
    lines = [] if not reason else [_line("etcd", reason)]
    for each in checkpoints:
        told = f"of {iso_time(each.said_ns)}, group {each.sequence}, {human_bytes(each.file_bytes)}"
        lines.append(_line("checkpoint in the lake", told))
    return lines


def rescue_lines(here: ReplicaHere, reason: str) -> list[str]:
    """Return the lines about the replica on this machine and those it knows; `reason`: why the etcd is lost."""
    lines = [] if not reason else [_line("etcd", reason)]
    told = f"group {here.sequence}, on this machine"
    if here.is_in_charge:
        told += "; the lake begins again from it"
    elif here.repeated is None:
        told += "; it has no copy of the lake's records"
    else:
        told += f"; it had all of {iso_time(here.repeated.said_ns)}"
    lines.append(_line(f"names {here.replica.hex()}", told))
    for shard in here.shards:
        told = f"group {shard.sequence}, on this machine"
        lines.append(_line(f"names {shard.shard} {shard.replica.hex()}", told))
    for each in _others(here):
        where = _hosts(here).get(each.machine, f"machine {each.machine}")
        lines.append(_line(f"names {each.replica.hex()}", f"group {each.kept} at {iso_time(each.said_ns)}, at {where}"))
    return lines


def _document(here: ReplicaHere, plan: LakePlan, reason: str) -> dict[str, Any]:
    return {
        "lake": plan.machine.lake,
        "replica": here.replica.hex(),
        "group": here.sequence,
        "had_all_of_ns": None if here.repeated is None else here.repeated.said_ns,
        "is_in_charge": here.is_in_charge,
        "etcd_lost_because": reason,
        "shards": [
            {"shard": each.shard, "replica": each.replica.hex(), "group": each.sequence} for each in here.shards
        ],
        "others": [
            {"id": each.replica.hex(), "machine": each.machine, "group": each.kept, "said_ns": each.said_ns}
            for each in _others(here)
        ],
    }


def _others(here: ReplicaHere) -> list[Any]:
    return [] if here.repeated is None else [each for each in here.repeated.replicas if each.replica != here.replica]


def _hosts(here: ReplicaHere) -> dict[str, str]:
    """Return the host of each machine, as the addresses of its members have it."""
    found = {}
    for member in here.members:
        for address in member.addresses:
            if address.startswith("tcp://"):
                found[member.domains[1]] = address.removeprefix("tcp://").rpartition(":")[0]
    return found


def _line(subject: str, told: str) -> str:
    return f"{subject:<40}{told}"


def _plan(data: tuple[str, ...], file: str | None) -> LakePlan:
    """Return the lake in this machine's folders.  Errors of `plan_lake`."""
    from cli.serve.serve import member_command
    from engine.lake.lake_process import LakeOptions, plan_lake
    from lakefs.config.settings import load

    config = load(file=file, flags={"data": data})
    return plan_lake(config, partial(member_command, config), LakeOptions())
