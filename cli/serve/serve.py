"""`lake serve`: one engine in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from cli.serve.s3_options import s3_options
from cli.terminal.process import run_loop, say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lakefs.config.settings import Address, Config

_OF_MEMBERS: Final = ("log_level", "scrub_interval", "scrub_rate", "io_uring")
"""Settings of a lake that are each member's."""
_NO_PORTS: Final = ("--s3", "off", "--admin", "off")
_NO_FACES: Final = (*_NO_PORTS, *("--rdma", "off", "--dram-tier-bytes", "0", "--upload-expiry", "0"))
"""A member has no client but the lake: no ports, no RDMA, and no tier for clients of this machine."""


@click.command()
@click.option(
    "--data",
    metavar="DIR",
    multiple=True,
    help="The store's folder; made at the first start.  Several, one on each device: one lake over all of them.",
)
@click.option("--protect", metavar="K+M", help="Of several devices: data and parity shards; 4+2, chosen once.")
@click.option("--heads", metavar="N", help="Of several devices: processes that serve clients of this machine; 1.")
@click.option("--accept-loss", is_flag=True, help="Make a lake although the loss of one device would harm it.")
@click.option("--new-devices", is_flag=True, help="Empty folders become new members of a lake that exists.")
@click.option("--without", metavar="ID", multiple=True, help="A copy of a lake's names that is lost for ever.")
@click.option("--restored", is_flag=True, help="The folders of a lake's names were put back from a backup.")
@click.option("--member", hidden=True, metavar="LAKE", help="Be the process of a member of this lake.")
@click.option("--head", hidden=True, metavar="NAMES", help="Be one more head, whose names are there.")
@click.option("--inherited", hidden=True, type=int, multiple=True, metavar="FD", help="A socket that listens.")
@click.option("--deadline", hidden=True, type=int, metavar="FD", help="Memory that says up to when it takes shards.")
@click.option("--parent", hidden=True, type=int, metavar="FD", help="Socket to the process that serves the lake.")
@click.option("--socket", metavar="PATH", help="Unix socket of the native protocol.")
@click.option("--socket-group", metavar="GROUP", help="Group that may use the socket, beside root and this user.")
@click.option("--native", metavar="HOST:PORT", help="Native protocol over TCP, with the token of DIR/native.token.")
@click.option("--s3", metavar="HOST:PORT", help="S3 over HTTP; 127.0.0.1:9000; off for none.")
@s3_options
@click.option("--admin", metavar="HOST:PORT", help="Health and metrics over HTTP; off for none.")
@click.option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
@click.option(
    "--strict-permissions",
    flag_value="on",
    help="Do not start where folders, token or first key are open to others; else that is logged.",
)
@click.option(
    "--upload-expiry",
    metavar="TIME",
    help="Age at which an unfinished multipart upload is removed, as 12h or 7d; 0 for never.",
)
@click.option(
    "--names-checkpoint-interval",
    metavar="TIME",
    help="From one checkpoint of the names in a lake with etcd to the next, as 1h; 0 for none.",
)
@click.option(
    "--scrub-interval",
    metavar="TIME",
    help="From one full read of all that is stored to the next, as 14d; 0 for only by lake scrub.",
)
@click.option("--scrub-rate", metavar="BYTES", help="Bytes per second that scrub reads; 64M; 0 for all it can.")
@click.option("--io-uring", metavar="auto|off", help="auto: read the disk through io_uring where there is one.")
@click.option("--hot-index", metavar="auto|off|memory|PATH", help="Where local clients look up places; a path is kept.")
@click.option("--hot-index-entries", metavar="N", help="Chunks it has room for; 0: it grows by itself.")
@click.option("--dram-tier-bytes", metavar="SIZE", help="Memory for what is read often, as 8G; auto; 0 for none.")
@click.option("--rdma", metavar="auto|off|DEVICE", help="auto: beside TCP, the first device; needs libibverbs1.")
@click.option("--config", "file", metavar="FILE", help="Instead of /etc/lake/lake.toml.")
def serve(
    file: str | None,
    accept_loss: bool,
    new_devices: bool,
    without: tuple[str, ...],
    restored: bool,
    member: str | None,
    head: str | None,
    inherited: tuple[int, ...],
    deadline: int | None,
    parent: int | None,
    **settings: str | tuple[str, ...] | None,
) -> None:
    """Run an engine, or with several --data a whole lake over the devices of this machine.

    Prints where it listens, then serves until SIGTERM or SIGINT; requests that have begun are finished.  Port 0
    picks a free port.  LAKE_SERVER is not used.

    The first start makes the store, and with S3 an access key.  Its secret is printed on a terminal; else it is in
    DIR/s3-first-key, readable by its owner alone, to be removed after use.  A first start that fails leaves nothing.
    Beside the system's engine a store of your own needs --data.
    """
    from lakefs.config.settings import load

    config = load(file=file, flags=settings)
    from cli.terminal.logs import log_to_stderr

    log_to_stderr(config.log_level)
    if member is not None and parent is not None:
        run_loop(partial(_serve_member, config, bytes.fromhex(member), parent, deadline))
    elif head is not None and parent is not None:
        run_loop(partial(_serve_head, config, head, inherited, parent))
    elif _is_lake(config):
        options = {"accept_loss": accept_loss, "new_devices": new_devices, "without": without, "restored": restored}
        run_loop(partial(_serve_lake, config, options))
    else:
        run_loop(partial(_serve_engine, config))


