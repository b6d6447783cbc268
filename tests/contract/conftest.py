"""Fixtures of the contract suites."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from tests.contract.coordinators import URL_FILE, CoordinatorKind
from tests.contract.engines import KINDS, Kind, every
from tests.fabric_rig import SERVED, Run, run_at

_HERE: Final = Path(__file__).parent
_LONG_AT_ETCD: Final = (
    "test_a_lease_that_is_kept_alive_lasts_and_ends_when_its_holder_vanishes",
    "test_a_key_ends_with_the_last_lease_that_it_was_put_with",
    "test_a_lease_kept_alive_at_its_last_moment_keeps_all_its_keys_or_none",
)
"""Tests of leases that wait for 10 to 30 s, where time does not jump."""
_OF_NAMES: Final = (
    *("test_lake_buckets", "test_lake_uploads", "test_requests_access", "test_requests_folders", "test_requests_names"),
    *(
        "test_requests_nodes",
        "test_requests_places",
        "test_requests_reads",
        "test_requests_upload",
        "test_requests_versions",
    ),
)
"""Beginnings of the suites that are of names, or of content that is asked for by name."""
_OF_REQUESTS: Final = ("test_requests_", "test_loads_left_behind")
"""Suites of what the engine does with single requests, whoever sends them."""


@pytest.fixture(params=every())
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each way to ask an engine."""
    return KINDS[request.param]


@pytest.fixture(params=SERVED)
def run(request: pytest.FixtureRequest) -> Run:
    """Run a test of RDMA at an engine, and at a head."""
    return partial(run_at, SERVED[request.param])


@pytest.fixture(scope="session")
def suite_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the address of an etcd of one node, which the suites of `Coordinator` share, one after the other.

    Nothing of a test may end later, and so take a revision of another's.
    """
    with _an_etcd(tmp_path_factory.mktemp("etcd")) as folder:
        yield folder


@pytest.fixture(scope="session")
def faults_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same for tests that leave leases behind."""
    with _an_etcd(tmp_path_factory.mktemp("etcd")) as folder:
        yield folder


@contextmanager
def _an_etcd(folder: Path) -> Iterator[Path]:
    from tests.etcd_rig import running_etcd

    with running_etcd(folder / "node") as cluster:
        (folder / URL_FILE).write_text(cluster.urls[0])
        yield folder


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what takes long and shows nothing more.

    An etcd runs in real time and by no seed: one order of tasks is enough, and tests that wait long are thorough.
    """
    items[:] = [item for item in items if not _is_repeated_at_etcd(item)]
    _mark_fewer_clients(items)
    for item in items:
        if item.path.parent == _HERE and "[head-shards" in item.name and not item.path.stem.startswith(_OF_NAMES):
            item.add_marker(pytest.mark.thorough)  # shards of names change nothing there


def _is_repeated_at_etcd(item: pytest.Item) -> bool:
    """Return True for another seed of a test at an etcd; mark those that wait long."""
    if item.path.parent != _HERE or not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return False
    values = item.callspec.params.values()
    if not any(isinstance(value, CoordinatorKind) and value.is_outside for value in values):
        return False
    if item.originalname in _LONG_AT_ETCD:
        item.add_marker(pytest.mark.thorough)
    return bool(item.callspec.params.get("seed"))


def _mark_fewer_clients(items: list[pytest.Item]) -> None:
    """Leave blocking clients out of `make test` where only the engine is tried, and at heads where RDMA is.

    The code of their own sends a request and takes in its answer: `test_engine_client` and the suites of the lake.
    """
    for item in items:
        if item.path.parent != _HERE or not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        name, served = item.callspec.params.get("kind"), item.callspec.params.get("run")
        is_blocking = name == "blocking" or (name in KINDS and not KINDS[name].can_watch)
        if is_blocking and (item.path.name.startswith(_OF_REQUESTS) or served == "head"):
            item.add_marker(pytest.mark.thorough)
