"""Leases at an etcd whose answers are scripted: which leader kept one alive, and who imports the client."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
import trio

from engine.etcd import etcd_messages as e
from engine.etcd.etcd_coordinator import EtcdCoordinator
from engine.etcd.etcd_link import KEEP_ALIVE, RANGE, EtcdLink, Method
from engine.etcd.etcd_session import EtcdSessions
from lakefs.errors import EngineUnreachable
from lakefs.ids import LeaseId
from tests.e2e.served import environment

OLD: Final = (1, 7)
NEW: Final = (1, 8)
OTHER: Final = (2, 7)


class ScriptedLink:
    """Answers with the members and terms of a script."""

    endpoint = SimpleNamespace(address="scripted")

    def __init__(self, script: Sequence[tuple[Method, tuple[int, int], int]]) -> None:
        self._script = list(script)

    async def ask(self, method: Method, request: object) -> Any:
        expected, (member, term), ttl = self._script.pop(0)
        assert method is expected
        answer = method.answer()
        answer.header.member_id, answer.header.raft_term = member, term
        if method is KEEP_ALIVE:
            answer.ttl = ttl
        return answer

    def is_done(self) -> bool:
        return not self._script


def _asked(script: Sequence[tuple[Method, tuple[int, int], int]]) -> bool:
    link = ScriptedLink(script)
    real = cast(EtcdLink, link)
    coordinator = EtcdCoordinator(real, EtcdSessions(real, b""), b"")
    is_kept = trio.run(coordinator.keep_alive, LeaseId(1))
    assert link.is_done()
    return is_kept


@pytest.mark.parametrize("ttl", [5, 0])
def test_a_lease_is_as_the_leader_says_that_was_the_same_behind_it(ttl: int) -> None:
    assert _asked([(KEEP_ALIVE, OLD, ttl), (RANGE, OLD, 0)]) == (ttl > 0)


@pytest.mark.parametrize("later", [NEW, OTHER], ids=["a new leader", "another member"])
def test_the_word_of_a_leader_that_may_have_had_a_successor_does_not_count(later: tuple[int, int]) -> None:
    assert not _asked([(KEEP_ALIVE, OLD, 5), (RANGE, later, 0), (KEEP_ALIVE, later, 0), (RANGE, later, 0)])
    assert _asked([(KEEP_ALIVE, OLD, 0), (RANGE, later, 0), (KEEP_ALIVE, later, 5), (RANGE, later, 0)])


def test_leaders_that_change_each_time_are_unreachable() -> None:
    with pytest.raises(EngineUnreachable, match="a new leader each time"):
        _asked([(KEEP_ALIVE, OLD, 5), (RANGE, NEW, 0)] * 4)


def test_messages_skip_fields_that_they_do_not_know() -> None:
    answer = e.GrantResponse.FromString(e.GrantResponse(id=5).SerializeToString() + b"\x22\x03odd")
    assert answer.id == 5


def test_a_process_without_etcd_loads_nothing_of_its_client() -> None:
    """All modules of a lake, of an engine and of the command line, without those that the client is made of."""
    program = """
import importlib, pkgutil, sys
import cli, engine, gateway, lakefs
for package in (cli, engine, gateway, lakefs):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith(("engine.etcd.", "lakefs.plugins")):
            importlib.import_module(module.name)
print(*(name for name in sys.modules if name.split(".")[0] in ("grpc", "google") or name.startswith("engine.etcd.")))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment()
    )
    assert done.stdout.split() == []
