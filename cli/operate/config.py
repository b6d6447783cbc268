"""`lake config`: the configuration that an engine started here would have."""

from __future__ import annotations

import click

from cli.terminal.output import json_option, write_json, write_line


@click.command()
@click.option("--config", "file", type=click.Path(), metavar="FILE", help="Instead of /etc/lake/lake.toml.")
@json_option
def config(file: str | None, as_json: bool) -> None:
    """Show the effective configuration, and where each setting comes from.

    Settings come from the file, LAKE_* variables and the flags of lake serve, each overriding the one before.
    """
    from lakefs.config.settings import load

    found = load(file=file)
    if as_json:
        write_json({"settings": found.as_text(), "origins": dict(found.origins)})
        return
    for name, value in found.as_text().items():
        write_line(f"{name:<14} {value:<40} ({found.origins[name]})".rstrip())
