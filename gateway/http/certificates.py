"""The certificate of the S3 port and its key: read at the start, and again on request or when the files changed.

Rules kept here:
- The files are checked when a connection arrives, at most once a second; present connections keep the certificate
  that they began with.
- A new pair that cannot be used is logged as an error, and tried again only when the files change once more or a reload
  is requested; the old pair stays.
- An encrypted key is refused: there is no user to enter its password.

Reading two small files is the one thing here that blocks the loop, and only when they have changed.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Final

import structlog
import trio

from lakefs.errors import ConfigError

_LOOK_EVERY_S: Final = 1.0
_log: Final = structlog.get_logger(__name__)
_Signature = tuple[tuple[int, int, int], ...]


class Certificates:
    """One pair of files.  Raises ConfigError if it cannot be used at the start."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._paths = (certificate, key)
        self._signature = self._look()
        self._looked_at = 0.0
        self._context = load_pair(certificate, key)

    def current(self) -> ssl.SSLContext:
        """Return the context for a connection that begins now."""
        now = trio.current_time()
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            if self._look() != self._signature:
                self.reload()
        return self._context

    def reload(self) -> None:
        """Read the pair again; keep the old one if the new one cannot be used."""
        self._signature = self._look()  # before reading: a change during it is seen at the next look
        try:
            self._context = load_pair(*self._paths)
        except ConfigError as error:
            _log.error("certificate_not_reloaded", reason=error.message)
        else:
            _log.info("certificate_reloaded", path=str(self._paths[0]))

    def _look(self) -> _Signature:
        found = []
        for path in self._paths:
            try:
                stat = os.stat(path)
                found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
            except OSError:
                found.append((0, 0, 0))
        return tuple(found)


def load_pair(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a server's context with this chain and key.  ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        named = str(error.reason or "")
        if "MISMATCH" in named:
            reason = "certificate and key do not belong together"
        elif not named:  # OpenSSL gives no more for a file that it cannot read
            reason = "one of them is no PEM file of its kind, or the key is encrypted"
        else:
            reason = str(error)
        raise ConfigError(f"{certificate} and {key} cannot be used for TLS: {reason}") from error
    except OSError as error:
        path = next((path for path in (certificate, key) if not os.access(path, os.R_OK)), certificate)
        raise ConfigError(f"{path}: {error.strerror}; TLS needs it", subject=str(path)) from error
    return context