async def _serve_engine(config: Config) -> None:
    from cli.serve.faces import notify_manager, serve_admin_port, serve_s3_port
    from cli.serve.start_checks import check_first_start
    from engine.process.engine_process import run_engine
    from lakefs.errors import ConfigError

    if config.heads > 1:
        raise ConfigError("heads are of a lake: one engine serves all its clients in one process", subject="heads")
    await check_first_start(config)
    await run_engine(config, printer=say, faces=(serve_s3_port, serve_admin_port, notify_manager))


async def _serve_lake(config: Config, options: dict[str, Any]) -> None:
    from cli.serve.faces import notify_manager, serve_admin_port, serve_s3_port
    from cli.serve.start_checks import check_first_start
    from engine.lake.lake_process import LakeOptions, run_lake

    await check_first_start(config)
    await run_lake(
        config,
        printer=say,
        member_command=partial(member_command, config),
        head_command=partial(head_command, config),
        faces=(serve_s3_port, serve_admin_port, notify_manager),
        options=LakeOptions(**options),
    )


async def _serve_member(config: Config, lake_id: bytes, parent: int, deadline: int | None) -> None:
    from engine.host.shared_deadline import SharedDeadline
    from engine.lake.children import report_to_parent
    from engine.process.engine_process import run_engine

    face = partial(report_to_parent, parent, news=_figures_of_member)
    with _last_words(parent):
        may_take = None if deadline is None else SharedDeadline(deadline).holds
        await run_engine(config, printer=lambda _: None, faces=(face,), cluster_id=lake_id, may_take=may_take)


def _figures_of_member(running: Any) -> dict[str, Any]:
    return {"scrub": running.store.scrubber.figures()}


async def _serve_head(config: Config, names: str, inherited: Sequence[int], parent: int) -> None:
    from engine.lake.lake_process import run_head

    with _last_words(parent):
        await run_head(config, names=names, sockets=inherited, parent=parent)


@contextmanager
def _last_words(parent: int) -> Iterator[None]:
    """Say to the parent with which error the block ends, if it ends with one."""
    from cli.terminal.process import single_error
    from engine.lake.children import report_failure
    from lakefs.errors import LakeError

    kept = os.dup(parent)  # the other is closed when the process stops serving
    try:
        yield
    except* LakeError as errors:
        report_failure(kept, str(single_error(errors)))
        raise


def _is_lake(config: Config) -> bool:
    """Return True if a lake is served, and not one engine: several folders, or one that belongs to a lake's machine."""
    if config.devices:
        return True
    from engine.lake.machine import MACHINE_FILE

    return (config.data / MACHINE_FILE).exists()


def member_command(
    config: Config, folder: Path, socket: Path, lake_id: bytes, address: Address | None = None
) -> list[str]:
    """Return the command of a member's process: an engine of its own, which only this lake's processes ask."""
    shown = config.as_text()
    passed_on = [f"--{name.replace('_', '-')}={shown[name]}" for name in _OF_MEMBERS]
    own = [
        "--data",
        str(folder),
        "--socket",
        str(socket),
        "--native",
        str(address or "off"),
        *_NO_FACES,
        "--hot-index",
        "off" if config.hot_index == "off" else "memory",
        *passed_on,
        "--member",
        lake_id.hex(),
        "--parent",
    ]
    return [sys.executable, "-P", "-m", "cli.main", "serve", "--config", os.devnull, *own]


def head_command(config: Config, number: int, sockets: Sequence[int], names: str) -> list[str]:
    """Return the command of a head's process.  The heads and the process that starts them share the DRAM tier's bytes.

    `--heads` says by how many the memory is divided that is registered for RDMA.  A shared index that has a path has
    one for each head.
    """
    from engine.lake.lake_process import tier_share

    index = config.hot_index if not config.hot_index.startswith("/") else f"{config.hot_index}.{number}"
    own = [
        *(part for folder in config.folders for part in ("--data", str(folder))),
        *("--socket", str(config.socket), "--socket-group", config.socket_group),
        *("--native", str(config.native or "off")),
        *_NO_PORTS,
        *("--rdma", config.rdma, "--heads", str(config.heads)),
        *("--dram-tier-bytes", str(tier_share(config))),
        *("--hot-index", index, "--hot-index-entries", str(config.hot_index_entries)),
        *("--log-level", config.log_level),
        *(part for socket in sockets for part in ("--inherited", str(socket))),
        *("--head", names, "--parent"),
    ]
    return [sys.executable, "-P", "-m", "cli.main", "serve", "--config", os.devnull, *own]
