"""`lake kv ls|stat|set|purge`: spaces of keyed blobs, their settings and their usage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cli.terminal.completing import complete_spaces
from cli.terminal.output import escaped, human_bytes, iso_time, json_option, notice, write_json, write_line
from cli.terminal.target import Target, engine_options, pass_target

if TYPE_CHECKING:
    from lakefs.wire.messages import SpaceStat


@click.group()
@engine_options
def kv() -> None:
    """List, set and purge spaces of keyed blobs, as caches of inference servers use them."""


@kv.command("ls")
@json_option
@engine_options
@pass_target
def list_(where: Target, as_json: bool) -> None:
    """List the spaces with their usage."""
    with where.open() as lake:
        spaces = lake.spaces()
    if as_json:
        write_json({"spaces": [_members(space) for space in spaces]})
        return
    if spaces:
        write_line(f"{'VALUES':>12}  {'SIZE':>10}  {'QUOTA':>10}  SPACE")
    for space in spaces:
        quota = human_bytes(space.quota_bytes) if space.quota_bytes else "no quota"
        write_line(f"{space.entries:>12}  {human_bytes(space.value_bytes):>10}  {quota:>10}  {escaped(space.name)}")


@kv.command()
@click.argument("space", shell_complete=complete_spaces)
@json_option
@engine_options
@pass_target
def stat(where: Target, space: str, as_json: bool) -> None:
    """Show a space: its settings and its usage."""
    from lakefs.client.facade import driver_of

    with where.open() as lake:
        driver = driver_of(lake)
        found = driver.run(driver.steps.open_space(space, create=False))
    _show(found, as_json)


@kv.command("set")
@click.argument("space", shell_complete=complete_spaces)
@click.option("--quota", metavar="SIZE", help="Most bytes of its values, as 200G; 0: no quota.")
@click.option("--ttl", metavar="TIME", help="Time that values stored from now on last, as 7d; 0: for ever.")
@json_option
@engine_options
@pass_target
def set_(where: Target, space: str, quota: str | None, ttl: str | None, as_json: bool) -> None:
    """Set quota and TTL of a space; make it if it does not exist."""
    from lakefs.client.facade import driver_of

    with where.open(create=True) as lake:
        driver = driver_of(lake)
        found = driver.run(driver.steps.open_space(space, quota=quota, ttl=ttl))
    _show(found, as_json)
    if found.is_first:
        notice(
            "lake: this is the store's first space: releases that know no spaces do not open the store any more, until "
            "all spaces are purged and the engine has been restarted"
        )


@kv.command()
@click.argument("space", shell_complete=complete_spaces)
@json_option
@engine_options
@pass_target
def purge(where: Target, space: str, as_json: bool) -> None:
    """Remove a space with all its values.  Programs that use it make it anew, empty."""
    with where.open() as lake:
        lake.remove_space(space)
    if as_json:
        write_json({"removed": space})


def _show(space: SpaceStat, as_json: bool) -> None:
    members = _members(space)
    if as_json:
        write_json(members)
        return
    for name, value in members.items():
        write_line(f"{name:<12}{escaped(value) if isinstance(value, str) else value}")


def _members(space: SpaceStat) -> dict[str, object]:
    """Return a space as members of a JSON object."""
    return {
        "space": space.name,
        "created": iso_time(space.created_ns),
        "quota_bytes": space.quota_bytes,
        "ttl_s": space.ttl_s,
        "entries": space.entries,
        "value_bytes": space.value_bytes,
    }
