"""Finds the address of the engine for a client.

The first of these is used: the address that the caller gives, LAKE_SERVER, the configured `socket`, the user's own
socket if something listens there, the system's socket.  Only the last two are tried here.  A given address is used as
it is: if it fails, that is an error, and no other engine is taken.

The choice is made once for each client, which connects to the same address again after a loss.

The limit of an engine's silence is found alike: the caller's, LAKE_TIMEOUT, the configured `timeout`, 30 s.
"""

from __future__ import annotations

import os
from contextlib import suppress

from lakefs.limits import ENGINE_SILENCE_S


def resolve(address: str | None, token: str | None) -> tuple[str, str]:
    """Return address and token; one that is not given is taken from the environment or the configuration.

    ConfigError.  EngineUnreachable or PermissionDenied if neither the user's nor the system's socket can be used.
    """
    where = address or os.environ.get("LAKE_SERVER") or _found()
    return where, os.environ.get("LAKE_TOKEN", "") if token is None else token


def silence_limit(timeout_s: float | None) -> float:
    """Return the seconds that an engine may be silent while a request waits.  InvalidArgument, ConfigError."""
    from lakefs.config.values import DEFAULT_FILE, checked_timeout, parse_timeout  # noqa: PLC0415
    from lakefs.errors import ConfigError, InvalidArgument  # noqa: PLC0415

    if timeout_s is not None:
        return checked_timeout(timeout_s)
    text = os.environ.get("LAKE_TIMEOUT")
    if text:
        try:
            return parse_timeout(text)
        except InvalidArgument as error:
            raise ConfigError(f"LAKE_TIMEOUT: {error.message}", subject="timeout") from error
    if os.environ.get("LAKE_CONFIG") or os.access(DEFAULT_FILE, os.R_OK):
        from lakefs.config.settings import load  # noqa: PLC0415

        with suppress(ConfigError):  # a client with an address does not depend on the engine's file
            return load().timeout
    return ENGINE_SILENCE_S


def _found() -> str:
    # Imported only here: a command with a given address starts sooner without it.
    from lakefs.config.settings import SYSTEM_SOCKET, load  # noqa: PLC0415

    config = load()
    if config.origins["socket"] != "default" or config.socket == SYSTEM_SOCKET:
        return f"unix:{config.socket}"
    return _first_that_listens({"your own socket": str(config.socket), "the system's socket": str(SYSTEM_SOCKET)})


def _first_that_listens(places: dict[str, str]) -> str:
    from lakefs.errors import EngineUnreachable, PermissionDenied  # noqa: PLC0415
    from lakefs.transport.sockets import REFUSED, connect_code, why_not  # noqa: PLC0415

    tried: list[str] = []
    is_refused = False
    for whose, path in places.items():
        code = connect_code(path)
        if code == 0:
            return f"unix:{path}"
        tried.append(f"{whose} {path} {why_not(path, code)}")
        is_refused = code in REFUSED
    message = f"no engine was found: {', and '.join(tried)}"
    if is_refused:
        raise PermissionDenied(f"{message}; or name another engine with --server or LAKE_SERVER", subject=path)
    raise EngineUnreachable(
        f"{message}; start one with: lake serve, or name one with --server or LAKE_SERVER", subject=path
    )
