"""The parts of a host that a plug-in uses, looked at when it starts.

Hosts release often and change these interfaces now and then.  So a host is judged by what it offers, not by its number:
one that has changed nothing of this is served, and any other is refused with a sentence that names what has changed.

    calls      the host calls a method of the plug-in: with exactly these arguments
    takes      the plug-in calls something of the host: with these arguments, in this order, and no other is required
    has        the plug-in reads attributes, fields or members
    wants      methods that the host leaves to the plug-in: the plug-in has all of them
    sends      calls in the source of a class that calls the plug-in by an attribute of its own

That a name means what it meant cannot be seen: docs/kv-cache.md has a table of the releases that were tried.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from textwrap import dedent
from typing import Any, NamedTuple

from lakefs.errors import UnsupportedVersion


class Offer(NamedTuple):
    """Something that a host offers: a name in a module, and a check of it, which returns what is wrong or ""."""

    module: str
    name: str
    problem_of: Callable[[Any], str]


def check_host(package: str, offers: Sequence[Offer]) -> str:
    """Return the version of the installed host.  UnsupportedVersion, unless it offers all of this."""
    try:
        installed = version(package)
    except PackageNotFoundError:
        raise UnsupportedVersion(f"{package} is not installed in this environment") from None
    for offer in offers:
        if problem := _problem_of(offer):
            raise UnsupportedVersion(
                f"{package} {installed} is not served: {problem}; docs/kv-cache.md lists the releases that are"
            )
    return installed


def calls(module: str, name: str, *parameters: str) -> Offer:
    """Return an offer: the host calls the plug-in's method of this name with these arguments."""

    def problem_of(found: Any) -> str:
        names = [parameter.name for parameter in _parameters(found)]
        return "" if names == list(parameters) else f"{name} has ({', '.join(names)}), not ({', '.join(parameters)})"

    return Offer(module, name, problem_of)


def takes(module: str, name: str, *arguments: str) -> Offer:
    """Return an offer: something that the plug-in calls with these arguments, by position or by name."""

    def problem_of(found: Any) -> str:
        found = _parameters(found)
        required = [parameter.name for parameter in found if parameter.default is parameter.empty]
        if [parameter.name for parameter in found][: len(arguments)] != list(arguments):
            return f"{name} does not take ({', '.join(arguments)})"
        more = [each for each in required if each not in arguments]
        return f"{name} requires {', '.join(more)}" if more else ""

    return Offer(module, name, problem_of)


def has(module: str, name: str, *attributes: str) -> Offer:
    """Return an offer: a class with these attributes, fields or members."""

    def problem_of(found: Any) -> str:
        known = {field.name for field in fields(found)} if is_dataclass(found) else set()
        lacks = [each for each in attributes if each not in known and not hasattr(found, each)]
        return f"{name} has no {', '.join(lacks)}" if lacks else ""

    return Offer(module, name, problem_of)


def wants(module: str, name: str, *methods: str) -> Offer:
    """Return an offer: an abstract class of which the plug-in has these methods."""

    def problem_of(found: Any) -> str:
        more = sorted(found.__abstractmethods__.difference(methods))
        return f"{name} wants {', '.join(more)}, which this plug-in does not have" if more else ""

    return Offer(module, name, problem_of)


def sends(module: str, name: str, attribute: str, plug_in: type) -> Offer:
    """Return an offer: a class whose calls of methods of `self.ATTRIBUTE` are such as the plug-in takes."""

    def problem_of(found: Any) -> str:
        for called, count, names in _calls_of(found, attribute):
            method = getattr(plug_in, called, None)
            if method is None:
                return f"{name} calls {called}, which this plug-in does not have"
            try:
                inspect.signature(method).bind(None, *[None] * count, **dict.fromkeys(names))
            except TypeError as error:
                return f"{name} calls {called} with other arguments: {error}"
        return ""

    return Offer(module, name, problem_of)


def _problem_of(offer: Offer) -> str:
    try:
        found: Any = import_module(offer.module)
    except ImportError as error:
        return f"{offer.module} cannot be imported: {error}"
    for part in offer.name.split("."):
        found = getattr(found, part, None)
        if found is None:
            return f"{offer.module} has no {offer.name}"
    try:
        return offer.problem_of(found)
    except (AttributeError, TypeError, ValueError, OSError, SyntaxError) as error:
        return f"{offer.name} is another kind of thing: {error}"


def _parameters(found: Any) -> list[inspect.Parameter]:
    """Return the parameters of a function or class, without `self`."""
    return [each for each in inspect.signature(found).parameters.values() if each.name != "self"]


def _calls_of(found: type, attribute: str) -> list[tuple[str, int, list[str]]]:
    """Return the calls of methods of `self.ATTRIBUTE` in a class: name, count of positional arguments, other names."""
    calls = []
    for node in ast.walk(ast.parse(dedent(inspect.getsource(found)))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if ast.unparse(node.func.value) == f"self.{attribute}":
            names = [keyword.arg for keyword in node.keywords if keyword.arg]
            calls.append((node.func.attr, len(node.args), names))
    return calls
