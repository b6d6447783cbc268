"""A host is judged by what it offers: one that changed nothing of it is served, any other refused by name."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import pytest

from lakefs.errors import UnsupportedVersion
from lakefs.plugins.kv import offers
from lakefs.plugins.kv.lmcache_connector import LakeConnector
from lakefs.plugins.kv.lmcache_host import offers_to
from lakefs.plugins.kv.offers import calls, check_host, has, sends, takes, wants

HOST = "a_host_of_tests"


class Base(ABC):
    """A class of a host, of which a plug-in has one of its own."""

    def __init__(self, spec: object, view: object) -> None:
        self.given = (spec, view)

    @abstractmethod
    def lookup(self, key: object, context: object) -> None: ...

    def touch(self, keys: object) -> object:
        return keys


@dataclass
class Job:
    """A value of a host with a field that has no default."""

    number: int
    seconds: float | None = None


class Result(Enum):
    """An answer."""

    HIT = 1


class Plug:
    """The plug-in."""

    def get(self, keys: list[str], buffers: list[memoryview]) -> int:
        return 0


class Adapter:
    """The part of a host that calls the plug-in."""

    _client: Any

    def load(self) -> None:
        self._client.get([], buffers=[])


class OtherAdapter:
    """The same, of another release."""

    _client: Any

    def load(self) -> None:
        self._client.get([], [], priority=1)


class NewAdapter:
    """The same, with a call that the plug-in does not know."""

    _client: Any

    def load(self) -> None:
        self._client.prefetch([])


GOOD = [
    wants(HOST, "Base", "lookup"),
    calls(HOST, "Base.__init__", "spec", "view"),
    calls(HOST, "Base.lookup", "key", "context"),
    takes(HOST, "Base.touch", "keys"),
    takes(HOST, "Job", "number", "seconds"),
    takes(HOST, "Job", "number"),
    has(HOST, "Job", "number", "seconds"),
    has(HOST, "Result", "HIT"),
    sends(HOST, "Adapter", "_client", Plug),
]
BAD = [
    (wants(HOST, "Base", "touch"), "Base wants lookup, which this plug-in does not have"),
    (calls(HOST, "Base.lookup", "key"), r"Base.lookup has \(key, context\), not \(key\)"),
    (calls(HOST, "Base.lookup", "key", "context", "size"), r"Base.lookup has \(key, context\), not"),
    (takes(HOST, "Job", "seconds"), r"Job does not take \(seconds\)"),
    (takes(HOST, "Base.lookup", "key"), "Base.lookup requires context"),
    (has(HOST, "Job", "number", "bytes"), "Job has no bytes"),
    (has(HOST, "Result", "HIT", "RETRY"), "Result has no RETRY"),
    (has(HOST, "Base.gone", "x"), f"{HOST} has no Base.gone"),
    (has(f"{HOST}.gone", "x"), f"{HOST}.gone cannot be imported"),
    (takes(HOST, "number", "key"), "number is another kind of thing"),
    (wants(HOST, "number", "key"), "number is another kind of thing"),
    (sends(HOST, "OtherAdapter", "_client", Plug), "OtherAdapter calls get with other arguments"),
    (sends(HOST, "NewAdapter", "_client", Plug), "NewAdapter calls prefetch, which this plug-in does not have"),
    (sends(HOST, "number", "_client", Plug), "number is another kind of thing"),
]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    host = ModuleType(HOST)
    for known in (Base, Job, Result, Adapter, OtherAdapter, NewAdapter):
        setattr(host, known.__name__, known)
    host.number = 5  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, HOST, host)
    monkeypatch.setattr(offers, "version", lambda _: "7.8.9.dev1")


def test_a_host_that_offers_all_is_served_whatever_its_number() -> None:
    assert check_host("host", GOOD) == "7.8.9.dev1"


@pytest.mark.parametrize(("offer", "problem"), BAD, ids=[problem[:40] for _, problem in BAD])
def test_a_host_that_has_changed_something_is_refused_by_its_name(offer: offers.Offer, problem: str) -> None:
    with pytest.raises(UnsupportedVersion, match=f"^host 7.8.9.dev1 is not served: {problem}") as refused:
        check_host("host", [*GOOD, offer])
    assert "docs/kv-cache.md" in str(refused.value)


def test_a_host_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(UnsupportedVersion, match="no-such-host is not installed"):
        check_host("no-such-host", [])
    with pytest.raises(UnsupportedVersion, match="lmcache is not installed"):
        LakeConnector()


def test_an_lmcache_that_names_objects_otherwise_is_refused() -> None:
    naming = offers_to(LakeConnector)[1]
    as_now = "{0.model_name}@{0.kv_rank:08x}@{0.object_group_id:x}@616263@{0.cache_salt}".format
    assert naming.problem_of(as_now) == ""
    assert "names objects like 'a/model/2'" in naming.problem_of("{0.model_name}/{0.kv_rank}".format)
