"""Methods of the public clients, made from the one declaration in `lakefs.lake.lake_steps.LakeSteps`.

    class Lake(Facade[BlockingDriver]):
        put = blocking(LakeSteps.put)

`Lake.put` then has the parameters, types and docstring of `LakeSteps.put`, and returns what its steps return.  Type
checkers see that by `ParamSpec`; `help()` and `inspect.signature` by what `_declare` sets.

The client has only what a user calls.  All else, such as `run`, `steps` and `tell`, is its driver's: `driver_of(lake)`.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

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
    """A client: public methods over a driver, which only `driver_of` hands out."""

    _driver: DriverT

    def __init_subclass__(cls) -> None:
        """Name the methods that this module made after their class and its module."""
        super().__init_subclass__()
        for name, method in vars(cls).items():
            if getattr(method, "__module__", "") == __name__:
                method.__qualname__ = f"{cls.__qualname__}.{name}"
                method.__module__ = cls.__module__


def driver_of(lake: Facade[DriverT]) -> DriverT:
    """The driver of a client, for the product's own callers: it runs any steps, and knows the connection."""
    return lake._driver


def blocking(
    steps: Callable[Concatenate[LakeSteps, P], Steps[R]],
) -> Callable[Concatenate[Facade[BlockingDriver], P], R]:
    """A method that runs the steps and returns their result."""

    def call(self: Facade[BlockingDriver], /, *args: P.args, **kwargs: P.kwargs) -> R:
        driver = self._driver
        return driver.run(steps(driver.steps, *args, **kwargs))

    return _declare(call, steps)


def awaited(
    steps: Callable[Concatenate[LakeSteps, P], Steps[R]],
) -> Callable[Concatenate[Facade[TrioDriver], P], Coroutine[Any, Any, R]]:
    """An async method that runs the steps and returns their result."""

    async def call(self: Facade[TrioDriver], /, *args: P.args, **kwargs: P.kwargs) -> R:
        driver = self._driver
        return await driver.run(steps(driver.steps, *args, **kwargs))

    return _declare(call, steps)


def blocking_pages(
    steps: Callable[Concatenate[LakeSteps, P], Pages[R]],
) -> Callable[Concatenate[Facade[BlockingDriver], P], Iterator[R]]:
    """A method that yields the entries of all pages; each page is asked for when the one before is used up."""

    def call(self: Facade[BlockingDriver], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        driver = self._driver
        rest: Pages[R] | None = steps(driver.steps, *args, **kwargs)
        while rest is not None:
            entries, rest = driver.run(rest)
            yield from entries

    return _declare(call, steps, "Iterator")


def awaited_pages(
    steps: Callable[Concatenate[LakeSteps, P], Pages[R]],
) -> Callable[Concatenate[Facade[TrioDriver], P], AsyncIterator[R]]:
    """An async iterator over the entries of all pages; each page is asked for when the one before is used up."""

    async def call(self: Facade[TrioDriver], /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[R]:
        driver = self._driver
        rest: Pages[R] | None = steps(driver.steps, *args, **kwargs)
        while rest is not None:
            entries, rest = await driver.run(rest)
            for entry in entries:
                yield entry

    return _declare(call, steps, "AsyncIterator")


def _declare(call: MethodT, steps: Callable[..., Any], kind: str = "") -> MethodT:
    """Give the method the name, docstring and signature of the steps, but for what it returns.

    `Steps[X]` becomes `X`, and `Pages[X]` the kind of iterator: `Iterator[X]`.
    """
    _, _, inner = steps.__annotations__["return"].partition("[")
    returned = f"{kind}[{inner}" if kind else inner.removesuffix("]")
    call.__name__ = steps.__name__
    call.__doc__ = steps.__doc__
    call.__annotations__ = {**steps.__annotations__, "return": returned}
    call.__wrapped__ = steps  # type: ignore[attr-defined]
    call.__signature__ = inspect.signature(steps).replace(return_annotation=returned)  # type: ignore[attr-defined]
    return call
