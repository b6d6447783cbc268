"""pyverbs, found and loaded: the one place where its types, which it does not declare, and its exceptions end.

It is Debian's package (python3-pyverbs); pip's builds only with the newest libibverbs.  So it is taken from the
system's folder, alone, without anything else that lies there.  `lakefs.transport.rdma` is the only user.

One thread at a time loads it and opens things with it, and none while the process forks (`lakefs.host.forks`): a
channel's descriptor is looked for in /proc/self/fd, where no other may appear.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import structlog

from lakefs.errors import FabricFailed
from lakefs.host.forks import NO_FORK
from lakefs.transport.fabric import ACCESS_REFUSED, FLUSHED, LOCAL_REFUSED, NO_ANSWER

_log: Final = structlog.get_logger(__name__)

SYSTEM_PACKAGES: Final = "/usr/lib/python3/dist-packages"


@dataclass(frozen=True)
class Verbs:
    """The parts of pyverbs that are used; without types."""

    error: type[Exception]
    numbers: Any
    device: Any
    memory: Any
    queue: Any
    pair: Any
    address: Any
    work: Any
    domain: Any
    read: int
    write: int
    signaled: int
    """Numbers of the operations, and the flag for completions: plain ones, since enumerations are slow."""
    failures: dict[int, str]
    """Texts of the statuses of completions that are known; without that of success."""

    def flags(self, names: str) -> int:
        """Return the union of flags of the library."""
        union = 0
        for name in names.split():
            union |= int(getattr(self.numbers, name))
        return union


@cache
def load_verbs() -> Verbs:
    """Load pyverbs: the environment's, else the system's.  ImportError."""
    with NO_FORK:
        return _loaded()


def _loaded() -> Verbs:
    if importlib.util.find_spec("pyverbs") is None:
        spec = importlib.machinery.PathFinder.find_spec("pyverbs", [SYSTEM_PACKAGES])
        if spec is None or spec.loader is None:
            raise ImportError("it is not installed")
        package = importlib.util.module_from_spec(spec)
        sys.modules["pyverbs"] = package
        spec.loader.exec_module(package)
    parts = {name: importlib.import_module(f"pyverbs.{name}") for name in ("device", "mr", "cq", "qp", "addr", "wr")}
    try:
        numbers = importlib.import_module("pyverbs.enums")
    except ImportError:  # its name in later releases
        numbers = importlib.import_module("pyverbs.libibverbs_enums")
    return Verbs(
        error=importlib.import_module("pyverbs.pyverbs_error").PyverbsError,
        numbers=numbers,
        device=parts["device"],
        memory=parts["mr"],
        queue=parts["cq"],
        pair=parts["qp"],
        address=parts["addr"],
        work=parts["wr"],
        domain=importlib.import_module("pyverbs.pd"),
        read=int(numbers.IBV_WR_RDMA_READ),
        write=int(numbers.IBV_WR_RDMA_WRITE),
        signaled=int(numbers.IBV_SEND_SIGNALED),
        failures={
            int(numbers.IBV_WC_WR_FLUSH_ERR): FLUSHED,
            int(numbers.IBV_WC_REM_ACCESS_ERR): ACCESS_REFUSED,
            int(numbers.IBV_WC_REM_INV_REQ_ERR): ACCESS_REFUSED,
            int(numbers.IBV_WC_RETRY_EXC_ERR): NO_ANSWER,
            int(numbers.IBV_WC_LOC_PROT_ERR): LOCAL_REFUSED,
        },
    )


def open_context(verbs: Verbs, device: str) -> Any:
    """Open the adapter of that name.  `verbs.error`."""
    with NO_FORK:
        return verbs.device.Context(name=device)


def open_channel(verbs: Verbs, context: Any) -> tuple[Any, int]:
    """Open a completion channel; returns it with its descriptor, which does not block."""
    with NO_FORK:
        before = _event_descriptors()
        channel = verbs.queue.CompChannel(context)
        new = _event_descriptors() - before
    own = getattr(channel, "fd", None)  # later releases have it
    descriptor = int(own) if own is not None else new.pop() if len(new) == 1 else -1
    if descriptor < 0:
        channel.close()
        raise FabricFailed("the descriptor of a completion channel was not found in /proc/self/fd")
    os.set_blocking(descriptor, False)
    os.set_inheritable(descriptor, False)
    return channel, descriptor


def _event_descriptors() -> set[int]:
    """Return the descriptors of this process that give events of RDMA."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
    return found


def reason_of(error: Exception) -> str:
    """Return the message of an exception of pyverbs, on one line."""
    return " ".join(str(error).split()).rstrip(".")


def leave_to_parent(*parts: Any) -> None:
    """Keep objects of pyverbs from ever being freed: in a forked child that would free the parent's."""
    for part in parts:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))


def close_all(verbs: Verbs, *parts: Any) -> None:
    """Close objects of pyverbs; one that cannot be closed is logged."""
    for part in parts:
        if part is None:
            continue
        try:
            part.close()
        except verbs.error as error:
            _log.warning("an object of RDMA cannot be closed", kind=type(part).__name__, reason=reason_of(error))
