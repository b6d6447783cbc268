"""An etcd as an operator gives it, the machine's record keeps it, and a process opens it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import trio

from engine.coordinator.records import EtcdRecord
from engine.lake.etcd_place import EtcdPlace, access_of, joined_place, place_in, place_of, record_of
from engine.lake.joining import Place, open_to_machines
from engine.lake.lake_etcd import check_etcd, open_lake_etcd
from engine.lake.machine import MachineRecord, new_machine, read_machine, with_etcd, write_machine
from lakefs.errors import ConfigError, EngineUnreachable, InvalidArgument, LakeError, PreconditionFailed, StoreUnusable

LAKE = bytes(range(16))
URLS = "https://10.0.0.1:2379, https://10.0.0.2:2379"
SETTLED = EtcdPlace(("http://10.0.0.1:2379",), LAKE.hex(), cluster="ab", incarnation="cd" * 16)


def test_a_place_is_kept_whole_and_no_secret_with_it(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret\n")
    password.chmod(0o600)
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text(f"PEM of {name}")
    files = {name: str(tmp_path / file) for name, file in (("ca", "ca"), ("certificate", "cert"), ("key", "key"))}
    place = place_of(URLS, "mine", user="lake", password_file=str(password), **files)
    assert place.endpoints == ("https://10.0.0.1:2379", "https://10.0.0.2:2379")
    assert place.words == "the etcd at 10.0.0.1:2379,10.0.0.2:2379 (lake mine)"
    record = with_etcd(new_machine(LAKE), place)
    write_machine(tmp_path, record)
    assert read_machine(tmp_path) == record
    kept = (tmp_path / "machine.json").read_text()
    assert "secret" not in kept
    assert "PEM" not in kept
    access = access_of(msgspec.structs.replace(place, cluster="1f"))
    assert (access.user, access.password, access.cluster) == ("lake", "secret", 31)
    assert (access.ca, access.certificate, access.key) == (b"PEM of ca", b"PEM of cert", b"PEM of key")
    assert place_in(record_of(place)) == place


def test_paths_are_kept_as_absolute_ones() -> None:
    place = place_of("http://a:1", "mine", user="u", password_file="secret")
    assert place.password_file == str(Path.cwd() / "secret")


@pytest.mark.parametrize(
    ("urls", "options", "message"),
    [
        ("", {}, "1 to 9 URLs"),
        (",".join(f"http://a:{port}" for port in range(1, 11)), {}, "1 to 9 URLs"),
        ("10.0.0.1:2379", {}, "http://HOST:PORT"),
        ("http://10.0.0.1", {}, "http://HOST:PORT"),
        ("http://10.0.0.1:99999", {}, "http://HOST:PORT"),
        ("http://10.0.0.1:2379/v3", {}, "http://HOST:PORT"),
        ("http://root:hush@10.0.0.1:2379", {}, "options of their own"),
        ("http://a:1", {"user": "lake"}, "--etcd-password-file"),
        ("http://a:1", {"password_file": "p"}, "--etcd-user"),
        ("https://a:1", {"certificate": "p"}, "--etcd-key"),
        ("https://a:1,http://b:1", {"ca": "p"}, "https://HOST:PORT"),
    ],
)
def test_a_place_that_is_none_is_refused(urls: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as refused:
        place_of(urls, "mine", **options)
    assert "hush" not in f"{refused.value} {refused.value.subject}"


def _missing(path: Path) -> None:
    path.unlink()


def _open_to_others(path: Path) -> None:
    path.chmod(0o644)


def _empty(path: Path) -> None:
    path.write_text("\n")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(_missing, "cannot be read"), (_open_to_others, "run: chmod 600"), (_empty, "is empty; write the password")],
)
def test_a_password_that_cannot_be_used_is_refused(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    path = tmp_path / "password"
    path.write_text("secret")
    path.chmod(0o600)
    spoil(path)
    with pytest.raises(ConfigError, match=message):
        access_of(place_of("http://a:1", "mine", user="lake", password_file=str(path)))


def test_a_release_without_etcd_refuses_the_record() -> None:
    record = new_machine(LAKE)
    there = with_etcd(record, SETTLED)
    assert (there.version, there.number) == (2, record.number + 1)
    assert with_etcd(there, SETTLED) == there
    back = with_etcd(there, None)
    assert (back.version, back.etcd, back.number) == (1, None, record.number + 2)


# --- init and join -----------------------------------------------------------------------------------


def init(folder: Path, etcd: EtcdPlace | None = None, *, no_etcd: bool = False) -> MachineRecord:
    place = Place("10.0.0.4:9100", etcd=etcd, no_etcd=no_etcd)
    return open_to_machines([folder], "prod", place, protect="1+0", accept_loss=True)


def test_an_operator_says_and_takes_back_the_etcd_of_a_lake(tmp_path: Path) -> None:
    wanted = place_of("http://10.0.0.1:2379", "")
    first = init(tmp_path, wanted)
    assert first.etcd == msgspec.structs.replace(wanted, name=first.lake), "its name is the lake's id"
    assert init(tmp_path).etcd == first.etcd, "it stays"
    moved = with_etcd(first, msgspec.structs.replace(first.etcd, cluster="ab", incarnation="cd" * 16))
    write_machine(tmp_path, moved)
    elsewhere = place_of("http://10.0.0.9:2379", "")
    again = init(tmp_path, elsewhere)
    assert again.etcd == EtcdPlace(elsewhere.endpoints, first.lake, cluster="ab", incarnation="cd" * 16)
    with pytest.raises(PreconditionFailed, match=r"under the name .*--no-etcd"):
        init(tmp_path, place_of("http://10.0.0.9:2379", "another"))
    leaving = init(tmp_path, no_etcd=True)
    assert leaving.etcd == msgspec.structs.replace(again.etcd, leaves=True)
    assert init(tmp_path, no_etcd=True) == leaving
    stays = init(tmp_path, elsewhere).etcd
    assert stays is not None
    assert not stays.is_settled, "a move that may have begun is settled by another one"
    assert (stays.cluster, stays.incarnation) == ("ab", "")
    write_machine(tmp_path, with_etcd(leaving, None))
    assert init(tmp_path, no_etcd=True).etcd is None


def test_nothing_is_written_when_the_etcd_is_refused(tmp_path: Path) -> None:
    def refuse(place: EtcdPlace, lake: bytes) -> None:
        assert place.name == lake.hex()
        raise EngineUnreachable("nothing there")

    place = Place("10.0.0.4:9100", etcd=place_of("http://10.0.0.1:2379", ""))
    with pytest.raises(EngineUnreachable):
        open_to_machines([tmp_path], "prod", place, protect="1+0", accept_loss=True, check_etcd=refuse)
    assert read_machine(tmp_path) is None


def test_a_machine_that_joins_may_have_endpoints_and_files_of_its_own() -> None:
    given = place_of("https://127.0.0.1:2379", "", ca="/here/ca")
    own = msgspec.structs.replace(given, is_own=True)
    assert joined_place(SETTLED, None) == SETTLED
    assert joined_place(SETTLED, given) == SETTLED, "these were the lake's of an earlier time"
    wanted = EtcdPlace(own.endpoints, SETTLED.name, ca="/here/ca", cluster="ab", incarnation="cd" * 16, is_own=True)
    assert joined_place(SETTLED, own) == wanted
    assert record_of(wanted) == EtcdRecord(
        own.endpoints, SETTLED.name, ca="/here/ca", cluster="ab", incarnation="cd" * 16
    )


# --- a real one --------------------------------------------------------------------------------------


def test_an_etcd_that_was_made_anew_is_refused_and_said(tmp_path: Path) -> None:
    from engine.coordinator.moving import take_charge
    from tests.etcd_rig import running_etcd

    def state_of(place: EtcdPlace) -> tuple[EtcdPlace, LakeError | None]:
        """Open the etcd as a start of the lake does; return the place with its cluster, and the refusal."""

        async def opened() -> tuple[EtcdPlace, LakeError | None]:
            with trio.fail_after(20):
                async with open_lake_etcd(place, LAKE) as etcd:
                    try:
                        await etcd.wait()
                    except LakeError as error:
                        return place, error
                    return msgspec.structs.replace(place, cluster=etcd.cluster), None

        return trio.run(opened)

    async def take(place: EtcdPlace) -> None:
        async with open_lake_etcd(place, LAKE) as etcd:
            await take_charge(etcd.side.coordinator, LAKE)

    with running_etcd(tmp_path / "one") as one, running_etcd(tmp_path / "other") as other:
        place = EtcdPlace(one.urls, "mine")
        _, refusal = state_of(place)
        assert isinstance(refusal, StoreUnusable)
        assert "came back empty, or is another one" in refusal.message
        trio.run(take, place)
        place, refusal = state_of(place)
        assert refusal is None
        assert place.cluster
        assert state_of(place)[1] is None
        trio.run(check_etcd, place, LAKE)
        with pytest.raises(PreconditionFailed, match=f"holds another lake, {LAKE.hex()}"):
            trio.run(check_etcd, place, LAKE[::-1])
        _, refusal = state_of(msgspec.structs.replace(place, endpoints=other.urls))
        assert isinstance(refusal, StoreUnusable)
        assert "is another cluster" in refusal.message
        _, refusal = state_of(msgspec.structs.replace(place, incarnation="00" * 16))
        assert isinstance(refusal, StoreUnusable)
        assert "moved there another time" in refusal.message
