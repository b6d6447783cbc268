"""`lake cluster rescue`: a lake whose etcd is lost for ever begins again from a replica of its names."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cli.terminal.output import iso_time, json_option, notice, write_json, write_line
from lakefs.errors import InvalidArgument

if TYPE_CHECKING:
    from engine.lake.plan import LakePlan
    from engine.lake.rescue import ReplicaHere

WHAT_IS_LOST = (
    "what was acknowledged behind its last group is lost: about the last second before the etcd was lost, if no other "
    "replica has a higher group"
)


@click.command()
@click.option("--from-here", is_flag=True, help="Begin again from this replica: no other has a higher group.")
@click.option("--read-only", is_flag=True, help="Let the next start of lake serve serve reads of what it has.")
@click.option("--config", "file", metavar="FILE", help="Instead of /etc/lake/lake.toml.")
@click.option("--data", metavar="DIR", multiple=True, help="A folder on each device; else the settings' ones.")
@json_option
def rescue(data: tuple[str, ...], file: str | None, from_here: bool, read_only: bool, as_json: bool) -> None:
    """Let a lake whose etcd is lost for ever begin again from the replica of its names on this machine.

    Without --from-here nothing is changed: it shows the last group of this replica, and what this replica knows of the
    others.  Stop lake serve on all machines, and run it on each that has a replica.  Then use --from-here on the one
    with the highest group, start it, and let the others join it.

    With --read-only the next start of lake serve lists and reads what this replica has, without the etcd, and refuses
    changes; the start behind that is a normal one.
    """
    from cli.terminal.process import run_loop
    from engine.lake.reads_only import ask_for_reads
    from engine.lake.rescue import looked_at, refuse_without_replica, rescued, why_lost

    if from_here and read_only:
        raise InvalidArgument("give --from-here or --read-only")
    plan = _plan(data, file)
    place = refuse_without_replica(plan)
    if read_only and place is None:
        raise InvalidArgument("the lake begins again from this replica, and has its names here: start it")
    reason = "" if place is None else run_loop(partial(why_lost, plan, place))
    here = run_loop(partial(looked_at, plan))
    if as_json:
        write_json(_document(here, plan, reason))
    else:
        for line in rescue_lines(here, reason):
            write_line(line)
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
    notice("lake: start lake serve here, and then on each other machine, before lake serve is started there:")
    notice(f"lake: lake cluster join {machine.listen} --token-file FILE --listen HOST:PORT --data DIR")


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
    from engine.lake.lake_process import LakeOptions, plan_lake
    from lakefs.config.settings import load

    config = load(file=file, flags={"data": data})
    return plan_lake(config, lambda *_: (), LakeOptions())
