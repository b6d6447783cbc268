"""Writes docs/reference.md from the code: commands, settings, exit codes and findings (`make docs`).

The page holds nothing that is not in the code, so it cannot be wrong about it; `tests/style/test_reference.py`
fails when it is stale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from cli.main import lake
from lakefs.config import settings as config
from lakefs.errors import ERROR_TABLE
from lakefs.findings import Finding

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference.md"

HEAD: Final = """\
# Reference

Written by `make docs` from the code; do not edit.  How `lake sync` and `lake diff` compare with rclone, mc, aws s3 and
juicefs: [moving trees](moving.md#beside-other-tools).
"""

SETTINGS: Final = {
    "data": (
        "a path; several, in a list, are one lake on several devices",
        "`/var/lib/lake` as root, else `lake` in the user's data folder",
    ),
    "socket": ("a path of at most 107 bytes", "`/run/lake/lake.sock` as root, else in the run or data folder"),
    "socket_group": ("the name of a group that may use the socket", "none: the engine's user and root"),
    "native": ("`HOST:PORT` or `off`", "`off`"),
    "s3": ("`HOST:PORT` or `off`", f"`{config.DEFAULT_S3}`"),
    "s3_region": ("what S3 clients sign for", f"`{config.DEFAULT_REGION}`"),
    "s3_domains": (
        "host suffixes, with commas between: `s3.example.org` lets `models.s3.example.org` be bucket `models`",
        "none: buckets are named in paths only",
    ),
    "s3_tls_cert": ("a PEM file: the certificate, and those up to a known one", "none: plain HTTP"),
    "s3_tls_key": ("a PEM file: the certificate's key, not encrypted", "none"),
    "s3_access_log": ("`off`, `stderr` or a file", "`off`"),
    "s3_access_log_sample": ("`1/N`: one request of so many is logged, and every answer of 500 and more", "`1/1`"),
    "s3_door": ("`on`: answers to GET and HEAD are repeated while nothing has changed; `off`: never", "`on`"),
    "s3_door_memory": ("bytes of answers that each process keeps, `64M`", "`64M`"),
    "admin": ("`HOST:PORT` or `off`", f"`{config.DEFAULT_ADMIN}`"),
    "log_level": (", ".join(f"`{level}`" for level in config.LOG_LEVELS), "`info`"),
    "strict_permissions": (
        "`on`: refuse to start where folders, token or first key are open to others; `off`: log it",
        "`off`",
    ),
    "upload_expiry": ("number and unit: `90s`, `30m`, `12h`, `7d`; `0`: never", "`7d`"),
    "names_checkpoint_interval": ("number and unit: `90s`, `30m`, `12h`, `7d`; `0`: never", "`1h`"),
    "scrub_interval": ("number and unit, as `14d`; `0`: only by `lake scrub`", "`14d`"),
    "scrub_rate": ("bytes per second: `32M`, `1G`; `0`: as fast as it goes", "`64M`"),
    "io_uring": ("`auto` or `off`: read the disk through threads only", "`auto`"),
    "hot_index": ("`auto`, `off`, `memory`, or a file or DAX device that keeps it over a restart", "`auto`"),
    "hot_index_entries": ("chunks it has room for; `0`: it grows by itself", "`0`"),
    "dram_tier_bytes": ("`auto`, or bytes: `64M` and more; `0`: none", "`auto`: 1/16 of the memory, 4 GiB at most"),
    "rdma": ("`auto`: the first device, beside `native`; `off`; or the name of a device", "`auto`"),
    "timeout": ("for clients, gateways and mounts: seconds that an engine may be silent while a request waits", "`30`"),
    "heads": ("of a lake on several devices: processes that serve clients of this machine", "`1`"),
    "protect": ("of a lake on several devices: data and parity shards, chosen when it is made", "`4+2`"),
}


def reference() -> str:
    """The whole page."""
    parts = [HEAD, *_commands(), *_settings(), *_exit_codes(), *_findings()]
    return "\n".join(parts)


def _commands() -> Iterator[str]:
    yield "## Commands\n"
    for path, command in _walk("lake", lake, None):
        context = click.Context(command, info_name=path)
        usage = " ".join(command.collect_usage_pieces(context))
        yield f"### {path}\n"
        yield f"`{path} {usage}`\n"
        if command.help:
            yield _paragraphs(command.help)
        options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
        shown = [record for option in options if (record := option.get_help_record(context))]
        if shown:
            yield "| option | |\n|---|---|"
            yield "\n".join(f"| `{_cell(flag)}` | {_cell(text)} |" for flag, text in shown) + "\n"


def _walk(path: str, command: click.Command, parent: click.Context | None) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path, parent=parent)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            if not child.hidden:
                yield from _walk(f"{path} {name}", child, context)


def _paragraphs(text: str) -> str:
    """Help as Markdown: lines that click keeps as they are become a block."""
    paragraphs = []
    for paragraph in "\n".join(line.strip() for line in text.splitlines()).strip().split("\n\n"):
        kept = paragraph.removeprefix("\b\n")
        paragraphs.append(kept if kept == paragraph else f"```\n{kept}\n```")
    return "\n\n".join(paragraphs) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _settings() -> Iterator[str]:
    yield "## Settings\n"
    yield (
        f"Keys of `{config.DEFAULT_FILE}` (TOML, all values in quotes), each also a variable and, but for\n"
        "`timeout`, a flag of `lake serve`. Each source overrides the one before: file, variable, flag. An unknown\n"
        "key is an error.\n"
    )
    yield "| key | variable | flag | value | default |\n|---|---|---|---|---|"
    for name in config.SETTING_NAMES:
        value, default = SETTINGS[name]
        flag = "" if name == "timeout" else f"`--{name.replace('_', '-')}`"
        yield f"| `{name}` | `LAKE_{name.upper()}` | {flag} | {value} | {default} |"
    yield ""
    yield (
        "`LAKE_CONFIG` names another file. Clients read `LAKE_SERVER` (an address) and `LAKE_TOKEN`; where\n"
        "they find an engine without: [operations](operations.md#which-engine-a-client-uses).\n"
    )


def _exit_codes() -> Iterator[str]:
    yield "## Errors and exit codes\n"
    yield (
        "0: done. 1: damage, `get -r` left something that was wanted, or somebody answered a question with no.\n"
        "2: wrong usage. 130: interrupted. 141: the reader of the output went away. 70: a bug.\n"
        "Errors of the engine have these codes; with `--json` the name of the error is in the message on stderr.\n"
    )
    by_code: defaultdict[int, list[str]] = defaultdict(list)
    for row in ERROR_TABLE:
        by_code[row.exit_code].append(row.error.__name__)
    yield "| exit code | errors |\n|---|---|"
    yield "\n".join(f"| {code} | {', '.join(names)} |" for code, names in sorted(by_code.items())) + "\n"
    yield "| error | meaning | wire code | HTTP status | worth another try |\n|---|---|---|---|---|"
    for row in ERROR_TABLE:
        meaning = (row.error.__doc__ or "").split("\n")[0]
        retry = "yes" if row.error.retryable else "no"
        yield f"| {row.error.__name__} | {meaning} | {row.wire_code} | {row.http_status} | {retry} |"
    yield ""


def _findings() -> Iterator[str]:
    yield "## Findings\n"
    yield (
        "The `code` of what fsck, scrub and repair report: `lake fsck --json` (`findings`, `repairs`, `quarantine`),\n"
        "`lake scrub --json` (`damaged`), the log line `chunk_damaged`. Codes stay the same from release to release;\n"
        "messages may change. `note`: nothing stored is affected. Through a running engine an error that ends the\n"
        "whole check has the code of its class: `index-damaged`, `journal-damaged`, `store-damaged`, `chunk-damaged`.\n"
    )
    yield "| code | severity | meaning |\n|---|---|---|"
    for finding in Finding:
        yield f"| `{finding.code}` | {finding.severity} | {_cell(finding.value)} |"


if __name__ == "__main__":
    PAGE.write_text(reference() + "\n")
