"""S3 at one address: HTTP server, TLS, access log and counts, put together for `lake serve` and `lake gateway`.

`S3Face` serves one store (`Lakes`), reloads certificate and access log on request, and drains.  It imports neither the
engine nor the command line.  A warning is logged if it serves without TLS at an address that others can reach.
"""

from __future__ import annotations

import ipaddress
from functools import partial
from typing import Final

import structlog
import trio

from gateway.http.server import HttpServer
from gateway.http.tls import Certificates, TlsListener
from gateway.s3.dispatch import S3Service
from gateway.s3.door.teaching import IS_BUILT, S3Door
from gateway.s3.request.call import Lakes
from gateway.s3.telemetry.access_log import AccessLog
from gateway.s3.telemetry.notes import keep_noted, note_of
from gateway.s3.telemetry.traffic import BOUNDS_S, Connections, Snapshot, Traffic, connections_of
from lakefs.config.settings import Address, Config
from lakefs.errors import AddressInUse
from lakefs.limits import HTTP_CONNECTIONS_MAX
from lakefs.ports import Listener
from lakefs.transport.streams import PortUse, TrioNetwork
from lakefs.wire.messages import NoteGateway

_log: Final = structlog.get_logger(__name__)


class S3Face:
    """Serves S3 to clients."""

    def __init__(self, lakes: Lakes, config: Config) -> None:
        """Raises ConfigError if the certificate cannot be used, LocalFileError for the access log."""
        self._engine = lakes.engine
        self._certificates = certificates_of(config)
        self._door = self._made_door(lakes, config)
        lakes.door = self._door
        service = S3Service(
            lakes,
            config.s3_region,
            config.s3_domains,
            accepts_v2=config.s3_signature_v2,
            accepts_sse=config.s3_accept_sse == "AES256",
        )
        self._log: AccessLog | None = None
        if config.s3_access_log != "off":
            self._log = AccessLog(config.s3_access_log, config.s3_access_log_sample, lakes.offload)
            if self._door is not None:
                self._door.use_log(self._log, config.s3_access_log_sample)
        self._traffic = Traffic(self._log.answered if self._log is not None else None)
        self._server = HttpServer(
            service.handle,
            service.refused,
            connections_max=HTTP_CONNECTIONS_MAX,
            observer=self._traffic,
            door=self._door.door if self._door is not None else None,
        )

    def _made_door(self, lakes: Lakes, config: Config) -> S3Door | None:
        """Return the door, if the settings have one, the engine is on this machine, and connections are plain."""
        wanted = config.s3_door and self._certificates is None and lakes.engine.carries_descriptors
        if not (wanted and IS_BUILT):
            return None
        return S3Door(lakes.engine, lakes.driver, BOUNDS_S, config.s3_door_memory)

    async def serve(self, listener: Listener, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled or drained; closes the listener.  Started with the URL for clients."""
        scheme = "http"
        if self._certificates is not None:
            scheme, listener = "https", TlsListener(listener, self._certificates.current)
        async with trio.open_nursery() as nursery:
            if self._log is not None:
                nursery.start_soon(self._log.run)
            if self._door is not None:
                await nursery.start(self._door.run)
            bound = str(await nursery.start(self._serve, listener, nursery.cancel_scope)).removeprefix("tcp://")
            if scheme == "http" and not is_loopback(bound.rpartition(":")[0]):
                _log.warning(
                    "S3 is served without TLS on an address that others can reach: whoever sees the traffic sees "
                    "the content; set s3_tls_cert and s3_tls_key",
                    address=bound,
                )
            url = f"{scheme}://{bound}"
            nursery.start_soon(keep_noted, self._engine, partial(self._note, url))
            task_status.started(url)

    async def _serve(
        self, listener: Listener, all_of_it: trio.CancelScope, *, task_status: trio.TaskStatus[str]
    ) -> None:
        await self._server.serve(listener, task_status=task_status)
        all_of_it.cancel()  # drained: the log writes its remaining lines

    def counts(self) -> tuple[Snapshot, Connections]:
        """Return the counts of traffic, and those of the present connections."""
        return self._sums(), connections_of(self._server)

    def _note(self, url: str) -> NoteGateway:
        return note_of(url, self._sums(), has_door=self._door is not None)

    def _sums(self) -> Snapshot:
        lost = self._log.lost if self._log is not None else 0
        found = self._traffic.snapshot(self._server, lost)
        if self._door is not None:
            found = found.plus(self._door.counts())
        return found

    async def drain(self, timeout_s: float) -> None:
        """Accept no more, let answers under way finish for at most `timeout_s`, and end the rest."""
        await self._server.drain(timeout_s)

    def reload(self) -> None:
        """Read the certificate again, and continue in a new file of the access log."""
        if self._log is not None:
            self._log.reopen()
        if self._certificates is not None:
            self._certificates.reload()


def certificates_of(config: Config) -> Certificates | None:
    """Load the certificate that the settings name; None if they name none.  ConfigError."""
    if config.s3_tls_cert is None or config.s3_tls_key is None:
        return None
    return Certificates(config.s3_tls_cert, config.s3_tls_key)


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach an address; of names, only `localhost` counts as such."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


async def listen_s3(address: Address, port_use: PortUse, hint: str) -> Listener:
    """Listen for S3 clients.  AddressInUse that ends with the hint, PermissionDenied, InvalidArgument."""
    try:
        return await TrioNetwork(port_use=port_use).listen(f"tcp://{address}")
    except AddressInUse as error:
        raise port_taken(address, hint) from error


def port_taken(address: Address, hint: str) -> AddressInUse:
    """Return the error for a taken port; its message says what to do."""
    return AddressInUse(
        f"S3 port {address} is taken; stop what listens there, choose another with --s3 HOST:PORT, or {hint}",
        subject=str(address),
    )
