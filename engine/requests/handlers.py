"""Marks the handler of each request with a decorator, and puts the handlers of a service into one table.

    class Puts:
        @handles(m.SessionEnd)
        async def session_end(self, client: Client, request: m.SessionEnd) -> Reply: ...

A handler is an async method whose parameters are some of `client`, `request`, `body` and `descriptors`, in that order.
A table decides which requests are served, and by whom: two in one process may answer the same request differently.
BugError, when the table is made, if a request has two handlers there, or none.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
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
NO_HANDLERS: Final[Mapping[type[m.Request], Handler]] = MappingProxyType({})
_marked: Final[dict[Callable[..., Any], tuple[type[m.Request], tuple[str, ...]]]] = {}
"""The request of each handler, and the handler's parameters."""


def handles(request: type[m.Request]) -> Callable[[Method], Method]:
    """Mark a method as the handler of a request.  BugError for other parameters."""

    def mark(method: Method) -> Method:
        parameters = tuple(inspect.signature(method).parameters)[1:]
        if parameters not in _ADAPTERS:
            raise BugError(f"{method.__qualname__}: no handler takes {', '.join(parameters)}")
        _marked[method] = request, parameters
        return method

    return mark


class Handlers:
    """The handlers of one service, by request."""

    def __init__(
        self,
        parts: Iterable[object],
        requests: Iterable[type[m.Request]],
        others: Mapping[type[m.Request], Handler] = NO_HANDLERS,
    ) -> None:
        """`parts`: the objects whose methods they are.  `others`: handlers that are no marked methods.

        BugError unless each of `requests` has one handler.
        """
        self.by_request: Final[dict[type[m.Request], Handler]] = {}
        """Read for each request, so it is no method."""
        self.takes_descriptors: Final[set[type[m.Request]]] = set()
        """Requests whose handlers take descriptors."""
        for part in parts:
            for method in filter(inspect.isfunction, vars(type(part)).values()):
                if method in _marked:
                    self._add(part, method, *_marked[method])
        for request, handler in others.items():
            self._check_new(request, request.__name__)
            self.by_request[request] = handler
        missing = [request.__name__ for request in requests if request not in self.by_request]
        if missing:
            raise BugError(f"requests without a handler: {', '.join(missing)}")

    def _add(
        self, part: object, method: Callable[..., Any], request: type[m.Request], parameters: tuple[str, ...]
    ) -> None:
        self._check_new(request, method.__qualname__)
        self.by_request[request] = _ADAPTERS[parameters](method.__get__(part))
        if "descriptors" in parameters:
            self.takes_descriptors.add(request)

    def _check_new(self, request: type[m.Request], name: str) -> None:
        if request in self.by_request:
            raise BugError(f"{request.__name__} has two handlers, one of them {name}")
