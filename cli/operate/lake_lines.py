"""A lake's part of `lake status` and `lake gc`, for people: a line a member, what may be lost, how far healing is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cli.terminal.output import escaped, human_bytes, iso_time


def lake_lines(lake: dict[str, Any], folders: Sequence[dict[str, Any]] = ()) -> list[str]:
    """Return the lines about a lake; `folders` are those of this machine, with the member in each."""
    places = {each["member"]: each["folder"] for each in folders}
    etcd = [_line("etcd", _etcd(lake["etcd"]))] if "etcd" in lake else []
    if "members" not in lake:
        return [_line("lake", lake["reason"]), *etcd]
    gc = lake["gc"]
    lines = [
        _line(
            "lake", f"{lake['name'] or lake['id']}, protection {lake['protection']}, ring epoch {lake['ring_epoch']}"
        ),
        *[_line(f"member {member['id']}", _member(member, places)) for member in lake["members"]],
        *_shared_devices(lake["members"]),
        *[_line(f"folder {each['folder']}", _folder(each)) for each in folders if not each["serves"]],
        *_heads(lake.get("heads", ())),
        outlives(lake),
        *_out(lake),
        _line("walker", _walker(lake)),
        _line("gc", f"generation {lake['gc_generation']}, {_gc(gc)}"),
        *etcd,
        *replica_lines(lake),
    ]
    copies = [copy for shard in _shards(lake["names"]) for copy in shard.get("copies", ())]
    bad = [copy for copy in copies if copy["state"] != "good"]
    return lines + [_line(f"names in {copy['folder']}", f"{copy['state']}: {copy['reason']}") for copy in bad]


def outlives(lake: dict[str, Any]) -> str:
    """Return the sentence on losses that the lake outlives: `outlives 1 more device, no machine; names: 2 devices`."""
    devices, machines = lake["outlives"]["devices"], lake["outlives"]["machines"]
    if devices < 0:
        told = "too few members are up: some content cannot be read until they are back"
    else:
        told = f"outlives {_count(devices, 'more device')}, {_count(machines, 'machine')}"
        is_one = machines > 0 and not lake["names"].get("outlives_machines")
        told += " (not the one with the names)" if is_one else ""
    if "replicas" in lake["names"]:
        replicas = sum(each["state"] != "removed" for each in lake["names"]["replicas"])
        told += f"; names: {names_outlive(lake['names']) or 'none'} of {_count(replicas, 'machine')}"
    elif lake["names"]:
        told += f"; names: {_count(min(shard['devices'] for shard in _shards(lake['names'])), 'device')}"
    dirty = lake["walker"]["dirty_partitions"]
    if dirty and devices >= 0:
        told += f"; less until {_count(dirty, 'dirty partition')} {'is' if dirty == 1 else 'are'} healed"
    return told


def replica_lines(lake: dict[str, Any]) -> list[str]:
    """Return a line for each replica of the names, and one for their log; none for a lake without etcd.

    Where the names are in several shards, the shard's number stands first.
    """
    names = lake.get("names", {})
    if "replicas" not in names:
        return []
    others = names.get("shards", ())
    hosts, lines = _hosts(lake["members"]), []
    for shard in [{"shard": 0, **names}, *others]:
        title = f"names {shard['shard']}" if others else "names"
        lines += [_line(f"{title} {each['id']}", _replica(each, hosts)) for each in shard["replicas"]]
        tail = shard["tail"]
        told = f"{_count(tail['groups'], 'group')}, {human_bytes(tail['bytes'])} at the etcd"
        lines.append(_line(f"{title} log", told))
    return lines


def names_outlive(names: Mapping[str, Any]) -> int:
    """Return how many machines may be lost without names of any shard."""
    return min(int(shard["outlives_machines"]) for shard in _shards(names))


def _shards(names: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the state of the names of each shard."""
    return [names, *names.get("shards", ())]


def _replica(replica: dict[str, Any], hosts: Mapping[str, str]) -> str:
    told = replica["state"]
    if told == "silent":
        told += f" since {iso_time(replica['said_ns'])}"
    if told != "removed" and replica["groups_behind"]:
        told += f", {_count(replica['groups_behind'], 'group')} behind"
    if told != "removed" and replica.get("is_full"):
        told += ", its disk is full"
    return f"{told}, at {hosts.get(replica['machine'], 'machine ' + replica['machine'])}"


