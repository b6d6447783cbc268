"""`lake cluster status|drain|remove`: the members of a lake on several devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cli.terminal.output import json_option, notice, write_json, write_line
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.errors import InvalidArgument

if TYPE_CHECKING:
    from lakefs.client.blocking.lake import Lake


@click.group()
@engine_options
def cluster() -> None:
    """Show, drain and remove members of a lake on several devices.

    MEMBER is the beginning of its id, as lake cluster status shows it, or its folder on this machine.
    """


@cluster.command()
@json_option
@engine_options
@pass_target
def status(where: Target, as_json: bool) -> None:
    """Show each member, the losses that the lake outlives, and how far healing is."""
    from cli.operate.lake_lines import lake_lines

    with where.open() as lake:
        found, folders = _lake_of(lake)
    if as_json:
        write_json({**found, "folders": folders})
        return
    for line in lake_lines(found, folders):
        write_line(line)


@cluster.command()
@click.argument("member")
@engine_options
@pass_target
def drain(where: Target, member: str) -> None:
    """Let other members take a member's places, and move its shards to them.  Safe to repeat.

    Returns at once; lake cluster status shows how far it is.  When nothing is left in it, remove it.
    """
    from lakefs.client.facade import driver_of
    from lakefs.wire.messages import MEMBER_DRAIN

    with where.open() as lake:
        found = _member_of(lake, member)
        driver = driver_of(lake)
        driver.run(driver.steps.change_member(bytes.fromhex(found), MEMBER_DRAIN))
    notice(f"lake: member {found} is drained: its shards move to others; see how far with: lake cluster status")


@cluster.command()
@click.argument("member")
@click.option("--accept-loss", is_flag=True, help="Its device is lost: what it had is made from the other shards.")
@engine_options
@pass_target
def remove(where: Target, member: str, accept_loss: bool) -> None:
    """Remove a member for ever: one that was drained and holds nothing, or whose device is lost.  Safe to repeat."""
    from lakefs.client.facade import driver_of
    from lakefs.wire.messages import MEMBER_REMOVE

    with where.open() as lake:
        found = _member_of(lake, member)
        driver = driver_of(lake)
        driver.run(driver.steps.change_member(bytes.fromhex(found), MEMBER_REMOVE, accept_loss=accept_loss))
    notice(f"lake: member {found} was removed; its folder is not used any more")


def _lake_of(lake: Lake) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the lake's part of the status, and its folders on this machine.  InvalidArgument for one engine."""
    status = lake.status()
    if "lake" not in status:
        raise InvalidArgument("this is one engine on one device, and has no members")
    return status["lake"], status.get("folders", [])


def _member_of(lake: Lake, text: str) -> str:
    """Return the id of the member that a text names, in hex.  InvalidArgument unless there is exactly one."""
    found, folders = _lake_of(lake)
    places = {each["folder"].rstrip("/"): each["member"] for each in folders if each["member"]}
    if text.rstrip("/") in places:
        return str(places[text.rstrip("/")])
    named = [member["id"] for member in found.get("members", ()) if text and member["id"].startswith(text.lower())]
    if len(named) != 1:
        many = "several members" if named else "no member"
        raise InvalidArgument(f"{text!r} names {many}; see them with: lake cluster status", subject=text)
    return str(named[0])
