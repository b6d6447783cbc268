"""`lake cluster rescue`: a lake whose etcd is lost for ever begins again from a replica of its names."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cli.terminal.output import human_bytes, iso_time, json_option, notice, write_json, write_line
from lakefs.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.coordinator.records import NamesCheckpoint, RepeatedReplica
    from engine.lake.machine import MachineRecord
    from engine.lake.plan import LakePlan
    from engine.lake.rescue import NamesFound, ReplicaHere
    from lakefs.ids import NamesShard

WHAT_IS_LOST = (
    "what was acknowledged behind its last group is lost: about the last second before the etcd was lost, if no other "
    "replica has a higher group"
)
WHAT_A_CHECKPOINT_LACKS = "what was named since then is lost"


@click.command()
@click.option("--from-here", is_flag=True, help="Begin again from this replica: no other has a higher group.")
@click.option("--from-lake", is_flag=True, help="No replica is left: begin again from a checkpoint in the lake.")
@click.option("--read-only", is_flag=True, help="Let the next start of lake serve serve reads of what it has.")
@click.option("--restored", is_flag=True, help="Names here were copied from elsewhere, or put back from a backup.")
@click.option("--config", "file", metavar="FILE", help="Instead of /etc/lake/lake.toml.")
@click.option("--data", metavar="DIR", multiple=True, help="A folder on each device; else the settings' ones.")
@json_option
def rescue(
    data: tuple[str, ...],
    file: str | None,
    from_here: bool,
    from_lake: bool,
    read_only: bool,
    restored: bool,
    as_json: bool,
) -> None:
    """Let a lake whose etcd is lost for ever begin again from the replica of its names on this machine.

    Without an option nothing is changed: it shows the last group of this replica, and what this replica knows of the
    others.  Stop lake serve on all machines, and run it on each that has a replica.  Then use --from-here on the one
    with the highest group, start it, and let the others join it.

    With --read-only the next start of lake serve lists and reads what this replica has, without the etcd, and refuses
    changes; the start behind that is a normal one.

    Where the names are in several shards, all of them are to be on this machine: copy the folder of one that is not
    from a machine that has it, and use --restored with --from-here.

    Where no machine has a replica any more, --from-lake makes the names anew from the newest checkpoint of them that
    lies in the lake itself.  lake serve runs on the other machines then, so that their members are found.
    """
    from cli.terminal.process import run_loop
    from engine.lake.rescue import etcd_to_be_lost, has_replica, why_lost

    if from_here + from_lake + read_only > 1:
        raise InvalidArgument("give one of --from-here, --from-lake and --read-only")
    plan = _plan(data, file, restored=restored)
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
    from engine.lake.rescue import looked_at, rescued, why_not_from_here

    here = run_loop(partial(looked_at, plan))
    _show(_document(here, plan, reason), rescue_lines(here, reason), as_json=as_json)
    if read_only:
        ask_for_reads(plan)
        notice("lake: the next start of lake serve lists and reads what this replica has, and refuses changes")
        return
    if not from_here:
        notice("lake: nothing was changed; stop lake serve on all machines, and run this on each that has a replica")
        if here.missing:
            notice(f"lake: {why_not_from_here(here)}")
            return
        notice(f"lake: {WHAT_IS_LOST}; to begin again from this one: lake cluster rescue --from-here")
        return
    machine = run_loop(partial(rescued, plan))
    with_group = " and ".join(f"group {each.sequence}{_of_shard(here, each.shard)}" for each in here.replicas)
    notice(f"lake: the lake begins again from this replica, with {with_group}; {WHAT_IS_LOST}")
    _say_how_to_go_on(machine)


def _of_shard(here: NamesFound, shard: NamesShard) -> str:
    """Return words for the shard of a group, where there are several."""
    return f" of names shard {shard}" if here.count > 1 else ""


def _from_lake(plan: LakePlan, reason: str, *, is_meant: bool, as_json: bool) -> None:
    from cli.terminal.process import run_loop
    from engine.lake.from_lake import begun_from_lake, kept_records
    from engine.lake.rescue import looked_at

    kept = kept_records(plan, run_loop(partial(looked_at, plan)))
    document = {
        "lake": plan.machine.lake,
        "etcd_lost_because": reason,
        "checkpoints": [
            {
                "of_ns": each.said_ns,
                "group": each.sequence,
                "bytes": each.file_bytes,
                "blob": each.blob.hex(),
                "shard": shard,
            }
            for shard, found in kept.checkpoints.items()
            for each in found
        ],
    }
    _show(document, checkpoint_lines(kept.checkpoints, reason), as_json=as_json)
    if not is_meant:
        notice("lake: nothing was changed; if a machine has a replica of the names left, run this there")
        notice(f"lake: {WHAT_A_CHECKPOINT_LACKS}; to begin again from the newest: lake cluster rescue --from-lake")
        return
    machine, used = run_loop(partial(begun_from_lake, plan, kept))
    of_shard = {shard: f" of names shard {shard}" if kept.shards > 1 else "" for shard in used}
    times = " and ".join(f"{iso_time(each.said_ns)}{of_shard[shard]}" for shard, each in used.items())
    notice(f"lake: the lake begins again from its names of {times}; {WHAT_A_CHECKPOINT_LACKS}")
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


def checkpoint_lines(checkpoints: Mapping[NamesShard, Sequence[NamesCheckpoint]], reason: str) -> list[str]:
    """Return the lines about checkpoints of the names in the lake; `reason`: why the etcd is lost."""
    lines = [] if not reason else [_line("etcd", reason)]
    for shard, found in checkpoints.items():
        subject = "checkpoint in the lake" if not shard else f"checkpoint of names {shard} in the lake"
        for each in found:
            told = f"of {iso_time(each.said_ns)}, group {each.sequence}, {human_bytes(each.file_bytes)}"
            lines.append(_line(subject, told))
    return lines


def rescue_lines(here: NamesFound, reason: str) -> list[str]:
    """Return the lines about the replicas on this machine and those it knows; `reason`: why the etcd is lost."""
    from engine.lake.shards_here import hosts_of
    from lakefs.ids import NamesShard

    lines = [] if not reason else [_line("etcd", reason)]
    hosts = hosts_of(here.members)
    for shard in map(NamesShard, range(here.count)):
        subject = "names" if not shard else f"names {shard}"
        lines += [_line(f"{subject} {each.replica.hex()}", _told(here, each)) for each in _of(here, shard)]
        if not _of(here, shard):
            lines.append(_line(subject, "no replica on this machine"))
        for each in here.known_of(shard):
            where = hosts.get(each.machine, f"machine {each.machine}")
            told = f"group {each.kept} at {iso_time(each.said_ns)}, at {where}"
            lines.append(_line(f"{subject} {each.replica.hex()}", told))
    return lines


def _told(here: NamesFound, each: ReplicaHere) -> str:
    """Return the words about a replica on this machine."""
    told = f"group {each.sequence}, on this machine"
    if each.shard:
        return f"{told}, of another time of the lake" if each.is_old else told
    if here.is_in_charge:
        return f"{told}; the lake begins again from it"
    if here.repeated is None:
        return f"{told}; it has no copy of the lake's records"
    return f"{told}; it had all of {iso_time(here.repeated.said_ns)}"


def _document(here: NamesFound, plan: LakePlan, reason: str) -> dict[str, Any]:
    from lakefs.ids import NamesShard

    shards = [_shard_document(here, shard) for shard in map(NamesShard, range(here.count))]
    return {
        "lake": plan.machine.lake,
        **shards[0],
        "had_all_of_ns": None if here.repeated is None else here.repeated.said_ns,
        "is_in_charge": here.is_in_charge,
        "etcd_lost_because": reason,
        "shards": shards[1:],
    }


def _shard_document(here: NamesFound, shard: NamesShard) -> dict[str, Any]:
    own = next(iter(_of(here, shard)), None)
    return {
        "shard": shard,
        "replica": None if own is None else own.replica.hex(),
        "group": None if own is None else own.sequence,
        "others": [_other_document(each) for each in here.known_of(shard)],
    }


def _other_document(each: RepeatedReplica) -> dict[str, Any]:
    return {"id": each.replica.hex(), "machine": each.machine, "group": each.kept, "said_ns": each.said_ns}


def _of(here: NamesFound, shard: NamesShard) -> list[ReplicaHere]:
    return [each for each in here.replicas if each.shard == shard]


def _line(subject: str, told: str) -> str:
    return f"{subject:<39} {told}"


def _plan(data: tuple[str, ...], file: str | None, *, restored: bool) -> LakePlan:
    """Return the lake in this machine's folders.  Errors of `plan_lake`."""
    from cli.serve.serve import member_command
    from engine.lake.lake_process import LakeOptions, plan_lake
    from lakefs.config.settings import load

    config = load(file=file, flags={"data": data})
    return plan_lake(config, partial(member_command, config), LakeOptions(restored=restored))
