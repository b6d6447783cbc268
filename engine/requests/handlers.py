"""Registers the handler of each request with a decorator.

    class Puts:
        @handles(m.SessionEnd)
        async def session_end(self, client: Client, request: m.SessionEnd) -> Reply: ...

A handler is an async method whose parameters are some of `client`, `request`, `body` and `descriptors`, in that order.
Defining a second handler of a request raises BugError.  Importing `engine.requests.table` raises BugError if a request
has no handler.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from engine.sessions.references import Client
from lakefs.errors import BugError
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply

Method = TypeVar("Method", bound=Callable[..., Awaitable[Reply]])
Handler = Callable[[Client, Any, Body, Sequence[int]], Awaitable[Reply]]
Adapter = Callable[[Callable[..., Awaitable[Reply]]], Handler]

# Written out because each request calls one of them: picking arguments from a list costs five times as much.
_ADAPTERS: Final[dict[tuple[str, ...], Adapter]] = {
    (): lambda method: lambda client, request, body, descriptors: method(),
    ("client",): lambda method: lambda client, request, body, descriptors: method(client),
    ("request",): lambda method: lambda client, request, body, descriptors: method(request),
    ("client", "request"): lambda method: lambda client, request, body, descriptors: method(client, request),
    ("client", "request", "body"): lambda method: (
        lambda client, request, body, descriptors: method(client, request, body)
    ),
    ("client", "request", "descriptors"): lambda method: (
        lambda client, request, body, descriptors: method(client, request, descriptors)
    ),
}
_named: Final[dict[type[m.Request], tuple[str, tuple[str, ...]]]] = {}
"""Qualified name and parameters of each request's handler."""


def handles(request: type[m.Request]) -> Callable[[Method], Method]:
    """Mark a method as the handler of a request.  BugError if one exists already, or for other parameters."""

    def mark(method: Method) -> Method:
        parameters = tuple(inspect.signature(method).parameters)[1:]
        if parameters not in _ADAPTERS:
            raise BugError(f"{method.__qualname__}: no handler takes {', '.join(parameters)}")
        if request in _named:
            raise BugError(f"{request.__name__} has two handlers: {_named[request][0]}, {method.__qualname__}")
        _named[request] = method.__qualname__, parameters
        return method

    return mark


def takes_descriptors(request: type[m.Request]) -> bool:
    """Return True if the request's handler takes descriptors."""
    return "descriptors" in _named[request][1]


def require_handlers(requests: Iterable[type[m.Request]]) -> None:
    """Raise BugError naming the requests without a handler, if any."""
    missing = [request.__name__ for request in requests if request not in _named]
    if missing:
        raise BugError(f"requests without a handler: {', '.join(missing)}")


def table_of(parts: Iterable[object]) -> dict[type[m.Request], Handler]:
    """Return one store's handlers by request; `parts` are the objects whose methods they are."""
    methods = {f"{type(part).__qualname__}.{name}": getattr(part, name) for part in parts for name in vars(type(part))}
    return {request: _ADAPTERS[parameters](methods[name]) for request, (name, parameters) in _named.items()}
