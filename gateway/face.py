"""S3 at one address, from one store: what `lake serve` and `lake gateway` both start, reload and end.

It knows settings and a store (`Lakes`), and neither the engine nor the command line.
"""

from __future__ import annotations

import trio

from gateway.http.server import HttpServer
from gateway.s3.call import Lakes
from gateway.s3.service import S3Options, S3Service
from lakefs.config import Address, Config
from lakefs.errors import AddressInUse
from lakefs.limits import HTTP_CONNECTIONS_MAX
from lakefs.net import PortUse, TrioNetwork
from lakefs.ports import Listener


class S3Face:
    """Serves S3 to clients."""

    def __init__(self, lakes: Lakes, config: Config) -> None:
        service = S3Service(lakes, S3Options(config.s3_region, config.s3_domains))
        self._server = HttpServer(service.handle, service.refused, connections_max=HTTP_CONNECTIONS_MAX)

    async def serve(
        self, listener: Listener, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Until cancelled or drained; closes the listener.  Started with the URL for clients."""
        async with trio.open_nursery() as nursery:
            bound = str(await nursery.start(self._server.serve, listener))
            task_status.started(f"http://{bound.removeprefix('tcp://')}")

    async def drain(self, timeout_s: float) -> None:
        """Accept no more, let answers under way be finished for at most that long, and end the rest."""
        await self._server.drain(timeout_s)


async def listen_s3(address: Address, port_use: PortUse, hint: str) -> Listener:
    """A listener for S3 clients.  AddressInUse that ends with the hint, PermissionDenied, InvalidArgument."""
    try:
        return await TrioNetwork(port_use=port_use).listen(f"tcp://{address}")
    except AddressInUse as error:
        raise port_taken(address, hint) from error


def port_taken(address: Address, hint: str) -> AddressInUse:
    """What to do about a taken port."""
    return AddressInUse(
        f"S3 port {address} is taken; stop what listens there, choose another with --s3 HOST:PORT, or {hint}",
        subject=str(address),
    )
