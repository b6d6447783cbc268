"""Room for what is made anew when a device takes the place of another one.  From the lake's status; changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from cli.terminal.output import human_bytes
from lakefs.errors import PreconditionFailed


def check_room(folder: Path, members: Sequence[Mapping[str, Any]], lost: str) -> None:
    """Raise PreconditionFailed if a member's shards would not fit in a folder and what the other members have free."""
    new_bytes = shutil.disk_usage(_existing(folder)).free
    wanted_bytes, free_bytes = bytes_to_make(members, lost), _free_bytes(members, lost)
    lacking_bytes = wanted_bytes - new_bytes - free_bytes
    if lacking_bytes > 0:
        raise PreconditionFailed(
            f"{folder} has {human_bytes(new_bytes)} free and the other members {human_bytes(free_bytes)}, and "
            f"{human_bytes(wanted_bytes)} are to be made anew: {human_bytes(lacking_bytes)} too little; give a larger "
            "device, add another one first, or accept with --accept-loss that content stays short of shards",
            subject=str(folder),
        )


def smaller_by(folder: Path, members: Sequence[Mapping[str, Any]], lost: str) -> str:
    """Return by how much a folder's device is smaller than the one that it replaces, for people; empty if it is not."""
    before_bytes = next((each["room_bytes"] for each in members if each["id"] == lost), 0)
    room_bytes = shutil.disk_usage(folder).total
    if room_bytes >= before_bytes:
        return ""
    less = f"{human_bytes(before_bytes - room_bytes)} less than the one that it replaces"
    return f"{folder} has {human_bytes(room_bytes)}, {less}: other members take what it has no room for"


def bytes_to_make(members: Sequence[Mapping[str, Any]], lost: str) -> int:
    """Return the bytes of a member; of one that does not answer, as others have for as many places."""
    member = next((each for each in members if each["id"] == lost), None)
    if member is None or not member["places"]:
        return 0
    if member["used_bytes"] is not None:
        return int(member["used_bytes"])
    known = [each for each in members if each["used_bytes"] is not None and each["places"]]
    used_bytes, places = sum(each["used_bytes"] for each in known), sum(each["places"] for each in known)
    return used_bytes * int(member["places"]) // places if places else 0


def _free_bytes(members: Sequence[Mapping[str, Any]], lost: str) -> int:
    """Return the room of the members that may take shards; those of one device have it once."""
    taking = [each for each in members if each["id"] != lost and each["up"] and each["state"] == "up"]
    by_device = {each.get("shared_device") or each["id"]: each["free_bytes"] or 0 for each in taking}
    return sum(by_device.values())


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(each for each in chain([folder], folder.absolute().parents) if each.exists())
