"""`lake gateway`: S3 alone, in front of an engine elsewhere, in one process or several."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cli.serve.s3_options import s3_options
from cli.terminal.process import run_loop, say
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.errors import ConfigError
from lakefs.limits import GATEWAY_PROCESSES_MAX

if TYPE_CHECKING:
    from lakefs.config.settings import Address, Config

DEFAULT_ADMIN = "127.0.0.1:9002"


@click.command()
@click.option("--s3", metavar="HOST:PORT", help="Where S3 clients connect; 127.0.0.1:9000.")
@click.option(
    "--processes",
    type=click.IntRange(1, GATEWAY_PROCESSES_MAX),
    default=1,
    show_default=True,
    help="So many serve the port; one that ends is started again.",
)
@click.option(
    "--share-port", is_flag=True, help="Join other gateways of this user that serve the same address already."
)
@s3_options
@click.option(
    "--admin", metavar="HOST:PORT", default=DEFAULT_ADMIN, show_default=True, help="Health and metrics; off for none."
)
@click.option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
@click.option("--config", "file", metavar="FILE", help="Instead of /etc/lake/lake.toml.")
@click.option("--member", type=int, hidden=True, help="Descriptor to the leader of several.")
@engine_options
@pass_target
def gateway(
    where: Target,
    /,
    s3: str | None,
    processes: int,
    share_port: bool,
    admin: str,
    log_level: str | None,
    file: str | None,
    member: int | None,
    **s3_settings: str | None,
) -> int:
    """Serve S3 from the engine at --server, until SIGTERM or SIGINT.

    A gateway keeps no state: any number may run, on this machine or others.  Settings are those of S3 in the
    configuration; the engine's admin address and data folder are not used.  While the engine is away, requests are
    answered with 503, and the gateway waits for it.
    """
    from functools import partial

    from cli.serve.gateway_process import GatewayPlan, run_gateway
    from cli.serve.gateway_workers import run_team
    from cli.terminal.logs import log_to_stderr
    from lakefs.client.address import resolve
    from lakefs.config.settings import load

    if where.data is not None:
        raise click.UsageError("a gateway is in front of an engine: give --server, not --data")
    flags = {"s3": s3, "admin": admin, "log_level": log_level, **s3_settings}
    config = load(file=file, flags=flags)
    log_to_stderr(config.log_level)
    address, token = resolve(where.server, where.token())
    plan = GatewayPlan(config, _s3_address(config), address, token, share_port, member)
    if processes == 1:
        run_loop(partial(run_gateway, plan, say))
        return 0
    arguments = ["--server", address, "--share-port", "--admin", "off"]
    for name, value in flags.items():
        if value is not None and name not in ("s3", "admin"):
            arguments += [f"--{name.replace('_', '-')}", value]
    if file is not None:
        arguments += ["--config", file]
    return run_loop(partial(run_team, plan, processes, arguments, say))


def _s3_address(config: Config) -> Address:
    if config.s3 is None:
        raise ConfigError("s3 is off, and a gateway serves nothing else: give --s3 HOST:PORT", subject="s3")
    return config.s3
