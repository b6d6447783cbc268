"""Addresses of engines: `unix:PATH` and `tcp://HOST:PORT`.  Imports no trio, so that commands start quickly."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from lakefs.errors import InvalidArgument

UNIX_PATH_BYTES_MAX: Final = 107
"""sockaddr_un holds 108 bytes, the last one zero."""
_UNIX: Final = "unix:"
_TCP: Final = "tcp://"


@dataclass(frozen=True)
class UnixAddress:
    """A Unix socket by its path."""

    path: str

    def __str__(self) -> str:
        return f"{_UNIX}{self.path}"


@dataclass(frozen=True)
class TcpAddress:
    """A TCP socket; `port` 0 lets the system pick one.  IPv6 hosts are written in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{_TCP}{host}:{self.port}"


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """Parse an address.  InvalidArgument."""
    if text.startswith(_UNIX):
        return _unix(text.removeprefix(_UNIX), text)
    if text.startswith(_TCP):
        return parse_host_port(text.removeprefix(_TCP), text)
    raise InvalidArgument(f"{text!r} is no address; write unix:PATH or tcp://HOST:PORT", subject=text)


def parse_host_port(text: str, subject: str = "") -> TcpAddress:
    """Parse `HOST:PORT` or `[HOST]:PORT`.  InvalidArgument."""
    host, colon, port_text = text.rstrip("/").rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise InvalidArgument(f"{text!r}: write an IPv6 address in brackets, as in [::1]:9100", subject=subject or text)
    is_number = port_text.isascii() and port_text.isdigit() and len(port_text) <= 5
    if not colon or not host or not is_number or int(port_text) > 65535:
        raise InvalidArgument(f"{text!r} is not HOST:PORT", subject=subject or text)
    return TcpAddress(host, int(port_text))


def _unix(path: str, text: str) -> UnixAddress:
    if not path or "\0" in path:
        raise InvalidArgument(f"{text!r} names no socket; write unix:PATH", subject=text)
    if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
        raise InvalidArgument(
            f"the socket's path is longer than {UNIX_PATH_BYTES_MAX} bytes, which Unix sockets cannot have: {path}",
            subject=path,
        )
    return UnixAddress(path)
