"""`lake key create|ls|rm`: access keys of S3 clients.  A secret is printed once, when its key is created."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cli.terminal.completing import complete_access_keys, complete_buckets
from cli.terminal.output import escaped, iso_time, json_option, notice, write_json, write_line
from cli.terminal.target import Target, engine_options, pass_target

if TYPE_CHECKING:
    from lakefs.wire.messages import AccessKeyStat


@click.group()
@engine_options
def key() -> None:
    """Make, list and revoke the access keys of S3 clients."""


@key.command()
@click.option(
    "--bucket",
    "buckets",
    multiple=True,
    metavar="NAME",
    help="Only for this bucket; may be repeated.",
    shell_complete=complete_buckets,
)
@click.option("--read-only", is_flag=True, help="Only for reading and listing.")
@json_option
@engine_options
@pass_target
def create(where: Target, buckets: tuple[str, ...], read_only: bool, as_json: bool) -> None:
    """Make an access key and print it with its secret, which is not shown again.

    Without --bucket it is for all buckets.
    """
    with where.open(create=True) as lake:
        made = lake.create_access_key(buckets=buckets, read_only=read_only)
        missing = [name for name in buckets if not lake.exists(name)]
    for name in missing:
        bucket = escaped(name)
        notice(f"lake: bucket {bucket} does not exist yet; until it does, the key opens nothing there: lake bucket ls")
    if as_json:
        write_json({"access_key": made.access_key, "secret_key": made.secret_key} | _limits(made))
        return
    write_line(f"access key  {made.access_key}")
    write_line(f"secret key  {made.secret_key}")


@key.command("ls")
@json_option
@engine_options
@pass_target
def list_(where: Target, as_json: bool) -> None:
    """List the access keys; secrets are not shown."""
    with where.open() as lake:
        keys = lake.access_keys()
    if as_json:
        write_json({"keys": [{"access_key": found.access_key} | _limits(found) for found in keys]})
        return
    for found in keys:
        may = "read-only " if found.read_only else "read-write"
        write_line(f"{found.access_key}  {may}  {' '.join(found.buckets) or '(all buckets)'}")


@key.command()
@click.argument("access_key", shell_complete=complete_access_keys)
@json_option
@engine_options
@pass_target
def rm(where: Target, access_key: str, as_json: bool) -> None:
    """Revoke an access key."""
    with where.open() as lake:
        lake.remove_access_key(access_key)
    if as_json:
        write_json({"removed": access_key})


def _limits(found: AccessKeyStat) -> dict[str, object]:
    """Return the permissions of a key, as members of a JSON object."""
    return {"buckets": found.buckets, "read_only": found.read_only, "created": iso_time(found.created_ns)}