def _hosts(members: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the host of each machine, as the addresses of its members have it."""
    found = {}
    for member in members:
        for address in member["addresses"]:
            if address.startswith("tcp://"):
                found[member["machine"]] = address.removeprefix("tcp://").rpartition(":")[0]
    return found


def gc_lines(members: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each member's part in a cycle of gc: what it freed, or why it did not."""
    lines = []
    for member, part in members.items():
        told = f"{part.get('freed_shards', 0)} shards, {human_bytes(part.get('freed_bytes', 0))} freed"
        if part.get("kept_because"):
            told = f"freed nothing: {part['kept_because']}"
        elif part.get("not_collected_because"):
            told += f"; it did not collect its own: {part['not_collected_because']}"
        lines.append(_line(f"member {member}", told))
    return lines


def _member(member: dict[str, Any], places: Mapping[str, str]) -> str:
    state = member["state"] if member["up"] or member["state"] != "up" else "away"
    told = [state]
    if member["used_bytes"] is not None:
        told.append(f"{human_bytes(member['used_bytes'])} used, {human_bytes(member['free_bytes'])} free")
    if not member["places"]:
        told.append("no places")
    if place := places.get(member["id"]):
        told.append(f"in {place}")
    told += [f"at {address.removeprefix('tcp://')}" for address in member["addresses"] if address.startswith("tcp:")]
    if member["damaged_chunks"]:
        told.append(f"{member['damaged_chunks']} damaged")
    scrub = member.get("scrub")  # names of an older release do not say, nor does a member that is away
    if scrub and scrub["state"] != "idle":
        told.append(f"scrub {scrub['state']} at {scrub['position']:.1%}")
    if member.get("is_old"):  # names of an older release do not say
        told.append("came back as it was earlier, and is being compared with the others")
    return ", ".join(told) + (f": {member['reason']}" if member["reason"] else "")


def _folder(folder: dict[str, Any]) -> str:
    reason = folder.get("reason")
    return f"no member serves in it: {reason}" if reason else "no member in it"


def _shared_devices(members: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each device that several members lie on; names of an older release do not say."""
    by_device: dict[str, list[str]] = {}
    for member in members:
        if device := member.get("shared_device"):
            by_device.setdefault(device, []).append(member["id"][:12])
    lost = "lie on one device, and are lost together"
    return [_line("shared device", f"members {', '.join(ids)} {lost}") for ids in by_device.values()]


def _walker(lake: dict[str, Any]) -> str:
    walker = lake["walker"]
    last = walker["last_pass"]
    told = ["healed" if walker["healed"] else _count(walker["dirty_partitions"], "dirty partition")]
    if walker["position"]:
        eta_s = walker["eta_s"]
        told.append(f"{walker['position']:.1%} of a pass" + (f", {eta_s:.0f} s to go" if eta_s is not None else ""))
    if last["ended_ns"]:
        told.append(f"last pass {iso_time(last['ended_ns'])}: {last['chunks']} chunks, {last['stripes_left']} left")
    else:
        told.append("no full pass yet")
    if lake["ring_epochs"] > 1:
        told.append(f"{lake['ring_epochs']} tables in use")
    return ", ".join(told)


def _heads(heads: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each process that serves clients."""
    return [
        _line(
            f"head {head['pid']}", f"at {head['host']}, machine {head['machine']}, since {iso_time(head['since_ns'])}"
        )
        for head in heads
    ]


def _out(lake: dict[str, Any]) -> list[str]:
    """Return when a silent member is made out, or why none is; nothing of an earlier release's status."""
    if "out_after_s" not in lake:
        return []
    stops = "" if lake["out_stops"] == "off" else f", while no more than a {lake['out_stops']} is away"
    told = f"after {lake['out_after_s']} s of silence{stops}"
    return [_line("out", told + (f"; stopped: {lake['out_stopped_because']}" if lake["out_stopped_because"] else ""))]


def _etcd(etcd: dict[str, Any]) -> str:
    told = f"{', '.join(etcd['endpoints'])}, lake {etcd['name']}, cluster {etcd['cluster'] or 'not known yet'}"
    return told + ("" if etcd["reachable"] else f", cannot be reached: {etcd['reason']}")


def _gc(gc: dict[str, Any]) -> str:
    last = gc["last"]
    if last is None:
        return "no cycle since the start"
    kept = sum(bool(member.get("kept_because")) for member in last["members"].values())
    told = f"last cycle {iso_time(gc['last_ended_ns'])}: {human_bytes(last['freed_bytes'])} freed"
    return told + (f", {_count(kept, 'member')} took no part" if kept else "")


def _count(number: int, what: str) -> str:
    """Return `no WHAT`, `1 WHAT` or `N WHATs`."""
    return f"{number or 'no'} {what}{'' if number <= 1 else 's'}"


def _line(name: str, value: str) -> str:
    return f"{escaped(name):<39} {escaped(value)}".rstrip()
