"""`lake bucket create|ls|set|rm`: buckets and their settings.  Only an empty bucket is removed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cli.terminal.completing import complete_buckets
from cli.terminal.output import iso_time, json_option, write_json, write_line
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.errors import BucketNotFound, InvalidName
from lakefs.names import parse_name, shown

if TYPE_CHECKING:
    from lakefs.wire.messages import BucketStat


@click.group()
@engine_options
def bucket() -> None:
    """Make, list, set up and remove buckets."""


@bucket.command()
@click.argument("name")
@json_option
@engine_options
@pass_target
def create(where: Target, name: str, as_json: bool) -> None:
    """Make a bucket."""
    with where.open(create=True) as lake:
        made = lake.create_bucket(_bucket_name(name))
    if as_json:
        write_json({"name": made.name, "created": iso_time(made.created_ns)})


@bucket.command("ls")
@json_option
@engine_options
@pass_target
def list_(where: Target, as_json: bool) -> None:
    """List the buckets."""
    with where.open() as lake:
        buckets = lake.buckets()
    if as_json:
        write_json({"buckets": [_shown(bucket) for bucket in buckets]})
        return
    for found_bucket in buckets:
        write_line(found_bucket.name)


@bucket.command("set")
@click.argument("name", shell_complete=complete_buckets)
@click.option(
    "--anonymous-read/--no-anonymous-read",
    default=None,
    help="Whether S3 clients without an access key may read and list it.",
)
@click.option(
    "--versioning",
    type=click.Choice(["enabled", "suspended"]),
    default=None,
    help="Whether what is overwritten or removed is kept as an old version; it can be suspended, not undone.",
)
@json_option
@engine_options
@pass_target
def set_(where: Target, name: str, anonymous_read: bool | None, versioning: str | None, as_json: bool) -> None:
    """Change settings of a bucket; without options, show them."""
    with where.open() as lake:
        found = lake.set_bucket(_bucket_name(name), anonymous_read=anonymous_read, versioning=versioning)
    if as_json:
        write_json(_shown(found))
    elif anonymous_read is None and versioning is None:
        write_line(f"anonymous-read {'yes' if found.anonymous_read else 'no'}")
        write_line(f"versioning     {found.versioning or 'never enabled'}")


@bucket.command()
@click.argument("name", shell_complete=complete_buckets)
@json_option
@engine_options
@pass_target
def rm(where: Target, name: str, as_json: bool) -> None:
    """Remove an empty bucket; lake rm -r NAME empties it."""
    with where.open() as lake:
        try:
            lake.remove_bucket(_bucket_name(name))
        except BucketNotFound as error:
            raise not_there(name) from error
    if as_json:
        write_json({"removed": _bucket_name(name)})


def _shown(found: BucketStat) -> dict[str, object]:
    """Return a bucket as one JSON object."""
    return {
        "name": found.name,
        "created": iso_time(found.created_ns),
        "anonymous_read": found.anonymous_read,
        "versioning": found.versioning,
    }


def not_there(text: str) -> BucketNotFound:
    """Return the error for a bucket that somebody wants to remove something of: nobody wants it made."""
    bucket = parse_name(text).bucket
    return BucketNotFound(f"bucket {shown(bucket)} does not exist; see which do with: lake bucket ls", subject=bucket)


def _bucket_name(text: str) -> str:
    """Return the bucket of a text that may be written as `lake://NAME/`."""
    name = parse_name(text)
    if name.key:
        raise InvalidName(f"{text!r} names an object or folder, not a bucket", subject=text)
    return name.bucket
