"""The engine that a command uses: one at an address, or a store that this process opens itself.

`--data DIR` opens the store here, with its exclusive lock.  Otherwise `--server`, then `LAKE_SERVER`, and so on, as
`lakefs.client.address` describes.  The options may be before or after the verb; the later one wins.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from lakefs.errors import LocalFileError, StoreUnusable

if TYPE_CHECKING:
    from lakefs.client.blocking.lake import Lake
    from lakefs.wire.engine_port import Reply
    from lakefs.wire.messages import Request

_PATH: Final = click.Path(path_type=Path)
_OPTIONS: Final[tuple[tuple[str, type | click.Path, str, str], ...]] = (
    ("token_file", _PATH, "FILE", "File with the token that a TCP engine asks for; else LAKE_TOKEN."),
    ("data", _PATH, "DIR", "Open the store in this folder directly, without an engine."),
    (
        "server",
        str,
        "ADDRESS",
        "The engine: unix:PATH or tcp://HOST:PORT; else LAKE_SERVER, else the socket of the configuration, "
        "of this user, or of the system.",
    ),
)
"""For each option: attribute of the target, type, metavar, help.  Help lists the last one first."""
Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass
class Target:
    """The options given."""

    server: str | None = None
    data: Path | None = None
    token_file: Path | None = None

    def open(self, *, create: bool = False) -> AbstractContextManager[Lake]:
        """Return the lake to work on, closed at the end of the block.  `create`: with --data, make a missing store.

        Raises EngineUnreachable, PermissionDenied; with --data StoreLocked, StoreUnusable.
        """
        if self.data is not None:
            return _open_folder(self.data, create)
        from lakefs.client.connect import connect

        return connect(self.address(), token=self.token())

    def ask(self, request: Request, *, timeout_s: float | None = None) -> Reply:
        """Send one request and return its reply, without loading the modules of transfers.  Raises as `open`.

        `timeout_s`: how long an engine may be silent, instead of what is configured.
        """
        if self.data is not None:
            from lakefs.client.facade import driver_of
            from lakefs.steps.steps import send

            with self.open() as lake:
                return driver_of(lake).run(send(request))
        from lakefs.client.address import resolve, silence_limit
        from lakefs.client.blocking.engine import connect_blocking

        address, token = resolve(self.address(), self.token())
        with connect_blocking(address, token=token, timeout_s=silence_limit(timeout_s)) as engine:
            return engine.call(request)

    def address(self) -> str:
        """Return the engine's address, `unix:PATH` or `tcp://HOST:PORT`, the same at every call.

        Raises EngineUnreachable, PermissionDenied.
        """
        from lakefs.client.address import resolve

        self.server = resolve(self.server, None)[0]
        return self.server

    def token(self) -> str | None:
        """Return the token for TCP, from --token-file; None: use that of LAKE_TOKEN, if any."""
        if self.token_file is None:
            return None
        try:
            return self.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise LocalFileError(f"{self.token_file}: {reason}", subject=str(self.token_file)) from error


def _open_folder(data: Path, create: bool) -> AbstractContextManager[Lake]:
    from cli.terminal.logs import log_to_stderr
    from engine.process.embedded import open_lake

    log_to_stderr("warning")  # stdout is for results
    if not (data / "superblock").exists():
        if not create:
            raise StoreUnusable(f"there is no store in {data}; lake serve --data {data} makes one", subject=str(data))
        try:
            data.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise LocalFileError(f"{data}: {error.strerror}", subject=str(data)) from error
    return open_lake(data)


def engine_options(command: Command) -> Command:
    """Add --server, --data and --token-file, noted in the context's target."""
    for attribute, kind, metavar, text in _OPTIONS:
        flag = f"--{attribute.replace('_', '-')}"
        note = _note(attribute)
        command = click.option(flag, type=kind, metavar=metavar, help=text, expose_value=False, callback=note)(command)
    return command


def _note(attribute: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        target = context.find_object(Target)
        if value is not None and target is not None:
            setattr(target, attribute, value)

    return callback


pass_target = click.make_pass_decorator(Target)
"""Gives a command the target of its options as first argument."""
