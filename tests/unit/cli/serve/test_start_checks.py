"""The checks of `lake serve` before its first start makes anything; `lake doctor` shows the same checks."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import trio

from cli.serve.start_checks import CHECKS, check_first_start
from lakefs.config import settings as config
from lakefs.config.settings import load
from lakefs.errors import AddressInUse, ConfigError, InvalidArgument, LakeError, LocalFileError

GOOD = {"s3": "off", "admin": "off"}


def checked(place: Path, **flags: str) -> None:
    """Run the checks for a new store in a folder."""
    places = {"data": f"{place}/new/store", "socket": f"{place}/run/s"}
    trio.run(check_first_start, load(file="/dev/null", environ={}, flags=places | GOOD | flags))


@pytest.mark.parametrize(
    ("flags", "error", "why"),
    [
        ({"s3": "TAKEN"}, AddressInUse, "S3 port TAKEN is taken"),
        ({"admin": "TAKEN"}, AddressInUse, "admin port TAKEN is taken"),
        ({"native": "TAKEN"}, AddressInUse, "TAKEN is taken"),
        ({"socket_group": "no-such-group"}, ConfigError, "no group 'no-such-group'"),
        ({"s3_tls_cert": "/none", "s3_tls_key": "/none"}, ConfigError, "/none"),
        ({"s3": "127.0.0.1:0", "s3_access_log": "/none/log"}, LocalFileError, "/none/log: its folder"),
        ({"data": "PLACE/file"}, LocalFileError, "PLACE/file is no folder; choose another with --data"),
        ({"data": "PLACE/file/x"}, LocalFileError, "PLACE/file is no folder; choose another with --data"),
        ({"socket": "PLACE/file/s"}, LocalFileError, "choose another place with --socket"),
        ({"socket": "PLACE/file"}, AddressInUse, "PLACE/file exists and is no socket"),
        ({"socket": "PLACE/taken"}, AddressInUse, "an engine already serves at unix:PLACE/taken"),
    ],
)
def test_each_thing_that_would_fail_is_told_and_nothing_is_made(
    tmp_path: Path, flags: dict[str, str], error: type[LakeError], why: str
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with socket.create_server(("127.0.0.1", 0)) as other, socket.socket(socket.AF_UNIX) as engine:
        engine.bind(f"{tmp_path}/taken")
        engine.listen()
        words = {"TAKEN": f"127.0.0.1:{other.getsockname()[1]}", "PLACE": str(tmp_path)}
        for word, meaning in words.items():
            flags = {name: value.replace(word, meaning) for name, value in flags.items()}
            why = why.replace(word, meaning)
        with pytest.raises(error) as told:
            checked(tmp_path, **flags)
    assert why in told.value.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]


def test_good_settings_pass_every_check_and_nothing_is_made(tmp_path: Path) -> None:
    checked(tmp_path, s3="127.0.0.1:0", admin="127.0.0.1:0", native="127.0.0.1:0", s3_access_log=f"{tmp_path}/log")
    assert list(tmp_path.iterdir()) == []
    assert len(CHECKS) == 9


def test_a_store_that_exists_is_not_checked(tmp_path: Path) -> None:
    (tmp_path / "new" / "store").mkdir(parents=True)
    (tmp_path / "new" / "store" / "superblock").write_bytes(b"")
    checked(tmp_path, socket_group="no-such-group")


def test_only_a_user_s_default_store_is_refused_beside_the_system_s_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(uid: int, environ: dict[str, str]) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: uid)
        found = load(file="/dev/null", environ={"HOME": str(tmp_path)} | environ, flags=GOOD)
        trio.run(dict(CHECKS)["other engines"], found)

    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(f"{tmp_path}/system")
        engine.listen()
        monkeypatch.setattr("cli.serve.start_checks.SYSTEM_SOCKET", tmp_path / "system")
        with pytest.raises(InvalidArgument, match="lake serve --data"):
            check(4711, {})
        check(4711, {"LAKE_DATA": f"{tmp_path}/own"})
        check(0, {})
        check(4711, {"STATE_DIRECTORY": str(config.SYSTEM_DATA), "RUNTIME_DIRECTORY": "/run/lake"})
    check(4711, {})
