"""The S3 options that the engine and a gateway share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

C = TypeVar("C", bound=Callable[..., Any])
_OPTIONS: Final = (
    click.option("--s3-region", metavar="NAME", help="What S3 clients sign for; us-east-1."),
    click.option(
        "--s3-domains",
        metavar="NAMES",
        help="Host suffixes, with commas between, behind the name of a bucket: BUCKET.s3.example.org.",
    ),
    click.option("--s3-signature-v2", metavar="on|off", help="Accept signatures of version 2 too; off."),
    click.option(
        "--s3-accept-sse", metavar="AES256|off", help="Accept requests for encryption at rest: the disks have it; off."
    ),
    click.option("--s3-access-log", metavar="FILE", help="One line of JSON for each S3 request; stderr; off for none."),
    click.option(
        "--s3-access-log-sample", metavar="1/N", help="Log one request of so many, and errors of ours always."
    ),
    click.option("--s3-door", metavar="on|off", help="Repeat answers while nothing has changed; on."),
    click.option("--s3-door-memory", metavar="BYTES", help="Most bytes of answers that each process keeps; 64M."),
    click.option("--s3-tls-cert", metavar="FILE", help="Certificate chain (PEM): S3 over TLS, and nothing else."),
    click.option("--s3-tls-key", metavar="FILE", help="The key of the certificate (PEM)."),
)


def s3_options(command: C) -> C:
    """Add the options: region, domains, access log, door and certificate, as in the settings."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
