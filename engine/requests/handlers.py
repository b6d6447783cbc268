"""Which function answers which request: the handlers say it themselves.

    class Puts:
        @handles(m.SessionEnd)
        async def session_end(self, client: Client, request: m.SessionEnd) -> Reply: ...

A handler is an async method that takes what it names of `client`, `request`, `body` and `descriptors`, in that order.
Two handlers of one request are an error when the second is defined; `engine.requests.table` makes a request without a
handler an error at its import.
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

# Written out: a request goes through one of them, and picking arguments from a list costs five times as much.
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
"""Name and parameters of each request's handler."""


def handles(request: type[m.Request]) -> Callable[[Method], Method]:
    """Mark a method as the handler of a request.  BugError when there is one already, or for odd parameters."""

    def mark(method: Method) -> Method:
        parameters = tuple(inspect.signature(method).parameters)[1:]
        if parameters not in _ADAPTERS:
            raise BugError(f"{method.__qualname__}: no handler takes {', '.join(parameters)}")
        if request in _named:
            raise BugError(
                f"{request.__name__} has two handlers: {_named[request][0]}, {method.__qualname__}"
            )
        _named[request] = method.__qualname__, parameters
        return method

    return mark


def takes_descriptors(request: type[m.Request]) -> bool:
    """Whether the request's handler takes descriptors."""
    return "descriptors" in _named[request][1]


def require_handlers(requests: Iterable[type[m.Request]]) -> None:
    """BugError that names the requests without a handler."""
    missing = [request.__name__ for request in requests if request not in _named]
    if missing:
        raise BugError(f"requests without a handler: {', '.join(missing)}")


def table_of(parts: Iterable[object]) -> dict[type[m.Request], Handler]:
    """The handlers of one store by the requests that they answer; `parts` are the objects whose methods they are."""
    methods = {
        f"{type(part).__qualname__}.{name}": getattr(part, name)
        for part in parts
        for name in vars(type(part))
    }
    return {request: _ADAPTERS[parameters](methods[name]) for request, (name, parameters) in _named.items()}
