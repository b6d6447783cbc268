"""Methods of the public clients, made from the one declaration in `lakefs.lake.lake_steps.LakeSteps`.

    class Lake(Facade[BlockingDriver]):
        put = blocking(LakeSteps.put)

`Lake.put` then has the parameters, types and docstring of `LakeSteps.put`, and returns the result of its steps.  Type
checkers see that through `ParamSpec`, `help()` and `inspect.signature` through the attributes that `declare` sets.

A client has only the methods that users call.  All others, such as `run`, `steps` and `tell`, are its driver's:
`driver_of(lake)`.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast

if TYPE_CHECKING:  # commands that need only `driver_of` load nothing else
    from lakefs.client.blocking.driver import BlockingDriver
    from lakefs.client.trio.driver import TrioDriver
    from lakefs.lake.lake_steps import LakeSteps
    from lakefs.steps.steps import Pages, Steps

P = ParamSpec("P")
R = TypeVar("R")
DriverT = TypeVar("DriverT")
MethodT = TypeVar("MethodT", bound=Callable[..., Any])


class Facade(Generic[DriverT]):
    """A client: public methods over a driver, which only `driver_of` returns."""

    _driver: DriverT

    def __init_subclass__(cls) -> None:
        """Set name and module of the methods made by this module to those of their class."""
        super().__init_subclass__()
        for name, method in vars(cls).items():
            if getattr(method, "__module__", "") == __name__:
                method.__qualname__ = f"{cls.__qualname__}.{name}"
                method.__module__ = cls.__module__


def driver_of(lake: Facade[DriverT]) -> DriverT:
    """Return the driver of a client, for the product's own code: it runs any steps, and has the connection."""
    return lake._driver


def blocking(
    steps: Callable[Concatenate[LakeSteps, P], Steps[R]],
) -> Callable[Concatenate[Facade[BlockingDriver], P], R]:
    """Make a method that runs the steps and returns their result."""

    def call(self: Facade[BlockingDriver], /, *args: P.args, **kwargs: P.kwargs) -> R:
        driver = self._driver
        return driver.run(steps(driver.steps, *args, **kwargs))

    return declare(call, steps)


def awaited(
    steps: Callable[Concatenate[LakeSteps, P], Steps[R]],
) -> Callable[Concatenate[Facade[TrioDriver], P], Coroutine[Any, Any, R]]:
    """Make an async method that runs the steps and returns their result."""

    async def call(self: Facade[TrioDriver], /, *args: P.args, **kwargs: P.kwargs) -> R:
        driver = self._driver
        return await driver.run(steps(driver.steps, *args, **kwargs))

    return declare(call, steps)


def blocking_known(
    steps: Callable[Concatenate[LakeSteps, P], Steps[R]],
) -> Callable[Concatenate[Facade[BlockingDriver], P], R]:
    """Like `blocking`, for what `KnownNames` may answer without a request."""
    method = steps.__name__

    def call(self: Facade[BlockingDriver], /, *args: P.args, **kwargs: P.kwargs) -> R:
        driver = self._driver
        known = driver.known_names()
        if known is None:
            return driver.run(steps(driver.steps, *args, **kwargs))
        found = getattr(known, method)(*args, **kwargs)
        return driver.run(found) if isinstance(found, GeneratorType) else cast("R", found)

    return declare(call, steps)


def awaited_known(
    steps: Callable[Concatenate[LakeSteps, P], Steps[R]],
) -> Callable[Concatenate[Facade[TrioDriver], P], Coroutine[Any, Any, R]]:
    """Like `awaited`, for what `KnownNames` may answer without a request."""
    method = steps.__name__

    async def call(self: Facade[TrioDriver], /, *args: P.args, **kwargs: P.kwargs) -> R:
        driver = self._driver
        known = await driver.known_names()
        if known is None:
            return await driver.run(steps(driver.steps, *args, **kwargs))
        found = getattr(known, method)(*args, **kwargs)
        return await driver.found(found)

    return declare(call, steps)


def blocking_pages(
    steps: Callable[Concatenate[LakeSteps, P], Pages[R]],
) -> Callable[Concatenate[Facade[BlockingDriver], P], Iterator[R]]:
    """Make a method that yields the entries of all pages; a page is requested when the one before is used up."""

    def call(self: Facade[BlockingDriver], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        driver = self._driver
        rest: Pages[R] | None = steps(driver.steps, *args, **kwargs)
        while rest is not None:
            entries, rest = driver.run(rest)
            yield from entries

    return declare(call, steps, "Iterator")


def awaited_pages(
    steps: Callable[Concatenate[LakeSteps, P], Pages[R]],
) -> Callable[Concatenate[Facade[TrioDriver], P], AsyncIterator[R]]:
    """Make an async method that yields the entries of all pages; a page is requested when the one before is used up."""

    async def call(self: Facade[TrioDriver], /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[R]:
        driver = self._driver
        rest: Pages[R] | None = steps(driver.steps, *args, **kwargs)
        while rest is not None:
            entries, rest = await driver.run(rest)
            for entry in entries:
                yield entry

    return declare(call, steps, "AsyncIterator")


def declare(call: MethodT, steps: Callable[..., Any], kind: str = "") -> MethodT:
    """Give the method the name, docstring and signature of the steps, except for the returned type.

    `Steps[X]` becomes `X`; `Pages[X]` becomes `kind` of X, such as `Iterator[X]`.  The first parameter, the `LakeSteps`
    that a driver gives, is the method's `self`.
    """
    _, _, inner = steps.__annotations__["return"].partition("[")
    returned = f"{kind}[{inner}" if kind else inner.removesuffix("]")
    call.__name__ = steps.__name__
    call.__doc__ = steps.__doc__
    first, *others = inspect.signature(steps).parameters.values()
    own = first.replace(name="self", annotation=first.empty)
    hints = {name: hint for name, hint in steps.__annotations__.items() if name != first.name}
    call.__annotations__ = {**hints, "return": returned}
    call.__wrapped__ = steps  # type: ignore[attr-defined]
    call.__signature__ = inspect.Signature([own, *others], return_annotation=returned)  # type: ignore[attr-defined]
    return call
