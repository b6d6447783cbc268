"""Where an etcd is and who may use it: dead endpoints, names of lakes, users, certificates."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import trio

from engine.coordinator.coordinator import Delete, HasValue, IsAbsent, Operation, Put
from engine.etcd import etcd_link
from engine.etcd.etcd_coordinator import open_etcd_coordinator
from engine.etcd.etcd_link import EtcdAccess, EtcdLink
from lakefs.errors import ConfigError, EngineUnreachable, InvalidArgument, PermissionDenied, StoreFull
from lakefs.ids import Revision
from lakefs.limits import MIB
from tests.certificates import Authority
from tests.contract.coordinators import URL_FILE, entry_of, next_changes, put
from tests.etcd_rig import EtcdCluster, EtcdNode, etcdctl, free_ports, running_etcd


def test_endpoints_that_are_dead_from_the_start_are_passed_over(faults_etcd: Path) -> None:
    async def scenario() -> None:
        url = (faults_etcd / URL_FILE).read_text()
        dead = [f"http://127.0.0.1:{port}" for port in free_ports(2)]
        async with open_etcd_coordinator(EtcdAccess((*dead, url), first=0), "dead-ends") as coordinator:
            await coordinator.connect()
            assert (await coordinator.transact([], [Put(b"a", b"1")])).succeeded

    trio.run(scenario)


def test_an_etcd_that_is_not_there_is_unreachable_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_link, "ETCD_CALL_S", 0.5)

    async def scenario() -> None:
        url = f"http://127.0.0.1:{free_ports(1)[0]}"
        async with open_etcd_coordinator(EtcdAccess((url,)), "nothing") as coordinator:
            with trio.fail_after(10):
                for call in (
                    coordinator.connect,
                    lambda: coordinator.get(b"a"),
                    lambda: coordinator.transact([], [Put(b"a", b"")]),
                ):
                    with pytest.raises(EngineUnreachable, match="etcd at 127"):
                        await call()
            async with coordinator.watch(b"a", b"b", Revision(1)) as watch:
                for _ in range(2):
                    with trio.fail_after(10), pytest.raises(EngineUnreachable):
                        await anext(watch)

    trio.run(scenario)


def test_endpoints_that_all_refuse_are_given_up_sooner_than_those_that_may_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(etcd_link, "ETCD_REFUSED_S", 0.5)
    monkeypatch.setattr(etcd_link, "ETCD_CALL_S", 2.5)
    monkeypatch.setattr(etcd_link, "ETCD_TRY_S", 0.2)

    async def asked_s(urls: tuple[str, ...]) -> float:
        async with open_etcd_coordinator(EtcdAccess(urls), "nothing") as coordinator:
            begun = trio.current_time()
            with pytest.raises(EngineUnreachable):
                await coordinator.get(b"a")
            return trio.current_time() - begun

    async def scenario() -> None:
        refusing = tuple(f"http://127.0.0.1:{port}" for port in free_ports(2))
        assert 0.5 <= await asked_s(refusing) < 2.5
        with socket.create_server(("127.0.0.1", 0)) as silent:
            assert await asked_s((*refusing, f"http://127.0.0.1:{silent.getsockname()[1]}")) >= 2.5

    trio.run(scenario)


def test_processes_begin_at_different_endpoints_unless_one_is_named() -> None:
    urls = tuple(f"http://host{number}:2379" for number in range(3))
    begun = set()
    for _ in range(100):
        link = EtcdLink(EtcdAccess(urls))
        begun.add(link.endpoint.address)
        link.close()
    assert begun == {"host0:2379", "host1:2379", "host2:2379"}
    for number in range(3):
        link = EtcdLink(EtcdAccess(urls, first=number))
        assert link.endpoint.address == f"host{number}:2379"
        link.close()


@pytest.mark.parametrize("url", ["127.0.0.1:2379", "ftp://127.0.0.1:2379", "http://", "http://user:word@host:2379"])
def test_an_endpoint_that_is_no_url_is_refused(url: str) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match="http://HOST:PORT"):
            async with open_etcd_coordinator(EtcdAccess((url,)), "a"):
                pass

    trio.run(scenario)


@pytest.mark.parametrize("name", ["", "a/b", "n" * 65, "caf\N{LATIN SMALL LETTER E WITH ACUTE}", "a\n"])
def test_a_name_that_is_no_part_of_a_key_is_refused(name: str) -> None:
    async def scenario() -> None:
        with pytest.raises(InvalidArgument, match="a lake's name at etcd"):
            async with open_etcd_coordinator(EtcdAccess(("http://127.0.0.1:1",)), name):
                pass

    trio.run(scenario)


def test_lakes_at_one_etcd_see_nothing_of_each_other(faults_etcd: Path) -> None:
    async def scenario() -> None:
        access = EtcdAccess(((faults_etcd / URL_FILE).read_text(),))
        async with (
            open_etcd_coordinator(access, "neighbour") as one,
            open_etcd_coordinator(access, "neighbour2") as other,
        ):
            begun = await put(one, b"a", b"one")
            await put(other, b"a", b"other")
            await put(other, b"b", b"other")
            assert (await entry_of(one, b"a")).value == b"one"
            page = await one.range(b"\0", b"\xff" * 256, limit=10)
            assert [entry.key for entry in page.entries] == [b"a"], "no marker either"
            async with one.watch(b"\0", b"\xff" * 256, begun) as watch:
                last = await put(one, b"b", b"one")
                assert [(await next_changes(watch)).revision for _ in range(2)] == [begun, last]

    trio.run(scenario)


def test_a_wrong_user_is_refused_and_a_token_that_is_not_known_any_more_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_link, "ETCD_CALL_S", 4.0)
    with running_etcd(tmp_path / "etcd") as cluster:
        [url] = cluster.urls
        for user, password in (("root", "secret-of-root"), ("lake", "secret-of-lake")):
            etcdctl([url], "user", "add", f"{user}:{password}")
        etcdctl([url], "role", "add", "lake")
        etcdctl([url], "role", "grant-permission", "lake", "--prefix=true", "readwrite", "/lake/mine/")
        etcdctl([url], "user", "grant-role", "lake", "lake")
        etcdctl([url], "user", "grant-role", "root", "root")
        etcdctl([url], "auth", "enable")

        async def scenario() -> None:
            right = EtcdAccess((url,), user="lake", password="secret-of-lake")
            assert "secret" not in repr(right)
            async with open_etcd_coordinator(right, "mine") as coordinator:
                await coordinator.connect()
                await coordinator.make_room()
                first = await put(coordinator, b"a", b"1")
                async with coordinator.watch(b"a", b"b", first) as watch:
                    assert (await next_changes(watch)).revision == first
                    await trio.to_thread.run_sync(_restart, cluster.nodes[0], cluster)
                    second = await put(coordinator, b"a", b"2")
                    with trio.fail_after(20):
                        assert (await next_changes(watch)).revision == second
            for wrong, lake in (
                (EtcdAccess((url,), user="lake", password="secret-of-none"), "mine"),
                (EtcdAccess((url,), user="none", password="secret-of-lake"), "mine"),
                (EtcdAccess((url,)), "mine"),
                (right, "another"),
            ):
                async with open_etcd_coordinator(wrong, lake) as coordinator:
                    with pytest.raises(PermissionDenied, match="check the user") as refused:
                        await coordinator.connect()
                    assert "secret" not in str(refused.value)
                    with pytest.raises(EngineUnreachable, match="check the user"):
                        await coordinator.transact([], [Put(b"a", b"")])

        trio.run(scenario)


def test_an_etcd_at_its_quota_refuses_what_grows_and_does_what_removes(tmp_path: Path) -> None:
    options = ("--quota-backend-bytes", str(4 * MIB))
    with running_etcd(tmp_path / "etcd", options=options) as cluster:

        async def scenario() -> None:
            async with open_etcd_coordinator(EtcdAccess(cluster.urls), "full") as coordinator:
                lease = await coordinator.lease(60)
                with pytest.raises(StoreFull, match="raise its quota"):
                    for number in range(100):  # etcd counts what it has a little later
                        await put(coordinator, b"a%d" % number, bytes(MIB))
                assert (await entry_of(coordinator, b"a0")).value == bytes(MIB)
                assert await coordinator.keep_alive(lease)
                for compares in ([], [IsAbsent(b"a0")]):
                    for again in (False, True):
                        with pytest.raises(StoreFull):
                            await coordinator.transact(compares, [Put(b"b", b"")], is_repeatable=again)
                assert (await coordinator.transact([HasValue(b"a0", bytes(MIB))], [Delete(b"a0")])).succeeded
                await coordinator.revoke(lease)
                note: list[Operation] = [Put(b"note", b"a1"), Delete(b"a1")]
                assert (await coordinator.transact([], note)).succeeded, "little is noted beside a removal"
                with pytest.raises(StoreFull):
                    await coordinator.transact([], [Put(b"note", bytes(2000)), Delete(b"a2")])
                for number in range(100):
                    await coordinator.transact([], [Delete(b"a%d" % number)], is_repeatable=True)
                await coordinator.compact((await coordinator.get(b"a0")).revision)
                with pytest.raises(StoreFull):
                    await put(coordinator, b"b")
                with trio.fail_after(20):
                    await coordinator.make_room()
                for number in range(3):
                    await put(coordinator, b"a%d" % number, bytes(MIB // 2))
                await coordinator.make_room()

        trio.run(scenario)


def test_certificates_are_checked_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_link, "ETCD_CALL_S", 0.4)
    files = {name: tmp_path / name for name in ("server.pem", "server.key", "client.pem", "client.key")}
    (tmp_path / "other").mkdir()
    authority, other = Authority(tmp_path), Authority(tmp_path / "other")
    authority.issue("server", files["server.pem"], files["server.key"])
    authority.issue("client", files["client.pem"], files["client.key"])
    options = (
        *("--cert-file", str(files["server.pem"]), "--key-file", str(files["server.key"])),
        *("--client-cert-auth", "--trusted-ca-file", str(authority.path)),
    )
    certificate, key = files["client.pem"].read_bytes(), files["client.key"].read_bytes()
    with running_etcd(tmp_path / "etcd", scheme="https", options=options) as cluster:

        async def scenario() -> None:
            right = EtcdAccess(cluster.urls, authority.path.read_bytes(), certificate, key)
            assert "PRIVATE" not in repr(right)
            with trio.fail_after(20):
                async with open_etcd_coordinator(right, "sealed") as coordinator:
                    while True:
                        try:
                            await coordinator.connect()
                            break
                        except EngineUnreachable:
                            await trio.sleep(0.1)
                    assert (await coordinator.transact([], [Put(b"a", b"1")])).succeeded
            for wrong in (
                EtcdAccess(cluster.urls, other.path.read_bytes(), certificate, key),
                EtcdAccess(cluster.urls, authority.path.read_bytes()),
                EtcdAccess(tuple(url.replace("https", "http") for url in cluster.urls)),
            ):
                async with open_etcd_coordinator(wrong, "sealed") as coordinator:
                    with trio.fail_after(10), pytest.raises(EngineUnreachable):
                        await coordinator.connect()

        trio.run(scenario)


def _restart(node: EtcdNode, cluster: EtcdCluster) -> None:
    node.kill()
    node.start(cluster.names)
