"""Real etcds for tests (`bench.harness.etcd`); skipped where there is no etcd."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from bench.harness import etcd
from bench.harness.etcd import EtcdCluster, EtcdNode, etcdctl, free_ports
from bench.harness.hosts import Host

__all__ = ["EtcdCluster", "EtcdNode", "etcdctl", "free_ports", "needs_etcd", "running_etcd"]

WITHOUT_ETCD: Final = "no etcd: install Debian's etcd-server and etcd-client, or run `make setup`"


def needs_etcd() -> None:
    """Skip the test where there is no etcd."""
    if shutil.which("etcd") is None or shutil.which("etcdctl") is None:
        pytest.skip(WITHOUT_ETCD)


@contextmanager
def running_etcd(
    folder: Path, count: int = 1, *, scheme: str = "http", options: Sequence[str] = (), at: Sequence[Host] = ()
) -> Iterator[EtcdCluster]:
    """Run an etcd of so many nodes in a folder, which is not there yet; or of one at each of these hosts."""
    needs_etcd()
    with etcd.running_etcd(folder, count, scheme=scheme, options=options, at=at) as cluster:
        yield cluster
