"""`lake serve`: one engine in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import click

from cli.serve.s3_options import s3_options
from cli.terminal.process import run_loop, say


@click.command()
@click.option("--data", metavar="DIR", help="The store's folder; made at the first start.")
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
def serve(file: str | None, **settings: str | None) -> None:
    """Run an engine.

    Prints where it listens, then serves until SIGTERM or SIGINT; requests that have begun are finished.  Port 0
    picks a free port.  LAKE_SERVER is not used.

    The first start makes the store, and with S3 an access key.  Its secret is printed on a terminal; else it is in
    DIR/s3-first-key, readable by its owner alone, to be removed after use.  A first start that fails leaves nothing.
    Beside the system's engine a store of your own needs --data.
    """
    from cli.serve.faces import notify_manager, serve_admin_port, serve_s3_port
    from cli.serve.start_checks import check_first_start
    from cli.terminal.logs import log_to_stderr
    from engine.process.engine_process import run_engine
    from lakefs.config.settings import load

    config = load(file=file, flags=settings)
    log_to_stderr(config.log_level)
    faces = (serve_s3_port, serve_admin_port, notify_manager)

    async def run() -> None:
        await check_first_start(config)
        await run_engine(config, printer=say, faces=faces)

    run_loop(run)
